"""Resolve recipe, profile, variables and flags into one configuration that knows its origins."""

import difflib
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from nsa_core.config.base import (
    ConfigError,
    FrozenModel,
    first_error,
    is_read_whole,
    load_mapping,
    names_in,
    parse_yaml,
)
from nsa_core.config.environment import read_variables
from nsa_core.config.model import PAPER_SYMBOLS
from nsa_core.config.profile import HardwareProfile, load_profile
from nsa_core.config.ranks import BATCH_KEYS, OfferedCards, settle_ranks
from nsa_core.config.run import RunConfig
from nsa_core.config.step_memory import fit_batch


class ResolvedConfig(FrozenModel):
    """A whole configuration."""

    config: RunConfig
    #: By dotted key, who set it: `--set`, a variable, `profile a100`, `recipe tiny-cpu`; a key that
    #: is absent has its default.
    origins: dict[str, str]
    sha256: str
    profile: str  # name of the profile; `none` without one
    notes: list[str]  # lines that people should see, such as variables without effect

    def origin(self, key: str) -> str:
        """Who set a dotted key."""
        return self.origins.get(key, "default")


def recipes_folder() -> Path:
    """The folder with the recipes that come with the project."""
    return Path(__file__).parent / "recipes"


def list_recipes() -> list[str]:
    """Names of all recipes, sorted."""
    return names_in(recipes_folder())


