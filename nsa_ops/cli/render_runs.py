"""Draw runs: launched, halted, resumed, in a list, in full."""

from typing import Any

from rich.console import Console

from nsa_core.rundir.data_account import DataAccount
from nsa_core.rundir.events import Event
from nsa_ops.cli.render import cell_text, facts, gib, line, table
from nsa_ops.cli.render_watch import crash_text, progress_line
from nsa_ops.pod.messages import RunReport
from nsa_ops.quantities import format_time
from nsa_ops.runs.estimate import Estimate
from nsa_ops.runs.halt import Halted
from nsa_ops.runs.launch import Launched
from nsa_ops.runs.log_health import LogHealth
from nsa_ops.runs.prove import ProvenResume
from nsa_ops.runs.resume import Resumed
from nsa_ops.runs.signals import Saved, Stacks
from nsa_ops.runs.status import RunStatusLine, current_step
from nsa_ops.runs.tunnel import Tunnel


def draw_launched(console: Console, launched: Launched) -> None:
    """A run that is there now."""
    after = launched.first_beat_after_s
    come = "launched before" if after is None else f"first heartbeat after {after:.0f} s"
    line(console, f"{launched.run_id} on pod {launched.pod}: {come}")
    pairs = [
        ("state", f"{launched.state} ({launched.why})"),
        ("attempt", launched.attempt),
        ("directory", launched.run_dir),
        ("data", data_text(launched.data)),
        ("next", f"nsa-ops watch {launched.run_id}"),
    ]
    facts(console, pairs)


def draw_halted(console: Console, halted: Halted) -> None:
    """A run that does not run, and what it left."""
    told = f" after {' and '.join(halted.signals)}" if halted.signals else ""
    line(console, f"{halted.run_id} is {halted.state}{told}: {halted.why}")
    for damage in halted.damaged:
        line(console, f"not whole: {damage}")
    checkpoint = halted.checkpoint
    if checkpoint is None:
        line(console, "there is no whole checkpoint; a resume begins with the first step")
        return
    behind = f", {halted.lost_steps} steps behind" if halted.lost_steps else ""
    line(console, f"verified checkpoint: step {checkpoint.step}{behind}, {checkpoint.path}")
    if halted.state != "finished":
        line(console, f"go on with `nsa-ops resume {halted.run_id}`")


def draw_resumed(console: Console, resumed: Resumed) -> None:
    """A run that goes on."""
    after = f"first heartbeat after {resumed.first_beat_after_s:.0f} s"
    where = f"from step {resumed.from_step}" if resumed.checkpoint else "from the first step"
    moved = f" on pod {resumed.pod}, not on {resumed.moved_from}" if resumed.moved_from else ""
    line(console, f"{resumed.run_id} attempt {resumed.attempt} {where}{moved}: {after}")
    for one in resumed.differences:
        line(console, f"differs: {one.key} {cell_text(one.before)} -> {cell_text(one.now)}")
    if not resumed.differences:
        line(console, "configuration: the same as before")
    facts(console, [("state", f"{resumed.state} ({resumed.why})")])


def draw_proven(console: Console, proven: ProvenResume) -> None:
    """A resume and the steps that were done twice."""
    draw_resumed(console, proven.resumed)
    replay = proven.replay
    line(
        console,
        f"exact: {replay.num_compared} losses of steps {replay.first_step} to {replay.last_step} "
        "are the same to the last digit",
    )


def draw_runs(console: Console, runs: list[RunStatusLine]) -> None:
    """Runs in a table."""
    if not runs:
        line(console, "no runs yet; launch one with `nsa-ops launch --profile NAME`")
        return
    rows = []
    for run in runs:
        report = run.report
        step = f"{current_step(report)}/{report.manifest.steps}" if report else "-"
        why = report.why if report else run.problem
        rows.append((run.record.run_id, run.record.pod, run.state, step, why))
    console.print(table(["RUN", "POD", "STATE", "STEP", "WHY"], rows))


def draw_status(console: Console, run: RunStatusLine) -> None:
    """One run in a few lines."""
    report = run.report
    if report is None:
        line(console, f"{run.record.run_id}: {run.problem}")
        return
    flags = f" [{', '.join(report.flags)}]" if report.flags else ""
    line(console, f"{report.run_id} is {report.state}{flags}: {report.why}")
    beat = report.last_beat
    pairs: list[tuple[str, Any]] = [
        ("attempt", report.manifest.attempt),
        ("step", f"{current_step(report)} of {report.manifest.steps}"),
        ("last record", progress_line(beat) if beat and beat.loss is not None else ""),
        ("health", f"{report.verdict.level}: {report.verdict.sentence}"),
        ("data", data_text(report.data)),
        ("checkpoint", _checkpoint_text(report)),
        ("backup", run.at_risk.sentence if run.at_risk else ""),
    ]
    facts(console, pairs)


def data_text(account: DataAccount | None) -> str:
    """What was dropped of a run's data, and why; empty if nothing was."""
    return account.sentence() if account is not None and account.needs_attention else ""


