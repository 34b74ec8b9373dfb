"""What a report says in words: outcome, facts, configuration; pure functions of a RecordedRun."""

import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nsa_core.rundir.exit import ExitRecord, TrainerExit
from nsa_ops.quantities import count_of, format_bytes, format_count, format_duration, format_time
from nsa_ops.report.record import RecordedRun

Tone = Literal["good", "warn", "bad", "quiet"]
MISSING = "not recorded"


@dataclass(frozen=True)
class Outcome:
    """How the run ended: one word with its tone, and a sentence that claims only what is known."""

    word: str
    tone: Tone
    sentence: str


@dataclass(frozen=True)
class Fact:
    """One line of a table: a name, a value, and a remark such as a value's origin."""

    name: str
    value: str
    remark: str = ""


def describe_outcome(record: RecordedRun) -> Outcome:
    """The outcome in one sentence: how far it came, how it ended, what held-out text says."""
    current = record.attempts[-1]
    word, tone, ended = _describe_end(current.exit)
    planned = f" of {record.manifest.config.schedule.steps:,}" if record.manifest else ""
    tries = len(record.attempts)
    in_attempts = f" in {tries} attempts" if tries > 1 else ""
    sentence = (
        f"{ended} after {last_step(record):,}{planned} steps{in_attempts}; "
        f"{describe_validation(record)}."
    )
    return Outcome(word, tone, sentence)


def _describe_end(record: ExitRecord | None) -> tuple[str, Tone, str]:
    if record is None:
        return "not ended", "quiet", "No exit was recorded: it may still be running or was cut off"
    if record.code == TrainerExit.FINISHED:
        return "finished", "good", "Finished"
    if record.code in {TrainerExit.HALTED, TrainerExit.RESUMABLE}:
        return "halted", "warn", f"Halted ({record.reason}), and can be resumed,"
    return "failed", "bad", f"Failed with exit code {record.code} ({record.reason})"


def last_step(record: RecordedRun) -> int:
    """The newest optimizer step that anything in the directory knows of."""
    steps = [row.step for row in record.training.rows[-1:]] if record.training else []
    steps += [record.last_beat.step] if record.last_beat else []
    current = record.attempts[-1].exit
    return max([*steps, *([current.step] if current else [])], default=0)


def validation_points(record: RecordedRun) -> list[tuple[float, float]]:
    """Bits per byte on held-out text by step."""
    return record.validation.column("bits_per_byte") if record.validation else []


def describe_validation(record: RecordedRun) -> str:
    """What validation says, in half a sentence; says so if it says nothing."""
    points = [point for point in validation_points(record) if math.isfinite(point[1])]
    if not points:
        return "no validation was recorded, so nothing is known about held-out text"
    (first_step, first), (final_step, final) = points[0], points[-1]
    if len(points) == 1:
        return f"one validation, {first:.3f} bits per byte at step {first_step:,.0f}"
    verb = "fell" if final < first else "rose" if final > first else "stayed"
    best_step, best = min(points, key=lambda point: point[1])
    lowest = f" (lowest {best:.3f} at step {best_step:,.0f})" if best < final else ""
    source = record.manifest.config.data.source if record.manifest else ""
    text = (
        "synthetic tokens, which say nothing about text,"
        if source == "synthetic"
        else "held-out text"
    )
    return (
        f"on {text} it {verb} from {first:.3f} bits per byte at step {first_step:,.0f} "
        f"to {final:.3f} at step {final_step:,.0f}{lowest}"
    )


def headline(record: RecordedRun) -> list[Fact]:
    """The five or six numbers that stand large at the top of the page."""
    points = [point for point in validation_points(record) if math.isfinite(point[1])]
    facts = []
    if points:
        change = f"from {points[0][1]:.3f} at step {points[0][0]:,.0f}" if len(points) > 1 else ""
        facts.append(Fact("held-out bits per byte", f"{points[-1][1]:.3f}", change))
    facts.append(Fact("steps", f"{last_step(record):,}", _tokens(record)))
    facts.extend(_speed(record))
    facts.extend(_memory(record))
    facts.extend(_time(record))
    return facts


