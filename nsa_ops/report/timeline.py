"""When things happened: attempts as bars, checkpoints and events as marks, wall time as one bar."""

import math
from dataclasses import dataclass
from typing import Literal

from nsa_core.rundir.events import Event
from nsa_core.rundir.exit import TrainerExit
from nsa_ops.quantities import format_duration, format_time
from nsa_ops.report.axes import Scale, escape
from nsa_ops.report.record import RecordedAttempt, RecordedRun
from nsa_ops.report.summary import Tone

WIDTH, LEFT, RIGHT = 1120, 96, 20
LANES = ("attempts", "checkpoints", "events")
LANE_PX, AXIS_PX = 40, 26
TICK_STEPS_S = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
)  # fmt: skip

#: Tone and shape of each kind of event; a kind that is not here is drawn quiet and round.
EVENT_LOOKS: dict[str, tuple[Tone, Literal["circle", "square", "triangle", "diamond"]]] = {
    "launched": ("good", "circle"),
    "started": ("good", "circle"),
    "first_step": ("good", "circle"),
    "resumed": ("good", "circle"),
    "restarted": ("good", "circle"),
    "saved": ("quiet", "diamond"),
    "halt_asked": ("warn", "square"),
    "halt_ack": ("warn", "square"),
    "stale_halt": ("warn", "triangle"),
    "torn_line": ("warn", "triangle"),
    "signal": ("warn", "square"),
    "rows_replayed": ("warn", "circle"),
    "left_over_killed": ("warn", "square"),
    "rolled_back": ("bad", "triangle"),
    "anomaly": ("bad", "triangle"),
    "checkpoint_rejected": ("bad", "triangle"),
    "save_failed": ("bad", "triangle"),
}


@dataclass(frozen=True)
class Span:
    """One attempt on the clock: number, start and end in unix seconds, how it ended."""

    attempt: int
    start: float
    end: float
    tone: Tone
    ending: str


def look_of(kind: str) -> tuple[Tone, str]:
    """Tone and shape of an event."""
    return EVENT_LOOKS.get(kind, ("quiet", "circle"))


def attempt_spans(record: RecordedRun) -> list[Span]:
    """When each attempt began and ended, as far as the directory shows."""
    spans = []
    for attempt in record.attempts:
        times = _times_of(record, attempt)
        if times:
            tone, ending = _ending(attempt)
            spans.append(Span(attempt.number, min(times), max(times), tone, ending))
    return spans


def _times_of(record: RecordedRun, attempt: RecordedAttempt) -> list[float]:
    times = [event.ts for event in record.events if event.attempt == attempt.number]
    times += [beat.ts for beat in record.beats if beat.attempt == attempt.number]
    if attempt.exit is not None:
        times.append(attempt.exit.at)
    if not times and attempt.manifest is not None:  # by the laptop's clock: not beside the pod's
        times.append(attempt.manifest.created_unix_s)
    return [time for time in times if math.isfinite(time)]


def _ending(attempt: RecordedAttempt) -> tuple[Tone, str]:
    if attempt.exit is None:
        return "quiet", "left no exit record"
    ending = f"exit code {attempt.exit.code}: {attempt.exit.reason}"
    if attempt.exit.code == TrainerExit.FINISHED:
        return "good", ending
    is_halt = attempt.exit.code in {TrainerExit.HALTED, TrainerExit.RESUMABLE}
    return ("warn" if is_halt else "bad"), ending


def draw_timeline(record: RecordedRun) -> str:
    """The SVG of attempts, checkpoints and events over time; empty if no time is known."""
    spans = attempt_spans(record)
    if not spans:
        return ""
    start, end = spans[0].start, max(span.end for span in spans)
    scale = Scale(start, max(end, start + 1.0), LEFT, WIDTH - RIGHT)
    height = LANE_PX * len(LANES) + AXIS_PX + 8
    return "".join(
        [
            f'<svg class="plot timeline" viewBox="0 0 {WIDTH} {height}" role="img" '
            'aria-label="Attempts, checkpoints and events over time">',
            *_lanes(scale),
            *(_bar(span, scale) for span in spans),
            *_checkpoint_marks(record, scale),
            *(_event_mark(event, scale) for event in record.events if event.kind != "saved"),
            "</svg>",
        ]
    )


def _middle(lane: int) -> float:
    return LANE_PX * lane + LANE_PX / 2 + 4


