"""Draw runs: launched, halted, resumed, in a list, in full, as they are watched, and their logs."""

from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console

from nsa_core.rundir.events import Event
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.cli.console import cell_text, envelope, facts, line, table
from nsa_ops.cli.render_run import (
    ScreenLine,
    data_text,
    draw_frame,
    draw_rows,
    figure_rows,
    frame_view,
    progress_line,
    run_rows,
    state_row,
    verdict_rows,
)
from nsa_ops.cli.session import Session
from nsa_ops.health.log_health import LogHealth
from nsa_ops.pod.messages import RunReport
from nsa_ops.printable import PrintableStream
from nsa_ops.quantities import count_of, format_bytes, format_time
from nsa_ops.report.prove import ProvenResume
from nsa_ops.runs.adopt import Adopted
from nsa_ops.runs.halt import Halted, Saved, Stacks
from nsa_ops.runs.launch import Launched
from nsa_ops.runs.resume import Resumed
from nsa_ops.runs.status import RunStatusLine, current_step
from nsa_ops.runs.tunnel import Tunnel
from nsa_ops.runs.watch import Chunk, Frame

#: Off a terminal the state of a run without news is reported every 10 s.
_SILENT_FRAMES = 5
#: Of the past so many records and events are shown.
_NEWEST = 10


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


def draw_adopted(console: Console, adopted: Adopted) -> None:
    """A run that is known here now."""
    line(console, f"{adopted.run_id} on pod {adopted.pod} is known here")
    pairs = [
        ("state", f"{adopted.state} ({adopted.why})"),
        ("attempt", adopted.attempt),
        ("next", f"nsa-ops watch {adopted.run_id}"),
    ]
    facts(console, pairs)


def draw_halted(console: Console, halted: Halted) -> None:
    """A run that does not run, and what it left."""
    after = f" after {' and '.join(halted.signals)}" if halted.signals else ""
    line(console, f"{halted.run_id} is {halted.state}{after}: {halted.why}")
    for damage in halted.damaged:
        line(console, f"not whole: {damage}")
    checkpoint = halted.checkpoint
    if checkpoint is None:
        line(console, "there is no whole checkpoint; a resume begins with the first step")
        return
    behind = f", {count_of(halted.lost_steps, 'step')} behind" if halted.lost_steps else ""
    line(console, f"verified checkpoint: step {checkpoint.step}{behind}, {checkpoint.path}")
    if halted.state != "finished":
        line(console, f"continue with `nsa-ops resume {halted.run_id}`")


def draw_resumed(console: Console, resumed: Resumed) -> None:
    """A run that continues."""
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
        f"exact: {count_of(replay.num_compared, 'loss', 'losses')} of steps {replay.first_step} to "
        f"{replay.last_step}, the same to the last digit",
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
    """One run in a few lines, the verdict first."""
    report = run.report
    if report is None:
        line(console, f"{run.record.run_id}: {run.problem}")
        return
    at_risk = run.at_risk.sentence if run.at_risk else ""
    draw_rows(console, run_rows(report, console.encoding, at_risk))


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
        ("config", f"sha256 {manifest.config_sha256}"),
        ("code", f"{manifest.code_id} (commit {manifest.code_commit[:12]})"),
        ("launched", format_time(run.record.launched_unix_s)),
        ("log", f"{report.log_bytes} bytes"),
        ("disk free", format_bytes(report.disk_free_bytes)),
    ]
    draw_rows(console, [ScreenLine(name, cell_text(value)) for name, value in pairs if value])
    rows = [
        (fact.name, fact.step, "yes" if fact.whole else "no", format_bytes(fact.size_bytes))
        for fact in report.checkpoints
    ]
    if rows:
        console.print(table(["CHECKPOINT", "STEP", "WHOLE", "SIZE"], rows))


def draw_health(console: Console, run: RunStatusLine) -> None:
    """What the rules find on a run: the verdict, every finding, the figures, and who watches."""
    report = run.report
    if report is None:
        line(console, f"{run.record.run_id}: {run.problem}")
        return
    figures = figure_rows(report, console.encoding)
    rows = [*verdict_rows(report.verdict), state_row(report), *figures, _watchdog_row(report)]
    draw_rows(console, rows)


def _watchdog_row(report: RunReport) -> ScreenLine:
    watchdog = report.watchdog
    if watchdog is None:
        return ScreenLine("watchdog", "none was started", "yellow")
    alive = "alive" if report.watchdog_alive else "not running"
    why = f": {watchdog.why}" if watchdog.why else ""
    return ScreenLine("watchdog", f"{alive}, {watchdog.doing}{why}")


def draw_log_health(console: Console, log: LogHealth) -> None:
    """What the rules say of a log: the first alarm of each rule and level, and how many came."""
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


def show_frames(
    session: Session, frames: Iterator[Frame], *, once: bool = False, whole: bool = False
) -> None:
    """JSON lines with `--json`, a live view on a terminal, else a line for each new record.

    `once`: there is one frame: its summary and the newest records are drawn.
    `whole`: the records of the past are wanted from the first one on.
    """
    if session.options.json:
        for frame in frames:
            typer.echo(envelope(session.command, _without_history(frame)))
    elif once:
        for frame in frames:
            records = _records(frame)
            draw_frame(session.console, frame, records if whole else records[-_NEWEST:])
    elif session.console.is_terminal:
        _live(session, frames)
    else:
        _lines(session, frames, whole=whole)


def _without_history(frame: Frame) -> Frame:
    """Each record goes out once: as news of its frame, neither as history nor in the report."""
    report = frame.report.model_copy(update={"beats": [], "events": []})
    return Frame(report, frame.beats, frame.events, at_risk=frame.at_risk)


def _records(frame: Frame) -> list[Heartbeat]:
    return [beat for beat in frame.beats if beat.loss is not None]


def _live(session: Session, frames: Iterator[Frame]) -> None:
    from rich.live import Live

    with Live(console=session.console, auto_refresh=False) as live:
        for frame in frames:
            live.update(frame_view(frame, session.console.encoding), refresh=True)


def _lines(session: Session, frames: Iterator[Frame], *, whole: bool) -> None:
    """The past in its newest lines, unless all of it is wanted; then everything that is new."""
    last, num_silent = None, 0
    for frame in frames:
        records, events = _records(frame), frame.events
        if last is None and not whole:
            records, events = records[-_NEWEST:], events[-_NEWEST:]
        for beat in records:
            typer.echo(progress_line(beat))
        for event in events:
            session.tell(f"event: {event.kind} by {event.by}: {event.message}")
        num_silent = 0 if records or events else num_silent + 1
        if num_silent and num_silent % _SILENT_FRAMES == 0:
            session.tell(f"{frame.report.state}: {frame.report.why}")
        last = frame
    if last is not None:
        draw_frame(session.console, last)


def write_log(session: Session, chunks: Iterator[Chunk], *, is_raw: bool) -> None:
    """Printable lines, unchanged bytes, or JSON lines that carry text with its offsets."""
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
