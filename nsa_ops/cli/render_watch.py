"""A run that is being watched, and its log: live on a terminal, else lines; JSON with `--json`."""

from collections.abc import Iterator, Sequence
from math import isfinite

import typer
from rich.console import Console
from rich.text import Text

from nsa_core.rundir.data_account import DataAccount
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.backup.pulled import Pulled
from nsa_ops.cli.bars import can_show
from nsa_ops.cli.output import envelope
from nsa_ops.cli.render import line
from nsa_ops.cli.render_backup import draw_pulled
from nsa_ops.cli.render_figures import (
    ScreenLine,
    checkpoint_row,
    draw_rows,
    figure_rows,
    state_row,
    styled,
    verdict_row,
)
from nsa_ops.cli.session import Session
from nsa_ops.pod.messages import RunFigures, RunReport
from nsa_ops.printable import PrintableStream
from nsa_ops.runs.logs import Chunk
from nsa_ops.runs.watch import Frame

_BARS = "▁▂▃▄▅▆▇█"
#: The same eight heights where the encoding of the terminal has no blocks.
_ASCII_BARS = "_.-:=+*#"


def bars_of(encoding: str) -> str:
    """Eight heights, lowest first, that an encoding can carry."""
    return _BARS if can_show(_BARS, encoding) else _ASCII_BARS


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


def sparkline(values: Sequence[float], width: int = 60, bars: str = _BARS) -> str:
    """Values as bars of eight heights, the newest on the right; thinned out to the width."""
    kept = [value for value in values if isfinite(value)]
    if not kept:
        return ""
    # Halves: the distance of two numbers that a pod may say is more than a float holds.
    shown = [value / 2 for value in kept[:: max(1, -(-len(kept) // width))]]
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(bars[int((value - low) / span * (len(bars) - 1))] for value in shown)


def run_rows(report: RunReport, encoding: str, at_risk: str = "") -> list[ScreenLine]:
    """A run in a few lines, the verdict first.

    Args:
        report: What the pod shows.
        encoding: Of the terminal.
        at_risk: What a lost pod would cost, in one sentence.
    """
    dropped = data_text(report.data)
    return [
        verdict_row(report.verdict),
        state_row(report),
        ScreenLine("attempt", str(report.manifest.attempt)),
        *figure_rows(report, encoding),
        *([ScreenLine("data", dropped)] if dropped else []),
        checkpoint_row(report),
        *([ScreenLine("backup", at_risk)] if at_risk else []),
    ]


def data_text(account: DataAccount | None) -> str:
    """What was dropped of a run's data, and why; empty if nothing was."""
    return account.sentence() if account is not None and account.needs_attention else ""


def frame_rows(frame: Frame, encoding: str = "utf-8") -> list[ScreenLine]:
    """A watched run in a few lines: what `status` shows, and the curves of the newest records."""
    at_risk = frame.at_risk.sentence if frame.at_risk is not None else ""
    report = frame.report
    if report.figures.record is None and frame.progress:  # an agent of an older version
        report = report.model_copy(update={"figures": _figures(frame.progress)})
    return [*run_rows(report, encoding, at_risk), *_curves(frame.progress, bars_of(encoding))]


def _figures(progress: Sequence[Heartbeat]) -> RunFigures:
    gates = (beat for beat in reversed(progress) if beat.gate_branch_shares is not None)
    return RunFigures(record=progress[-1], gates=next(gates, None), pace_s=progress[-1].step_s)


def _curves(progress: Sequence[Heartbeat], bars: str) -> list[ScreenLine]:
    on_card = any(beat.gpu_mem_peak is not None for beat in progress)
    memory = [beat.gpu_mem_peak if on_card else beat.host_rss_mib for beat in progress]
    curves: dict[str, Sequence[float | None]] = {
        "loss curve": [beat.loss for beat in progress],
        "speed curve": [beat.tokens_per_s for beat in progress],
        "memory curve": memory,
    }
    found = {
        name: sparkline([value for value in values if value is not None], bars=bars)
        for name, values in curves.items()
    }
    return [ScreenLine(name, curve, "cyan") for name, curve in found.items() if curve]


def frame_view(frame: Frame, encoding: str) -> Text:
    """A watched run for the live view, in signs that the encoding has."""
    return Text("\n").join(styled(row) for row in frame_rows(frame, encoding))


def draw_frame(console: Console, frame: Frame, records: Sequence[Heartbeat] = ()) -> None:
    """A watched run once, and some of its records below."""
    draw_rows(console, frame_rows(frame, console.encoding))
    if records:
        line(console, "")
    for record in records:
        line(console, progress_line(record))


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
