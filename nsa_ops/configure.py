"""Resolve what to run: the configuration with its origins, and what profiles say and why."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from nsa_core.config.backend_policy import ALL_BRANCHES, expected_backend
from nsa_core.config.base import ConfigError, VariableError, first_error
from nsa_core.config.profile import HardwareProfile, list_profiles, load_profile
from nsa_core.config.ranks import BATCH_KEYS, OfferedCards, settle_ranks
from nsa_core.config.recipe import ResolvedConfig, leaves, nest, parse_set, resolve
from nsa_core.config.run import RunConfig
from nsa_ops.context import Operator
from nsa_ops.errors import ConfigurationError
from nsa_ops.quantities import sentence_case
from nsa_ops.settings import Settings

_DEFAULT_RECIPE = {"cpu": "tiny-cpu"}
_FALLBACK_RECIPE = "m7c-125m"


@dataclass(frozen=True)
class RunChoice:
    """What the operator chose on the command line; empty means not given."""

    recipe: str = ""
    profile: str = ""
    sets: tuple[str, ...] = ()

    @property
    def flags(self) -> str:
        """What a hint adds to `--profile NAME` so that it means the same: recipe and values."""
        recipe = [("--recipe", self.recipe)] if self.recipe else []
        pairs = [*recipe, *(("--set", one) for one in self.sets)]
        return "".join(f" {name} {shlex.quote(value)}" for name, value in pairs)


@dataclass(frozen=True)
class Value:
    """One value of a configuration.

    Attributes:
        reason: Why the profile sets it so; empty otherwise.
    """

    key: str
    value: Any
    origin: str
    reason: str = ""


@dataclass(frozen=True)
class Checked:
    """A configuration that can be used.

    Attributes:
        profile: Hardware profile; `none` without one.
        notes: Lines that people should see.
        num_overridden: Values that differ in origin from the defaults.
    """

    recipe: str
    profile: str
    sha256: str
    notes: list[str]
    num_overridden: int


def resolve_choice(
    settings: Settings,
    choice: RunChoice,
    *,
    pod_profile: str = "",
    memory_gib: float | None = None,
    offered: OfferedCards | None = None,
) -> ResolvedConfig:
    """The configuration of a choice: flags, then settings, then the pod's profile, then defaults.

    Args:
        settings: Of the operator.
        choice: Recipe, profile and values.
        pod_profile: Profile of the pod, where the operator named none.
        memory_gib: Memory of the pod's card; None if unknown.
        offered: Cards of the pod, which settle `runtime.num_gpus=auto`; None if unknown.

    Raises:
        ConfigurationError: If a name, key or value is unknown, or two values cannot go together.
    """
    profile = choice.profile or settings.values.profile or pod_profile or None
    recipe = choice.recipe or settings.values.recipe or default_recipe(profile)
    try:
        return resolve(
            recipe,
            profile,
            choice.sets,
            settings.training_environment,
            memory_gib=memory_gib,
            offered=offered,
        )
    except VariableError as error:
        raise ConfigurationError(str(error), hint="See docs/variables.md") from error
    except ConfigError as error:
        hint = "See the keys with `nsa-ops config show`, names with `nsa-ops profile ls`"
        raise ConfigurationError(sentence_case(str(error)), hint=hint) from error


def default_recipe(profile: str | None) -> str:
    """Recipe of a profile when none is named: a tiny one where there is no card."""
    return _DEFAULT_RECIPE.get(profile or "", _FALLBACK_RECIPE)


def check_config(settings: Settings, choice: RunChoice) -> Checked:
    """Resolve a configuration and say what it is."""
    found = resolve_choice(settings, choice)
    return Checked(
        found.config.recipe, found.profile, found.sha256, found.notes, len(found.origins)
    )


def list_values(settings: Settings, choice: RunChoice) -> list[Value]:
    """Every value of a configuration with its origin and, where the profile decides, the reason.

    The backend of each branch tells what the policy comes to on that hardware.
    """
    found = resolve_choice(settings, choice)
    hardware = load_hardware(found.profile) if found.profile != "none" else None
    reasons = hardware.reasons if hardware else {}
    values = [
        Value(key, value, origin, reasons.get(key, "") if origin.startswith("profile") else "")
        for key, value in leaves(found.config).items()
        for origin in (found.origin(key),)
    ]
    known = _kernel_reasons(found, hardware) | _auto_cards(found, hardware) if hardware else {}
    return [replace(value, reason=known.get(value.key, value.reason)) for value in values]


def _auto_cards(found: ResolvedConfig, hardware: HardwareProfile) -> dict[str, str]:
    """What `auto` cards come to on this hardware, as far as it is known without a pod."""
    if found.config.runtime.num_gpus != "auto":
        return {}
    most = "all" if hardware.max_gpus is None else f"up to {hardware.max_gpus}"
    reason = f"{most} that a pod can give and the rows of a step divide by, settled by its plan"
    return {"runtime.num_gpus": reason}


def _kernel_reasons(found: ResolvedConfig, hardware: HardwareProfile) -> dict[str, str]:
    """By key, what the policy of each branch comes to on this hardware, and why."""
    return {
        f"runtime.backend_{branch}": expected_backend(found.config, hardware, branch)
        for branch in ALL_BRANCHES
    }


def list_settings(settings: Settings) -> list[Value]:
    """The operator's own settings with their origins."""
    values = settings.values.model_dump() | {"state_dir": str(settings.state_dir)}
    return [Value(name, value, settings.origins[name]) for name, value in values.items()]


