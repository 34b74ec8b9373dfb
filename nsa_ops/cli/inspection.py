"""Commands that inspect runs, or ask a running one for a checkpoint, stacks or TensorBoard."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_ops.cli.arguments import OnPodOption, PodOption, RunArgument, complete_run
from nsa_ops.cli.command import command
from nsa_ops.cli.console import cell_text, draw_table, envelope, facts, line
from nsa_ops.cli.session import Session
from nsa_ops.errors import ConfigurationError
from nsa_ops.quantities import count_of, format_bytes, format_time

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_core.rundir.events import Event
    from nsa_ops.health.log_health import LogHealth
    from nsa_ops.report.write import WrittenReport
    from nsa_ops.runs.adopt import Adopted
    from nsa_ops.runs.halt import Saved
    from nsa_ops.runs.rank_stacks import Stacks
    from nsa_ops.runs.status import RunStatusLine
    from nsa_ops.runs.tunnel import Tunnel
    from nsa_ops.runs.watch import Chunk

commands = typer.Typer()
run_group = typer.Typer(name="run", help="The runs that this laptop knows.")


@command(run_group, "ls", is_emergency=True)
def run_ls(session: Session, pod: PodOption = None) -> None:
    """List the runs that were launched from here, with their states."""
    from nsa_ops.runs.status import list_runs

    session.show(list_runs(session.operator, pod), draw_runs)


@command(run_group, "show", is_emergency=True)
def run_show(session: Session, run: RunArgument = None) -> None:
    """Show everything about one run."""
    from nsa_ops.runs.status import find_status

    session.show(find_status(session.operator, run), draw_run)


@command(run_group, "adopt", changes=True)
def run_adopt(session: Session, run: RunArgument = None, pod: PodOption = None) -> None:
    """Register a run that another laptop launched; changes nothing on the pod."""
    from nsa_ops.runs.adopt import execute_adopt_run, plan_adopt_run

    planned = plan_adopt_run(session.operator, run, pod)
    session.agree(planned.plan)
    session.show(execute_adopt_run(session.operator, planned), draw_adopted)


@command(commands, "report")
def report(
    session: Session,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|PATH", help="Run id, run directory or backup", autocompletion=complete_run
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="HTML file, or a folder for it")
    ] = Path(),
) -> None:
    """Write a report about a run: a self-contained HTML page, and the same as Markdown."""
    from nsa_ops.report.write import find_run_directory, write_report

    folder = find_run_directory(session.operator, run)
    now = session.operator.clock.unix_s()
    session.show(write_report(folder, out=out, now_unix_s=now), draw_written)


def draw_written(console: "Console", written: "WrittenReport") -> None:
    """Where the report is, and the outcome in one sentence."""
    line(console, written.outcome)
    facts(console, [("page", str(written.page)), ("markdown", str(written.markdown))])
    for missing in written.missing:
        line(console, f"note: {missing}")


@command(commands, "status", is_emergency=True)
def status(
    session: Session,
    run: RunArgument = None,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit code: 0 finished, 20 failed, 21 running, 22 halted by the watchdog, "
            "23 lost, 24 cancelled",
        ),
    ] = False,
    pod: OnPodOption = None,
) -> None:
    """Show what a run is doing now, and how that is known."""
    from nsa_ops.cli.render_run import draw_status
    from nsa_ops.runs.lease import other_lineage_notes, unsettled_notes
    from nsa_ops.runs.reconcile import count_cut_off
    from nsa_ops.runs.status import exit_code_of, find_status

    found = find_status(session.operator, run, pod)
    session.show(found, draw_status)
    store, record = session.operator.store, found.record
    known = replace(store.find_run(record.run_id) or record, pod=record.pod)
    shown = other_lineage_notes(known, found.report.manifest) if found.report else []
    for note in [*shown, *unsettled_notes(store, record.run_id)]:
        session.tell(note)
    if cut_off := count_cut_off(session.operator):
        session.tell(f"interrupted commands: {cut_off}; see `nsa-ops reconcile --plan`")
    if exit_code and found.report is not None:
        raise typer.Exit(exit_code_of(found.report))


@command(commands, "logs", is_emergency=True)
def logs(
    session: Session,
    run: RunArgument = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the run ends")
    ] = False,
    offset: Annotated[
        int,
        typer.Option(
            "--offset", metavar="BYTES", help="First byte; negative values count from the end"
        ),
    ] = 0,
    pod: OnPodOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write bytes unchanged; only to a file or pipe")
    ] = False,
) -> None:
    """Print a run's log; control characters are shown as escapes."""
    from nsa_ops.runs.watch import read_log

    if raw and session.options.json:
        message = "`--raw` and `--json` cannot go together"
        raise ConfigurationError(message, hint="JSON escapes every character that needs it")
    if raw:
        session.refuse_raw_terminal()
    session.interrupt_note = "the run continues"
    chunks = read_log(session.operator, run, offset=offset, follow=follow, pod=pod)
    write_log(session, chunks, is_raw=raw)


