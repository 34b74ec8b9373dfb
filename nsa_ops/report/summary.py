"""What a report says in words: outcome, facts, configuration; pure functions of a RecordedRun."""

import math
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nsa_core.rundir.events import Event
from nsa_core.rundir.exit import ExitRecord, TrainerExit
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.pod.rank_figures import MOST_MIB, measured
from nsa_ops.quantities import count_of, format_bytes, format_count, format_duration, format_time
from nsa_ops.report.record import RecordedRun

Tone = Literal["good", "warn", "bad", "quiet"]
MISSING = "not recorded"
_CARD_NAME = re.compile(r"(?:.*\.)?(?:cards|gpus)\.\d+\.name")


@dataclass(frozen=True)
class RunOutcome:
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


def describe_outcome(record: RecordedRun) -> RunOutcome:
    """The outcome in one sentence: how far it came, how it ended, what held-out text shows."""
    current = record.attempts[-1]
    word, tone, ended = _describe_end(current.exit)
    planned = f" of {record.manifest.config.schedule.steps:,}" if record.manifest else ""
    tries = len(record.attempts)
    in_attempts = f" in {tries} attempts" if tries > 1 else ""
    sentence = (
        f"{ended} after {last_step(record):,}{planned} steps{in_attempts}; "
        f"{describe_validation(record)}."
    )
    return RunOutcome(word, tone, sentence)


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
    """What validation shows, in half a sentence, also where there is none."""
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
    """The five or six large numbers at the top of the page."""
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
    return f"; {100 * share:.0f} % of the {format_count(expected)} that the profile expects"


def _memory(record: RecordedRun) -> Iterator[Fact]:
    beats = record.beats
    peaks = [mib for beat in beats if (mib := measured(beat.gpu_mem_peak, MOST_MIB))]
    resident = [mib for beat in beats if (mib := measured(beat.host_rss_mib, MOST_MIB))]
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
        name = f"step {state.step:,}"
        size = f"{format_bytes(state.total_bytes)}, saved {format_time(state.created_unix_s)}"
        if state.manifest is not None and not state.damage:
            whole = f"verified: every hash of {count_of(len(state.manifest.files), 'file')} agrees"
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


def event_rows(record: RecordedRun) -> list[tuple[Event, tuple[str, ...]]]:
    """Each event with its cells: after, attempt, kind, by, message.

    They are in order of time; a clock that was set back does not reorder attempts.
    """
    start = began_unix_s(record)
    ordered = sorted(record.events, key=lambda event: (event.attempt, event.ts))
    return [
        (one, (format_duration(one.ts - start), str(one.attempt), one.kind, one.by, one.message))
        for one in ordered
    ]