def config_sha256(config: RunConfig) -> str:
    """Hash of the values of a configuration, whatever their origin."""
    canonical = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def leaves(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """All values of a configuration by dotted key, in the order of the fields."""
    found: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        key = f"{prefix}{name}"
        found |= leaves(value, f"{key}.") if isinstance(value, BaseModel) else {key: value}
    return found


_DEFAULTS = leaves(RunConfig())
_KNOWN_KEYS = list(_DEFAULTS)
_SECTIONS = {key.rpartition(".")[0] for key in _KNOWN_KEYS if "." in key} | {"model"}


def _flatten(values: Mapping[Any, Any], where: str, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in _SECTIONS:
            flat |= _flatten(value, where, f"{key}.")
        else:
            _check_key(key, where)
            flat[key] = value
    return flat


def _check_key(key: str, where: str) -> None:
    if key in _KNOWN_KEYS:
        return
    if key in _SECTIONS:
        message = f"{where}: {key} is a section; name one of its keys, such as {_first_of(key)}"
        raise ConfigError(message)
    section, _, name = key.rpartition(".")
    if section == "model.nsa" and name in PAPER_SYMBOLS:
        advice = f"the paper's {name} is model.nsa.{PAPER_SYMBOLS[name]}"
    else:
        advice = _nearest(key)
    message = f"{where}: unknown key {key!r}; {advice}"
    raise ConfigError(message)


def _nearest(key: str) -> str:
    last = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, _KNOWN_KEYS, n=1, cutoff=0.7) or [
        known for known in _KNOWN_KEYS if known.rpartition(".")[2] == last
    ]
    if near:
        return f"did you mean {near[0]}?"
    return "`nsa-ops config show` lists all keys"


def _first_of(section: str) -> str:
    return next(key for key in _KNOWN_KEYS if key.startswith(f"{section}."))


def parse_set(flag: str, name: str = "--set") -> tuple[str, Any]:
    """Parse one `--set key=value`, or another flag of this form; the value is YAML.

    Raises:
        ConfigError: If there is no `=`, the key is unknown, or YAML would read another value than
            stands there.
    """
    key, equals, text = flag.partition("=")
    if not equals:
        message = f"{name} {flag!r} must look like schedule.steps=500"
        raise ConfigError(message)
    key = key.strip()
    _check_key(key, name)
    value = parse_yaml(text, f"{name} {key}")
    if not is_read_whole(text):
        quoted = json.dumps(text.strip(), ensure_ascii=False).replace("\x85", "\\x85")
        whole = shlex.quote(f"{key}={quoted}")
        message = f"{name} {key}: YAML reads {value!r} here; if all of it is meant, write {name} "
        raise ConfigError(message + whole)
    return key, value


def resolve(
    recipe: str,
    profile: str | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    memory_gib: float | None = None,
    offered: OfferedCards | None = None,
) -> ResolvedConfig:
    """Resolve a configuration: `--set` over NSA_* variables over profile over recipe over default.

    Args:
        recipe: Name of a recipe, or path of a YAML file.
        profile: Name of a hardware profile, or path of a YAML file.
        sets: Values of `--set`, later ones win.
        environment: Where to look for NSA_* variables; none if omitted.
        memory_gib: Memory of the card, if it is known already; chooses the profile's batch tier.
        offered: Cards of the pod, if it is known already; settles `runtime.num_gpus=auto`.

    Raises:
        ConfigError: For an unknown name, key or variable, or values that cannot go together.
    """
    given, path = load_mapping(recipe, recipes_folder(), "recipe")
    hardware = load_profile(profile) if profile else None
    variables = read_variables(environment or {})
    recipe_values = {"recipe": path.stem} | _flatten(given, f"recipe {path.name}")
    flags = dict(parse_set(flag) for flag in sets)
    layers: list[tuple[str, dict[str, Any]]] = [(f"recipe {path.stem}", recipe_values)]
    if hardware:
        changes = variables.values | flags
        values = _profile_values(hardware, recipe_values | changes, memory_gib)
        values |= _expected_speed(hardware, path.stem, changes)
        layers.append((f"profile {hardware.name}", values))
    layers += [("", variables.values), ("--set", flags)]
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, values in layers:
        for key, value in values.items():
            merged[key] = value
            origins[key] = origin or variables.origins[key]
    is_named = bool(BATCH_KEYS & (variables.values | flags).keys())
    settled = settle_ranks(
        _DEFAULTS | merged, is_named=is_named, hardware=hardware, offered=offered
    )
    config = _validate(merged | settled.values, origins)
    notes = [*variables.notes, *settled.notes]
    if hardware:
        _check_profile(config, origins, hardware)
        if hardware.batch_tiers and not is_named:
            config, fitted = _fit(config, hardware, memory_gib)
            notes += fitted
    return ResolvedConfig(
        config=config,
        origins=origins,
        sha256=config_sha256(config),
        profile=hardware.name if hardware else "none",
        notes=notes,
    )


def _fit(
    config: RunConfig, hardware: HardwareProfile, memory_gib: float | None
) -> tuple[RunConfig, list[str]]:
    """The tier's batch, cut into smaller micro-batches for a model that is larger than it knew."""
    have = memory_gib if memory_gib is not None else min(hardware.memory_gib, default=0.0)
    fitted = fit_batch(config, have)
    before, now = config.batch.micro_batch, fitted.batch.micro_batch
    if now == before:
        return config, []
    note = (
        f"batch.micro_batch is {now} instead of {before}, so that a step fits {have:.0f} GiB: "
        f"{now} x {fitted.batch.accumulation} rows"
    )
    return fitted, [note]


def _profile_values(
    hardware: HardwareProfile, asked: Mapping[str, Any], memory_gib: float | None
) -> dict[str, Any]:
    values = _flatten(hardware.config, f"profile {hardware.name}")
    seq_len = asked.get("batch.seq_len", RunConfig().batch.seq_len)
    is_length = isinstance(seq_len, int) and seq_len > 0  # else the configuration refuses it
    batch = hardware.batch_for(seq_len, memory_gib) if is_length else None
    if batch is None:
        return values
    return {"batch.micro_batch": batch[0], "batch.accumulation": batch[1]} | values


#: What decides how many tokens a second a recipe makes on a card.
_DECIDES_SPEED = ("model.", "batch.", "optimizer.", "runtime.", "data.pack_documents")


def _expected_speed(
    hardware: HardwareProfile, recipe: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Tokens/s that were measured with this recipe; nothing for a recipe that was changed."""
    expected = hardware.expected.tokens_per_s.get(recipe)
    if expected is None or any(key.startswith(_DECIDES_SPEED) for key in changes):
        return {}
    return {"watchdog.expected_tokens_per_s": expected}


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Values by section, from values by dotted key."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return nested


def _validate(flat: Mapping[str, Any], origins: Mapping[str, str]) -> RunConfig:
    try:
        return RunConfig.model_validate(nest(flat))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        origin = f"{origins[where]}: " if where in origins else ""
        message = f"{origin}{first_error(error)}"
        raise ConfigError(message) from error


def _check_profile(
    config: RunConfig, origins: Mapping[str, str], hardware: HardwareProfile
) -> None:
    """Refuse what the hardware cannot do; a profile is never overruled silently."""
    runtime = config.runtime
    if runtime.precision not in hardware.precisions:
        origin = origins.get("runtime.precision", "default")
        message = (
            f"{origin}: runtime.precision {runtime.precision} does not run on profile "
            f"{hardware.name}, which allows {', '.join(hardware.precisions)}"
        )
        raise ConfigError(message)
    _check_number_of_cards(config, origins, hardware)
    for branch in ("", "_compressed", "_selected", "_sliding", "_dense"):
        backend = getattr(runtime, f"backend{branch}")
        allowed = {"triton": hardware.triton, "flash": hardware.flash_attention}
        if not allowed.get(backend, True):
            origin = origins.get(f"runtime.backend{branch}", "default")
            message = (
                f"{origin}: runtime.backend{branch} {backend} does not run on profile "
                f"{hardware.name}; use sdpa or auto"
            )
            raise ConfigError(message)


def _check_number_of_cards(
    config: RunConfig, origins: Mapping[str, str], hardware: HardwareProfile
) -> None:
    cards, most = config.runtime.num_gpus, hardware.max_gpus
    if cards == "auto" or most is None or cards <= max(1, most):
        return
    origin = origins.get("runtime.num_gpus", "default")
    message = (
        f"{origin}: runtime.num_gpus {cards} is more than the {most} that profile {hardware.name} "
        "allows on one pod"
    )
    raise ConfigError(message)