@command(commands, "health", is_emergency=True)
def health(
    session: Session,
    run: RunArgument = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", metavar="FILE", help="Judge another trainer's log instead of a run"),
    ] = None,
) -> None:
    """Show what the watchdog's rules find in a run now, or in another trainer's log.

    Exit code 25 if a rule would halt the run, 26 if too little of a log could be read.
    """
    from nsa_ops.cli.render_run import draw_health
    from nsa_ops.health.log_health import failure_of, judge_log
    from nsa_ops.runs.status import find_status, halt_verdict

    if log is not None:
        judged = judge_log(log, run)
        session.show(judged, draw_log_health, failure=failure_of(judged))
        return
    found = find_status(session.operator, run)
    session.show(found, draw_health, failure=halt_verdict(found))


@command(commands, "events", is_emergency=True)
def events(
    session: Session,
    run: RunArgument = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Include the oldest events of a long run")
    ] = False,
) -> None:
    """List what happened to a run, who did it, and why."""
    from nsa_ops.runs.status import list_events

    session.show(list_events(session.operator, run, whole=whole), draw_events)


@command(commands, "stack", is_emergency=True)
def stack(session: Session, run: RunArgument = None) -> None:
    """Show the stack traces of all threads of a running trainer."""
    from nsa_ops.runs.rank_stacks import dump_stacks

    session.show(dump_stacks(session.operator, run), draw_stacks)


@command(commands, "checkpoint", is_emergency=True)
def checkpoint(session: Session, run: RunArgument = None) -> None:
    """Ask a run to save a checkpoint now and continue."""
    from nsa_ops.runs.halt import save_now

    session.show(save_now(session.operator, run), draw_saved)


@command(commands, "tunnel", changes=True)
def tunnel(
    session: Session,
    run: RunArgument = None,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            metavar="PORT",
            help="Port of this machine; 0 picks a free one",
        ),
    ] = 0,
) -> None:
    """Show TensorBoard of a run on a port of this machine, until Ctrl-C or `--timeout`."""
    from nsa_ops.runs.tunnel import keep_open, open_tunnel, plan_tunnel

    session.interrupt_note = "the tunnel and TensorBoard have ended, and the run continues"
    planned = plan_tunnel(session.operator, run, port)
    session.agree(planned.plan)
    with open_tunnel(session.operator, planned) as live:
        session.show(live.tunnel, draw_tunnel)
        keep_open(session.operator, live, session.options.timeout_s)


def draw_runs(console: "Console", runs: "list[RunStatusLine]") -> None:
    """Runs in a table."""
    from nsa_ops.runs.status import current_step

    if not runs:
        line(console, "no runs yet; launch one with `nsa-ops launch --profile NAME`")
        return
    rows = []
    for run in runs:
        report = run.report
        step = f"{current_step(report)}/{report.manifest.steps}" if report else "-"
        why = report.why if report else run.problem
        pods = ", ".join(one.pod for one in run.record.members)
        rows.append((run.record.run_id, pods, run.state, step, why))
    draw_table(console, ["RUN", "POD", "STATE", "STEP", "WHY"], rows)


