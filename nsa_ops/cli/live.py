"""Results that come bit by bit: frames of a watched run, and bytes of a log."""

from collections.abc import Iterator

import typer

from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.backup.pulled import Pulled
from nsa_ops.cli.output import envelope
from nsa_ops.cli.render_backup import draw_pulled
from nsa_ops.cli.render_watch import draw_frame, frame_view, progress_line
from nsa_ops.cli.session import Session
from nsa_ops.printable import PrintableStream
from nsa_ops.runs.logs import Chunk
from nsa_ops.runs.watch import Frame

#: Off a terminal a run without news is still told about every 10 s.
_SILENT_FRAMES = 5
#: Of the past so many records and events are shown.
_NEWEST = 10


def show_frames(
    session: Session, frames: Iterator[Frame], *, once: bool = False, whole: bool = False
) -> None:
    """JSON lines with `--json`, a live view on a terminal, else a line for each new record.

    Args:
        session: Whose terminal it is.
        frames: What is watched.
        once: There is one frame: its summary and the newest records are drawn.
        whole: The records of the past are wanted from the first one on.
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


def show_pulls(session: Session, pulls: Iterator[Pulled]) -> None:
    """A JSON line for each pull with `--json`, else a line of story each and the last one drawn."""
    last = None
    for pulled in pulls:
        if session.options.json:
            typer.echo(envelope(session.command, pulled))
        elif pulled.pulled_steps:
            steps = ", ".join(map(str, pulled.pulled_steps))
            session.tell(f"here and verified: step {steps}; {pulled.at_risk.sentence}")
        last = pulled
    if last is not None and not session.options.json:
        draw_pulled(session.console, last)