def goodput_rows(goodput_s: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Each bucket of wall time with its length and its share."""
    wall_s = sum(goodput_s.values())
    return [
        (name, format_duration(seconds), f"{100 * seconds / wall_s:.1f} %")
        for name, seconds in goodput_s.items()
    ]


def replay_remark(record: RecordedRun) -> str:
    """Says how many logged steps an earlier attempt had done that were done again; else empty."""
    if not record.training or not record.training.replaced:
        return ""
    count = record.training.replaced
    return f"{count} logged rows of earlier attempts were done again; the last attempt counts"


def describe_run(record: RecordedRun) -> list[Fact]:
    """What was run: identity, code, machine, data; unknown values say so."""
    manifest = record.manifest
    if manifest is None:
        return [Fact("run id", record.run_id, "manifest.json is missing")]
    return [
        Fact("run id", manifest.run_id),
        Fact("launched", format_time(began_unix_s(record))),
        *_describe_parent(manifest),
        Fact("code commit", manifest.code_commit, _dirty(manifest)),
        Fact("recipe and profile", f"{manifest.config.recipe} on {manifest.profile}"),
        Fact("machine", _machine(record)),
        Fact("versions", _versions(record)),
        Fact("data", _data(manifest), record.data.sentence() if record.data else ""),
        Fact("tokenizer", manifest.config.data.tokenizer, _fingerprint(record)),
        Fact("model", _model(manifest), _parameters(record)),
        *(
            Fact(f"kernels, {branch}", chosen.name, chosen.reason)
            for branch, chosen in manifest.kernels.items()
        ),
        Fact("batch", _batch(manifest)),
        Fact("seed", str(manifest.config.seed)),
        *(Fact("overridden guardrail", name, why) for name, why in manifest.overrides.items()),
    ]


def _describe_parent(manifest: RunManifest) -> Iterator[Fact]:
    if manifest.parent is not None:
        yield Fact("began from", manifest.parent.run_id, f"step {manifest.parent.step:,}")


def _dirty(manifest: RunManifest) -> str:
    if manifest.code_commit == "unknown":
        return f"code id {manifest.code_id}"
    if not manifest.dirty_sha256:
        return "no uncommitted changes"
    return f"with uncommitted changes, sha256 {manifest.dirty_sha256[:12]}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings and lists as dotted names with text values."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            numbered = {str(index): one for index, one in enumerate(value)}
            flat.update(flatten(numbered, f"{prefix}{name}."))
        elif value is not None and value != "":
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            flat[prefix + name] = text
    return flat


def machine_facts(record: RecordedRun) -> dict[str, str]:
    """Everything in env.json and the manifest's pod facts, as dotted names."""
    pod_facts = record.manifest.pod_facts if record.manifest else {}
    return {**flatten(pod_facts), **flatten(record.environment)}


def _last_words(facts: Mapping[str, str]) -> dict[str, str]:
    """The same facts by the last word of their dotted name."""
    return {name.rpartition(".")[2].lower(): value for name, value in facts.items()}


def _machine(record: RecordedRun) -> str:
    """Cards as the trainer saw them, or as preflight did; processors where there are none."""
    pod_facts = record.manifest.pod_facts if record.manifest else {}
    for facts in (flatten(record.environment), flatten(pod_facts)):
        cards = [value for name, value in facts.items() if _CARD_NAME.fullmatch(name)]
        if cards:
            return ", ".join(f"{cards.count(name)} x {name}" for name in dict.fromkeys(cards))
    words = _last_words(machine_facts(record))
    parts = ["no GPU"] if words else []
    parts += [f"{words['num_cpus']} processors"] if "num_cpus" in words else []
    parts += [words["system"]] if "system" in words else []
    return ", ".join(parts) or MISSING


def _versions(record: RecordedRun) -> str:
    words = _last_words(machine_facts(record))
    wanted = ("python", "torch", "cuda", "driver", "triton")
    found = [
        f"{word} {value}"
        for word in wanted
        if (value := words.get(word) or words.get(f"{word}_version"))
    ]
    return ", ".join(found) or MISSING


def _data(manifest: RunManifest) -> str:
    data = manifest.config.data
    names = {
        "stdlib": "text of the machine's own Python library",
        "synthetic": "synthetic tokens (smoke runs only)",
        "fineweb_edu": f"FineWeb-Edu, {data.path or data.subset}",
        "fineweb_edu_local": f"local text, {data.path}",
    }
    return f"{names[data.source]}; {100 * data.validation_fraction:g} % of documents held out"


def _fingerprint(record: RecordedRun) -> str:
    for state in record.checkpoints:
        if state.manifest and state.manifest.tokenizer_fingerprint:
            return f"fingerprint {state.manifest.tokenizer_fingerprint[:16]}"
    return "fingerprint not recorded"


def _model(manifest: RunManifest) -> str:
    model = manifest.config.model
    kind = "Native Sparse Attention" if model.attention == "nsa" else "dense attention"
    return (
        f"{kind}, {count_of(model.num_layers, 'layer')} of width {model.dim}, "
        f"{count_of(model.num_heads, 'head')} in {count_of(model.num_kv_groups, 'group')}, "
        f"vocabulary {model.vocab_size:,}"
    )


def _parameters(record: RecordedRun) -> str:
    count = record.metrics.get("num_parameters")
    return f"{count:,} parameters" if isinstance(count, int) else ""


def _batch(manifest: RunManifest) -> str:
    batch, ranks = manifest.config.batch, manifest.config.num_ranks
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    return (
        f"{batch.micro_batch} x {batch.accumulation} accumulated x {batch.seq_len:,} = "
        f"{batch.tokens_per_step:,} tokens a step{shared}"
    )


def describe_configuration(manifest: RunManifest) -> list[Fact]:
    """Every value of the configuration with its origin; what was set comes before the defaults."""
    values = flatten(manifest.config.model_dump(mode="json"))
    facts = [
        Fact(name, value, manifest.origins.get(name, "default")) for name, value in values.items()
    ]
    return sorted(facts, key=lambda fact: fact.remark == "default")
