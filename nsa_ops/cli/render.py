"""The only module that draws: results as plain tables and lines, in colour only on a terminal."""

from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nsa_core.config.profile import HardwareProfile
from nsa_core.rundir.events import Event
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.report import CheckResult
from nsa_ops.plan import Plan
from nsa_ops.runs.configure import Checked, Value
from nsa_ops.runs.estimate import Estimate
from nsa_ops.runs.halt import Halted
from nsa_ops.runs.launch import Launched
from nsa_ops.runs.pods import PodDetails
from nsa_ops.runs.preflight import Preflight
from nsa_ops.runs.resume import Resumed
from nsa_ops.runs.signals import Saved, Stacks
from nsa_ops.runs.status import RunStatusLine, current_step
from nsa_ops.runs.watch import Frame
from nsa_ops.store import PodRecord, RunRecord

_PIPE_WIDTH = 200


def make_console(color: str, *, is_color_forbidden: bool) -> Console:
    """A console on stdout: colour as asked, wide and plain off a terminal."""
    probe = Console()
    wanted = color == "always" or (color == "auto" and probe.is_terminal and not is_color_forbidden)
    return Console(
        highlight=False,
        no_color=not wanted,
        force_terminal=True if color == "always" else None,
        width=None if probe.is_terminal else _PIPE_WIDTH,
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A plain table: no frame, two spaces between columns."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        drawn.add_column(heading, overflow="fold")
    for row in rows:
        drawn.add_row(*(escape(_text(cell)) for cell in row))
    return drawn


def facts(console: Console, pairs: Sequence[tuple[str, object]]) -> None:
    """Names and values, one pair a line; empty values are left out."""
    kept = [pair for pair in pairs if pair[1] not in {None, ""}]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        line(console, f"{name:<{width}}  {_text(value)}")


def line(console: Console, text: str) -> None:
    """One line of text as it is, without markup."""
    console.print(text, markup=False, soft_wrap=True)


def moment(unix_s: float) -> str:
    """A time in UTC to the second."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return str(value)


def plan_lines(plan: Plan) -> list[str]:
    """A plan as lines: what, with which command, writing which files."""
    lines = [f"plan: {plan.title}"]
    for number, step in enumerate(plan.steps, start=1):
        mark = " (done already)" if step.is_done else ""
        lines.append(f"  {number}. {step.name}: {step.detail}{mark}")
        if step.command:
            lines.append(f"     $ {step.shell}")
        lines += [f"     -> {file}" for file in step.files]
    return lines + [f"  note: {note}" for note in plan.notes]


def draw_plan(console: Console, plan: Plan) -> None:
    """A plan on stdout."""
    for text in plan_lines(plan):
        line(console, text)


def draw_pod(console: Console, pod: PodRecord) -> None:
    """One pod."""
    facts(
        console,
        [
            ("pod", pod.name),
            ("is", "this machine" if pod.kind == "local" else pod.kind),
            ("root", pod.root),
            ("python", pod.python),
            ("profile", pod.profile or "not set"),
            ("added", moment(pod.added_unix_s)),
        ],
    )


def draw_pods(console: Console, pods: list[PodRecord]) -> None:
    """Pods in a table."""
    if not pods:
        line(console, "no pods; add this machine with `nsa-ops pod add here local`")
        return
    rows = [(pod.name, pod.kind, pod.profile or "-", pod.root) for pod in pods]
    console.print(table(["POD", "KIND", "PROFILE", "ROOT"], rows))


def draw_pod_details(console: Console, details: PodDetails) -> None:
    """A pod and its runs."""
    draw_pod(console, details.pod)
    draw_run_records(console, details.runs)


def draw_forgotten(console: Console, pod: PodRecord) -> None:
    """The pod that is forgotten now."""
    line(console, f"forgot pod {pod.name}; its files stay in {pod.root}")


def draw_run_records(console: Console, runs: list[RunRecord]) -> None:
    """Runs as the registry knows them."""
    if not runs:
        line(console, "no runs yet")
        return
    rows = [
        (run.run_id, run.pod, run.recipe, run.profile, moment(run.launched_unix_s)) for run in runs
    ]
    console.print(table(["RUN", "POD", "RECIPE", "PROFILE", "LAUNCHED"], rows))


def draw_checked(console: Console, checked: Checked) -> None:
    """A configuration that can be used."""
    line(console, f"recipe {checked.recipe} with profile {checked.profile} can be used")
    facts(console, [("sha256", checked.sha256), ("values set", checked.num_overridden)])
    for note in checked.notes:
        line(console, f"note: {note}")


def draw_values(console: Console, values: list[Value]) -> None:
    """Values by key."""
    console.print(table(["KEY", "VALUE"], [(value.key, value.value) for value in values]))


def draw_values_with_origin(console: Console, values: list[Value]) -> None:
    """Values by key with who set them."""
    rows = [(value.key, value.value, value.origin) for value in values]
    console.print(table(["KEY", "VALUE", "ORIGIN"], rows))


def draw_reasons(console: Console, values: list[Value]) -> None:
    """Values that a profile decides, with the reason."""
    rows = [(value.key, value.value, value.reason or "-") for value in values]
    console.print(table(["KEY", "VALUE", "WHY"], rows))


def draw_profiles(console: Console, profiles: list[HardwareProfile]) -> None:
    """Hardware profiles in a table."""
    rows = [
        (profile.name, _capability(profile), profile.precisions, profile.description)
        for profile in profiles
    ]
    console.print(table(["PROFILE", "CAPABILITY", "PRECISIONS", "IS"], rows))


def _capability(profile: HardwareProfile) -> str:
    capability = profile.compute_capability
    return "-" if capability is None else f"{capability:.1f}"


def draw_profile(console: Console, profile: HardwareProfile) -> None:
    """One hardware profile, field by field."""
    pairs: list[tuple[str, Any]] = []
    for name, value in profile.model_dump(exclude={"config", "reasons", "batch_tiers"}).items():
        pairs += (
            [(f"{name}.{key}", item) for key, item in value.items()]
            if isinstance(value, dict)
            else [(name, value)]
        )
    pairs += [(f"config {key}", value) for key, value in profile.config.items()]
    for tier in profile.batch_tiers:
        batches = ", ".join(f"{count} x {length}" for length, count in tier.micro_batch.items())
        pairs.append((f"batch from {tier.min_memory_gib:g} GiB", batches))
    facts(console, pairs)


_MARKS = {"pass": "ok", "warn": "warn", "fail": "FAIL", "unknown": "?", "skipped": "-"}
_COLORS = {"pass": "green", "warn": "yellow", "fail": "red", "unknown": "yellow", "skipped": "dim"}
_BARS = "▁▂▃▄▅▆▇█"


def draw_checks(console: Console, checks: Sequence[CheckResult]) -> None:
    """Checks in one table; each that is not well is followed by what to do."""
    drawn = table(["", "CHECK", "FOUND", "LIMIT"], [])
    for check in checks:
        drawn.add_row(
            f"[{_COLORS[check.status]}]{_MARKS[check.status]}[/]",
            escape(check.name),
            escape(check.message),
            escape(check.limit),
        )
    console.print(drawn)
    for check in checks:
        if check.hint and check.status in {"warn", "fail", "unknown"}:
            line(console, f"{check.name}: {check.hint}")


def draw_preflight(console: Console, found: Preflight) -> None:
    """The table of a preflight and its one verdict."""
    draw_checks(console, found.report.checks)
    if found.is_green:
        warned = " with warnings" if found.verdict == "warn" else ""
        line(console, f"verdict: green{warned}; `nsa-ops launch --profile {found.report.profile}`")
    else:
        line(console, f"verdict: red because of {', '.join(found.blocking)}")


def draw_launched(console: Console, launched: Launched) -> None:
    """A run that is there now."""
    after = launched.first_beat_after_s
    come = "launched before" if after is None else f"first heartbeat after {after:.0f} s"
    line(console, f"{launched.run_id} on pod {launched.pod}: {come}")
    pairs = [
        ("state", f"{launched.state} ({launched.why})"),
        ("attempt", launched.attempt),
        ("directory", launched.run_dir),
        ("next", f"nsa-ops watch {launched.run_id}"),
    ]
    facts(console, pairs)


def draw_halted(console: Console, halted: Halted) -> None:
    """A run that does not run, and what it left."""
    told = " after TERM" if halted.needed_term else ""
    line(console, f"{halted.run_id} is {halted.state}{told}: {halted.why}")
    for damage in halted.damaged:
        line(console, f"not whole: {damage}")
    checkpoint = halted.checkpoint
    if checkpoint is None:
        line(console, "there is no whole checkpoint; a resume begins with the first step")
        return
    behind = f", {halted.lost_steps} steps behind" if halted.lost_steps else ""
    line(console, f"verified checkpoint: step {checkpoint.step}{behind}, {checkpoint.path}")
    line(console, f"go on with `nsa-ops resume {halted.run_id}`")


def draw_resumed(console: Console, resumed: Resumed) -> None:
    """A run that goes on."""
    after = f"first heartbeat after {resumed.first_beat_after_s:.0f} s"
    where = f"from step {resumed.from_step}" if resumed.checkpoint else "from the first step"
    line(console, f"{resumed.run_id} attempt {resumed.attempt} {where}: {after}")
    for one in resumed.differences:
        line(console, f"differs: {one.key} {_text(one.before)} -> {_text(one.now)}")
    if not resumed.differences:
        line(console, "configuration: the same as before")
    facts(console, [("state", f"{resumed.state} ({resumed.why})")])


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
    newest = next((fact for fact in report.checkpoints if fact.whole), None)
    beat = report.last_beat
    pairs: list[tuple[str, Any]] = [
        ("attempt", report.manifest.attempt),
        ("step", f"{current_step(report)} of {report.manifest.steps}"),
        ("last record", progress_line(beat) if beat and beat.loss is not None else ""),
        ("health", f"{report.verdict.level}: {report.verdict.sentence}"),
        ("checkpoint", f"step {newest.step}" if newest else "none yet"),
        ("backup", _backup(run)),
    ]
    facts(console, pairs)


def _backup(run: RunStatusLine) -> str:
    if run.backup_step is None:
        return f"none: without its pod you lose all {run.lost_steps} steps"
    return f"step {run.backup_step}: without its pod you lose at most {run.lost_steps} steps"


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
        ("launched", moment(run.record.launched_unix_s)),
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
        line(console, f"watchdog: {alive}, {watchdog.doing} {watchdog.why}".rstrip())


def draw_events(console: Console, events: list[Event]) -> None:
    """Events, oldest first."""
    rows = [(event.iso, event.attempt, event.kind, event.by, event.message) for event in events]
    console.print(table(["WHEN", "ATTEMPT", "WHAT", "BY", "MESSAGE"], rows))


def draw_stacks(console: Console, stacks: Stacks) -> None:
    """Stacks as the trainer wrote them."""
    line(console, stacks.text.rstrip())


def draw_saved(console: Console, saved: Saved) -> None:
    """A checkpoint that was saved on request."""
    fact = saved.checkpoint
    line(console, f"{saved.run_id} saved {fact.name} after {saved.seconds:.0f} s")


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
        ("disk", f"{gib(estimate.disk_bytes)} for all that are kept"),
    ]
    if estimate.best_tokens_per_s is not None and estimate.shortest_hours is not None:
        best = f"at most {estimate.best_tokens_per_s:,.0f} tokens/s on one card"
        pairs.append(("speed", f"{best}, so {estimate.shortest_hours:.1f} hours or more"))
    facts(console, pairs)


def gib(num_bytes: int | None) -> str:
    """Bytes in the unit that people read; unknown stays unknown."""
    if num_bytes is None:
        return "unknown"
    mib = num_bytes / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"


def progress_line(beat: Heartbeat) -> str:
    """One record in one line."""
    parts = [f"step {beat.step:>6}", f"loss {beat.loss:.4f}" if beat.loss is not None else ""]
    if beat.tokens_per_s is not None:
        parts.append(f"{beat.tokens_per_s:,.0f} tokens/s")
    if beat.lr is not None:
        parts.append(f"lr {beat.lr:.2e}")
    if beat.grad_norm is not None:
        parts.append(f"grad {beat.grad_norm:.2f}")
    if beat.gpu_mem_peak is not None:
        parts.append(f"{beat.gpu_mem_peak} MiB")
    return "  ".join(part for part in parts if part)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values as bars of eight heights, the newest on the right; thinned out to the width."""
    kept = [value for value in values if isfinite(value)]
    if not kept:
        return ""
    shown = kept[:: max(1, -(-len(kept) // width))]
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in shown)


def frame_lines(frame: Frame) -> list[str]:
    """A watched run in a few lines."""
    report = frame.report
    beat = next((one for one in reversed(frame.progress)), report.last_beat)
    flags = f" [{', '.join(report.flags)}]" if report.flags else ""
    lines = [
        f"{report.run_id}  attempt {report.manifest.attempt}  {report.state}{flags}",
        report.why,
        f"step {current_step(report)} of {report.manifest.steps}",
        f"health {report.verdict.level}: {report.verdict.sentence}",
    ]
    if beat is not None and beat.loss is not None:
        lines.append(progress_line(beat))
        lines += _curves(frame.progress)
        lines += _gates(beat)
    return lines


def _curves(progress: Sequence[Heartbeat]) -> list[str]:
    curves = {
        "loss": [beat.loss for beat in progress],
        "tokens/s": [beat.tokens_per_s for beat in progress],
    }
    return [
        f"{name:<9} {sparkline([value for value in values if value is not None])}"
        for name, values in curves.items()
        if any(value is not None for value in values)
    ]


def _gates(beat: Heartbeat) -> list[str]:
    shares = beat.gate_branch_shares
    if not shares:
        return []
    named = ", ".join(
        f"{name} {share:.2f}"
        for name, share in zip(("compressed", "selected", "sliding"), shares, strict=False)
    )
    return [f"gates     {named}"]


def frame_view(frame: Frame) -> Text:
    """A watched run for the live view."""
    return Text("\n".join(frame_lines(frame)))


def draw_frame(console: Console, frame: Frame) -> None:
    """A watched run once."""
    for text in frame_lines(frame):
        line(console, text)