def _lanes(scale: Scale) -> list[str]:
    bottom = LANE_PX * len(LANES) + 6
    parts = []
    for lane, name in enumerate(LANES):
        y = _middle(lane)
        parts.append(f'<text x="{LEFT - 14}" y="{y + 4:.0f}" class="tick end">{name}</text>')
        parts.append(f'<path d="M{LEFT} {y:.0f}H{WIDTH - RIGHT}" class="grid"/>')
    for second in _tick_seconds(scale.high - scale.low):
        x = scale(scale.low + second)
        label = format_duration(second) if second else "0"
        parts.append(f'<path d="M{x:.1f} {bottom}v5" class="axis"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" class="tick middle">{label}</text>')
    parts.append(f'<path d="M{LEFT} {bottom}H{WIDTH - RIGHT}" class="axis"/>')
    return parts


def _tick_seconds(length_s: float) -> list[float]:
    step = next((one for one in TICK_STEPS_S if length_s / one <= 9), None)
    if step is None:
        step = 86_400 * math.ceil(length_s / 86_400 / 9)
    return [float(index * step) for index in range(int(length_s // step) + 1)]


def _bar(span: Span, scale: Scale) -> str:
    x, y = scale(span.start), _middle(0) - 11
    width = max(3.0, scale(span.end) - x)
    title = (
        f"attempt {span.attempt}: {format_time(span.start)}, "
        f"{format_duration(span.end - span.start)}, {span.ending}"
    )
    label = f"attempt {span.attempt}"
    text = (
        f'<text x="{x + 9:.1f}" y="{y + 15:.1f}" class="in-bar">{label}</text>'
        if width > 76
        else ""
    )
    return (
        f'<g class="span {span.tone}"><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="22" rx="4"/>{text}<title>{escape(title)}</title></g>'
    )


def _checkpoint_marks(record: RecordedRun, scale: Scale) -> list[str]:
    marks = []
    here = {state.step for state in record.checkpoints}
    for event in record.events:
        if event.kind == "saved" and event.facts.get("step") not in here:
            said = f"{_when(event.ts, scale)}: {event.message}, not in this directory any more"
            marks.append(_mark(scale(event.ts), 1, "quiet", "diamond", said))
    for state in record.checkpoints:
        tone: Tone = "bad" if state.damage else "good"
        found = state.damage or "verified"
        said = f"{_when(state.created_unix_s, scale)}: checkpoint of step {state.step}, {found}"
        marks.append(_mark(scale(state.created_unix_s), 1, tone, "diamond", said))
    return marks


def _event_mark(event: Event, scale: Scale) -> str:
    tone, shape = look_of(event.kind)
    said = f"{_when(event.ts, scale)}: {event.kind} by {event.by}. {event.message}"
    return _mark(scale(event.ts), 2, tone, shape, said)


def _when(unix_s: float, scale: Scale) -> str:
    return f"after {format_duration(max(0.0, unix_s - scale.low))}"


def _mark(x: float, lane: int, tone: Tone, shape: str, said: str) -> str:
    x = min(max(x, LEFT), WIDTH - RIGHT)
    outline = draw_shape(shape, x, _middle(lane))
    return f'<g class="mark {tone}"><path d="{outline}"/><title>{escape(said)}</title></g>'


def draw_shape(shape: str, x: float, y: float) -> str:
    """Path data of a mark, about 12 pixels wide, centred on a point."""
    outlines = {
        "circle": f"M{x - 5.5:.1f} {y:.1f}a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0 -11 0Z",
        "square": f"M{x - 5:.1f} {y - 5:.1f}h10v10h-10Z",
        "triangle": f"M{x:.1f} {y - 6.5:.1f}l6.5 11.5h-13Z",
        "diamond": f"M{x:.1f} {y - 7:.1f}l6 7l-6 7l-6 -7Z",
    }
    return outlines[shape]


def draw_goodput(goodput_s: dict[str, float]) -> str:
    """One bar of wall time, split into its buckets; the list beside it names them."""
    wall_s = sum(goodput_s.values())
    parts = ['<svg class="plot goodput" viewBox="0 0 1120 34" role="img" aria-label="Wall time">']
    x = 0.0
    for name, seconds in goodput_s.items():
        width = WIDTH * seconds / wall_s
        title = f"{name}: {format_duration(seconds)}, {100 * seconds / wall_s:.1f} %"
        parts.append(
            f'<g class="bucket b-{name}"><rect x="{x:.2f}" y="0" height="34" '
            f'width="{max(width - 1.5, 0.5):.2f}"/><title>{escape(title)}</title></g>'
        )
        x += width
    return "".join([*parts, "</svg>"])
