"""Draw a run that is being watched: the newest record, curves, gates, verdict."""

from collections.abc import Sequence
from math import isfinite

from rich.console import Console
from rich.text import Text

from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.cli.render import line
from nsa_ops.pod.messages import RunReport
from nsa_ops.printable import printable
from nsa_ops.runs.choose import LIVE
from nsa_ops.runs.status import current_step
from nsa_ops.runs.watch import Frame

_BARS = "▁▂▃▄▅▆▇█"
#: The same eight heights where the encoding of the terminal has no blocks.
_ASCII_BARS = "_.-:=+*#"


def bars_of(encoding: str) -> str:
    """Eight heights, lowest first, that an encoding can carry."""
    try:
        _BARS.encode(encoding)
    except UnicodeEncodeError:
        return _ASCII_BARS
    return _BARS


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
    shown = kept[:: max(1, -(-len(kept) // width))]
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(bars[int((value - low) / span * (len(bars) - 1))] for value in shown)


def frame_lines(frame: Frame, bars: str = _BARS) -> list[str]:
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
        lines += _curves(frame.progress, bars)
        lines += _gates(beat) + _card(beat)
    lines.append(f"checkpoint {crash_text(report)}")
    if frame.at_risk is not None:
        lines.append(f"pod lost   {frame.at_risk.sentence}")
    return lines


def crash_text(report: RunReport) -> str:
    """The newest checkpoint that nothing is known against, and what a crash would lose now."""
    newest = next((fact.step for fact in report.checkpoints if fact.whole), None)
    kept = "none yet" if newest is None else f"step {newest}"
    behind = current_step(report) - (newest or 0)
    if report.state not in LIVE or behind <= 0:
        return kept
    return f"{kept}, a crash loses at most {behind:,} steps"


def _curves(progress: Sequence[Heartbeat], bars: str) -> list[str]:
    curves = {
        "loss": [beat.loss for beat in progress],
        "tokens/s": [beat.tokens_per_s for beat in progress],
    }
    return [
        f"{name:<9} {sparkline([value for value in values if value is not None], bars=bars)}"
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


def _card(beat: Heartbeat) -> list[str]:
    """What the card does, as far as the machine can tell."""
    known = (
        ("memory {:,} MiB", beat.gpu_mem_reserved),
        ("peak {:,} MiB", beat.gpu_mem_peak),
        ("busy {:.0f} %", beat.gpu_util),
        ("{:.0f} W", beat.power_w),
        ("{:.0f} degrees C", beat.temp_c),
        ("throttled: {}", beat.throttle),
    )
    parts = [text.format(value) for text, value in known if value is not None]
    return [f"card      {', '.join(parts)}"] if parts else []


def frame_view(frame: Frame, encoding: str) -> Text:
    """A watched run for the live view, in signs that the encoding has."""
    return Text("\n".join(map(printable, frame_lines(frame, bars_of(encoding)))))


def draw_frame(console: Console, frame: Frame) -> None:
    """A watched run once."""
    for text in frame_lines(frame, bars_of(console.encoding)):
        line(console, text)