def _tokens(record: RecordedRun) -> str:
    seen = record.training.column("tokens") if record.training else []
    return f"{format_count(seen[-1][1])} tokens" if seen else ""


def _speed(record: RecordedRun) -> Iterator[Fact]:
    speeds = [y for _, y in record.training.column("tokens_per_s")] if record.training else []
    finite = [speed for speed in speeds if math.isfinite(speed)]
    if finite:
        low, high = format_count(min(finite)), format_count(max(finite))
        median = format_count(statistics.median(finite))
        yield Fact(
            "tokens per second", median, f"median; {low} to {high}{_expected(record, finite)}"
        )


def _expected(record: RecordedRun, speeds: Sequence[float]) -> str:
    """The median as a share of what the profile expects of this recipe, if it was measured."""
    manifest = record.manifest
    expected = 0.0 if manifest is None else manifest.config.watchdog.expected_tokens_per_s
    if not expected:
        return ""
    share = statistics.median(speeds) / expected
    return f"; {share:.0%} of the {format_count(expected)} that the profile expects"


def _memory(record: RecordedRun) -> Iterator[Fact]:
    peaks = [beat.gpu_mem_peak for beat in record.beats if beat.gpu_mem_peak]
    resident = [beat.host_rss_mib for beat in record.beats if beat.host_rss_mib]
    if peaks:
        yield Fact("peak GPU memory", format_bytes(max(peaks) * 2**20), "allocated")
    elif resident:
        yield Fact("peak host memory", format_bytes(max(resident) * 2**20), "no GPU was used")


def _time(record: RecordedRun) -> Iterator[Fact]:
    wall_s = sum(record.goodput_s.values())
    if wall_s > 0:
        share = 100 * record.goodput_s.get("step", 0.0) / wall_s
        yield Fact("wall time", format_duration(wall_s), f"{share:.0f} % of it in training steps")


def describe_checkpoints(record: RecordedRun) -> list[tuple[Tone, Fact]]:
    """Each checkpoint with what hashing it again showed."""
    lines: list[tuple[Tone, Fact]] = []
    for state in record.checkpoints:
        manifest = state.checkpoint.manifest
        name = f"step {manifest.step:,}"
        size = f"{format_bytes(manifest.total_bytes)}, saved {format_time(manifest.created_unix_s)}"
        if state.damage is None:
            whole = f"verified: every hash of {count_of(len(manifest.files), 'file')} agrees"
            lines.append(("good", Fact(name, size, whole)))
        else:
            lines.append(("bad", Fact(name, size, f"damaged: {state.damage}")))
    return lines


def reproduce_commands(record: RecordedRun) -> list[str]:
    """The commands that run the same again: the code, then the exact launch."""
    manifest = record.manifest
    if manifest is None:
        return []
    checkout = (
        []
        if manifest.code_commit == "unknown"
        else [f"git checkout {shlex.quote(manifest.code_commit)}"]
    )
    if manifest.dirty_sha256:
        checkout.append(f"# and the uncommitted changes with sha256 {manifest.dirty_sha256}")
    first = next((a.manifest for a in record.attempts if a.manifest), manifest)
    return [*checkout, shlex.join(first.command)] if first.command else checkout


def began_unix_s(record: RecordedRun) -> float:
    """The first thing that happened on the pod, or else the launch by the laptop's clock.

    The two clocks may be hours apart, and everything else in a report is by the pod's.
    """
    launches = [a.manifest.created_unix_s for a in record.attempts if a.manifest is not None]
    return min([event.ts for event in record.events] or launches, default=math.nan)


def replay_remark(record: RecordedRun) -> str:
    """Says how many logged steps an earlier attempt had done that were done again; else empty."""
    if not record.training or not record.training.replaced:
        return ""
    count = record.training.replaced
    return f"{count} logged rows of earlier attempts were done again; the last attempt counts"
