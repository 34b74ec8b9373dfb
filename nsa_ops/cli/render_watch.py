"""Draw a run that is being watched: verdict, progress, figures, curves, and the newest records."""

from collections.abc import Sequence
from math import isfinite

from rich.console import Console
from rich.text import Text

from nsa_core.rundir.data_account import DataAccount
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.cli.bars import can_show
from nsa_ops.cli.render import line
from nsa_ops.cli.render_figures import (
    Row,
    checkpoint_row,
    draw_rows,
    figure_rows,
    state_row,
    styled,
    verdict_row,
)
from nsa_ops.pod.figures import RunFigures
from nsa_ops.pod.messages import RunReport
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


def run_rows(report: RunReport, encoding: str, at_risk: str = "") -> list[Row]:
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
        Row("attempt", str(report.manifest.attempt)),
        *figure_rows(report, encoding),
        *([Row("data", dropped)] if dropped else []),
        checkpoint_row(report),
        *([Row("backup", at_risk)] if at_risk else []),
    ]


def data_text(account: DataAccount | None) -> str:
    """What was dropped of a run's data, and why; empty if nothing was."""
    return account.sentence() if account is not None and account.needs_attention else ""


def frame_rows(frame: Frame, encoding: str = "utf-8") -> list[Row]:
    """A watched run in a few lines: what `status` shows, and the curves of the newest records."""
    at_risk = frame.at_risk.sentence if frame.at_risk is not None else ""
    report = frame.report
    if report.figures.record is None and frame.progress:  # an agent of an older version
        report = report.model_copy(update={"figures": _figures(frame.progress)})
    return [*run_rows(report, encoding, at_risk), *_curves(frame.progress, bars_of(encoding))]


def _figures(progress: Sequence[Heartbeat]) -> RunFigures:
    gates = (beat for beat in reversed(progress) if beat.gate_branch_shares is not None)
    return RunFigures(record=progress[-1], gates=next(gates, None), pace_s=progress[-1].step_s)


def _curves(progress: Sequence[Heartbeat], bars: str) -> list[Row]:
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
    return [Row(name, curve, "cyan") for name, curve in found.items() if curve]


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