def load_hardware(name: str) -> HardwareProfile:
    """The hardware profile of this name."""
    try:
        return load_profile(name)
    except ConfigError as error:
        raise ConfigurationError(
            sentence_case(str(error)), hint="See `nsa-ops profile ls`"
        ) from error


def all_hardware() -> list[HardwareProfile]:
    """Every hardware profile by name."""
    return [load_hardware(name) for name in list_profiles()]


def explain_profile(settings: Settings, choice: RunChoice) -> list[Value]:
    """The values that the profile decides, each with its reason, and what the kernels will be."""
    always = {"runtime.num_gpus", *(f"runtime.backend_{branch}" for branch in ALL_BRANCHES)}
    return [
        value
        for value in list_values(settings, choice)
        if value.origin == f"profile {choice.profile}" or value.key in always
    ]


def require_profile(operator: Operator, choice: RunChoice, pod_profile: str) -> str:
    """The profile that applies: the named one, else that of the settings, else the pod's."""
    profile = choice.profile or operator.settings.values.profile or pod_profile
    if not profile:
        message = "No hardware profile was named"
        hint = "Name one with `--profile`; see `nsa-ops profile ls`"
        raise ConfigurationError(message, hint=hint)
    return profile


@dataclass(frozen=True)
class ChangedConfig:
    """A configuration with other values, and what was settled with them."""

    config: RunConfig
    notes: list[str]


def overlay(
    config: RunConfig,
    sets: Sequence[str],
    hardware: HardwareProfile | None = None,
    offered: OfferedCards | None = None,
) -> ChangedConfig:
    """The configuration with these values changed; the same object without any.

    Another number of ranks shares the same rows of a step, unless they name the batch.

    Args:
        config: Of the attempt before.
        sets: Values as `--set` takes them.
        hardware: Profile, which limits `runtime.num_gpus=auto`.
        offered: Cards of the pod, which settle it.

    Raises:
        ConfigurationError: If a key is unknown, or the values cannot go together.
    """
    if not sets:
        return ChangedConfig(config, [])
    try:
        changed = dict(parse_set(flag) for flag in sets)
        values = leaves(config) | changed
        settled = settle_ranks(
            values,
            is_named=bool(BATCH_KEYS & changed.keys()),
            hardware=hardware,
            offered=offered,
        )
        return ChangedConfig(RunConfig.model_validate(nest(values | settled.values)), settled.notes)
    except ConfigError as error:
        raise ConfigurationError(str(error), hint="See `nsa-ops config show`") from error
    except ValidationError as error:
        message = f"--set: {first_error(error)}"
        raise ConfigurationError(message, hint="See `nsa-ops config show`") from error