def _checkpoint_text(report: RunReport) -> str:
    """The newest one that nothing is known against, and what is wrong with newer ones."""
    facts = report.checkpoints
    newest = next((fact for fact in facts if fact.whole), None)
    newer = facts[: facts.index(newest)] if newest else facts
    sound = "none that is whole" if newer and newest is None else crash_text(report)
    return "; ".join([sound, *(f"step {fact.step} is damaged: {fact.damage}" for fact in newer)])


def draw_run(console: Console, run: RunStatusLine) -> None:
    """Everything about one run."""
    draw_status(console, run)
    report = run.report
    if report is None:
        return
    manifest = report.manifest
    pairs: list[tuple[str, Any]] = [
        ("pod", run.record.pod),
        ("directory", report.run_dir),
        ("recipe", manifest.recipe),
        ("profile", manifest.profile),
        (
            "parent",
            f"{manifest.parent.run_id} step {manifest.parent.step}" if manifest.parent else "",
        ),
        ("configuration", manifest.config_sha256),
        ("code", f"{manifest.code_id} (commit {manifest.code_commit[:12]})"),
        ("launched", format_time(run.record.launched_unix_s)),
        ("log", f"{report.log_bytes} bytes"),
        ("disk free", gib(report.disk_free_bytes)),
    ]
    facts(console, pairs)
    rows = [
        (fact.name, fact.step, "yes" if fact.whole else "no", gib(fact.size_bytes))
        for fact in report.checkpoints
    ]
    if rows:
        console.print(table(["CHECKPOINT", "STEP", "WHOLE", "SIZE"], rows))


def draw_health(console: Console, run: RunStatusLine) -> None:
    """The rules' word on a run."""
    report = run.report
    if report is None:
        line(console, f"{run.record.run_id}: {run.problem}")
        return
    line(console, f"{report.verdict.level}: {report.verdict.sentence}")
    for finding in report.verdict.findings:
        line(console, f"{finding.level} {finding.rule}: {finding.sentence}")
    watchdog = report.watchdog
    if watchdog is None:
        line(console, "watchdog: none was started")
    else:
        alive = "alive" if report.watchdog_alive else "not running"
        why = f": {watchdog.why}" if watchdog.why else ""
        line(console, f"watchdog: {alive}, {watchdog.doing}{why}")


def draw_log_health(console: Console, log: LogHealth) -> None:
    """The rules' word on a log: the first alarm of each rule and level."""
    line(console, f"{log.level}: {log.replay.num_records} records in {log.path}")
    for alarm in log.replay.alarms:
        finding = alarm.finding
        where = f"step {alarm.step}, record {alarm.record}"
        line(console, f"{finding.level} {finding.rule} at {where}: {finding.sentence}")
    if log.replay.ending:
        line(console, log.replay.ending)
    if log.num_unread:
        line(console, f"not understood: {log.num_unread} lines with figures, all of one shape")


def draw_events(console: Console, events: list[Event]) -> None:
    """Events, oldest first."""
    rows = [(event.iso, event.attempt, event.kind, event.by, event.message) for event in events]
    console.print(table(["WHEN", "ATTEMPT", "WHAT", "BY", "MESSAGE"], rows))


def draw_stacks(console: Console, stacks: Stacks) -> None:
    """Stacks as the trainer wrote them."""
    for text in stacks.text.rstrip().splitlines():
        line(console, text.expandtabs())


def draw_saved(console: Console, saved: Saved) -> None:
    """A checkpoint that was saved on request."""
    fact = saved.checkpoint
    line(console, f"{saved.run_id} saved {fact.name} after {saved.seconds:.0f} s")


def draw_tunnel(console: Console, tunnel: Tunnel) -> None:
    """Where TensorBoard is."""
    where = f"port {tunnel.pod_port} of pod {tunnel.pod}, process {tunnel.pod_pid}"
    line(console, f"TensorBoard of {tunnel.run_id}: {tunnel.url} ({where}); Ctrl-C ends it")


def draw_estimate(console: Console, estimate: Estimate) -> None:
    """What a run needs."""
    memory = estimate.memory
    pairs: list[tuple[str, Any]] = [
        ("parameters", f"{estimate.parameters.total:,}"),
        ("tokens a step", f"{estimate.tokens_per_step:,}"),
        ("tokens in all", f"{estimate.total_tokens:,}"),
        ("FLOPs a token", f"{estimate.flops.train:,.0f} in training"),
        ("memory", f"about {memory.total:,.0f} MiB at the peak of a step"),
        ("  weights", f"{memory.weights:,.0f} MiB"),
        ("  gradients", f"{memory.gradients:,.0f} MiB"),
        ("  optimizer", f"{memory.optimizer:,.0f} MiB"),
        ("  activations", f"{memory.activations:,.0f} MiB"),
        ("  logits", f"{memory.logits:,.0f} MiB"),
        ("a checkpoint", gib(estimate.checkpoint_bytes)),
        ("disk", f"{gib(estimate.disk_bytes)} for all that are kept, and the shards of the data"),
        ("data", estimate.staging.sentence()),
    ]
    if estimate.best_tokens_per_s is not None and estimate.shortest_hours is not None:
        best = f"at most {estimate.best_tokens_per_s:,.0f} tokens/s on one card"
        pairs.append(("speed", f"{best}, so {estimate.shortest_hours:.1f} hours or more"))
    facts(console, pairs)