def draw_run(console: "Console", run: "RunStatusLine") -> None:
    """Everything about one run."""
    from nsa_ops.cli.render_run import draw_status
    from nsa_ops.cli.screen import ScreenLine, draw_rows

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
        ("config", f"sha256 {manifest.config_sha256}"),
        ("code", f"{manifest.code_id} (commit {manifest.code_commit[:12]})"),
        ("launched", format_time(run.record.launched_unix_s)),
        ("log", format_bytes(report.log_bytes)),
        ("disk free", format_bytes(report.disk_free_bytes)),
    ]
    draw_rows(console, [ScreenLine(name, cell_text(value)) for name, value in pairs if value])
    rows = [
        (fact.name, fact.step, "yes" if fact.whole else "no", format_bytes(fact.size_bytes))
        for fact in report.checkpoints
    ]
    if rows:
        draw_table(console, ["CHECKPOINT", "STEP", "WHOLE", "SIZE"], rows)


def draw_adopted(console: "Console", adopted: "Adopted") -> None:
    """A run that is known here now."""
    line(console, f"{adopted.run_id} on pod {adopted.pod} is known here")
    pairs = [
        ("state", f"{adopted.state} ({adopted.why})"),
        ("attempt", adopted.attempt),
        ("next", f"nsa-ops watch {adopted.run_id}"),
    ]
    facts(console, pairs)


def draw_log_health(console: "Console", log: "LogHealth") -> None:
    """What the rules find in a log: the first alarm of each rule and level, and how many came."""
    line(console, f"{log.level}: {count_of(log.replay.num_records, 'record')} in {log.path}")
    for alarm in log.replay.alarms:
        finding = alarm.finding
        where = f"step {alarm.step}, record {alarm.record}"
        line(console, f"{finding.level} {finding.rule} at {where}: {finding.sentence}")
    for rule, count in log.replay.num_findings.items():
        if count > 1:
            last = log.replay.last_steps[rule]
            records = count_of(log.replay.num_records, "record")
            seen = f"{count} of {records}, the last at step {last}"
            line(console, f"{rule} in all: on {seen}")
    if log.replay.ending:
        line(console, log.replay.ending)
    if log.num_unread:
        line(
            console,
            f"not understood: {count_of(log.num_unread, 'line')} with figures, all of one shape",
        )


def draw_events(console: "Console", events: "list[Event]") -> None:
    """Events, oldest first."""
    rows = [
        (format_time(event.ts), event.attempt, f"{event.kind} by {event.by}: {event.message}")
        for event in events
    ]
    draw_table(console, ["WHEN", "ATTEMPT", "EVENT"], rows)


def draw_stacks(console: "Console", stacks: "Stacks") -> None:
    """Stacks as the trainer wrote them."""
    for text in stacks.text.rstrip().splitlines():
        line(console, text.expandtabs())


def draw_saved(console: "Console", saved: "Saved") -> None:
    """A checkpoint that was saved on request."""
    fact = saved.checkpoint
    line(console, f"{saved.run_id} saved {fact.name} after {saved.seconds:.0f} s")


def draw_tunnel(console: "Console", tunnel: "Tunnel") -> None:
    """Where TensorBoard is."""
    where = f"port {tunnel.pod_port} of pod {tunnel.pod}, process {tunnel.pod_pid}"
    line(console, f"TensorBoard of {tunnel.run_id}: {tunnel.url} ({where}); Ctrl-C ends it")


def write_log(session: Session, chunks: "Iterator[Chunk]", *, is_raw: bool) -> None:
    """Printable lines, unchanged bytes, or JSON lines that carry text with its offsets."""
    from nsa_ops.printable import PrintableStream

    lines = PrintableStream()
    for chunk in chunks:
        if session.options.json:
            text = chunk.content.decode(errors="replace")
            data = {"offset": chunk.offset, "next_offset": chunk.next_offset, "text": text}
            typer.echo(envelope(session.command, data))
        elif is_raw:
            session.write_raw(chunk.content)
        else:
            session.write_lines(lines.feed(chunk.content))
    session.write_lines(lines.feed(b"", is_last=True))
