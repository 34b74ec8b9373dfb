"""What was run, in words: identity, code, machine, data and configuration of a RecordedRun."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nsa_core.rundir.manifest import RunManifest
from nsa_ops.quantities import count_of, format_time
from nsa_ops.report.record import RecordedRun
from nsa_ops.report.story import MISSING, Fact, began_unix_s

_CARD_NAME = re.compile(r"(?:.*\.)?(?:cards|gpus)\.\d+\.name")


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
    """Everything that env.json and the manifest's pod facts tell, as dotted names."""
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
        if state.checkpoint.manifest.tokenizer_fingerprint:
            return f"fingerprint {state.checkpoint.manifest.tokenizer_fingerprint[:16]}"
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
    batch = manifest.config.batch
    world = max(1, manifest.config.runtime.num_gpus)
    return (
        f"{batch.micro_batch} x {batch.accumulation} accumulated x {world} x "
        f"{batch.seq_len:,} = {batch.tokens_per_step(world):,} tokens a step"
    )


def describe_configuration(manifest: RunManifest) -> list[Fact]:
    """Every value of the configuration with its origin; what was set comes before the defaults."""
    values = flatten(manifest.config.model_dump(mode="json"))
    facts = [
        Fact(name, value, manifest.origins.get(name, "default")) for name, value in values.items()
    ]
    return sorted(facts, key=lambda fact: fact.remark == "default")
