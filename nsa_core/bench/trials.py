"""Which runs a comparison trains: NSA and dense, or a recipe with settings and without; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from nsa_core.config.base import ConfigError, one_line
from nsa_core.config.recipe import ResolvedConfig, parse_set, resolve
from nsa_core.config.run import RunConfig

ATTENTIONS = ("nsa", "dense")
#: The run as the recipe and `--set` say, where settings are varied.
BASE = "base"
#: Settings that decide which tokens a run sees.
_SAME_FOR_ALL = ("data.", "batch.", "evaluation.", "schedule.steps", "model.vocab_size", "seed")


@dataclass(frozen=True, eq=False)
class Trial:
    """A run of the comparison.

    Attributes:
        name: `nsa` or `dense`, or `base` and the settings that are varied.
        sets: What it sets.
    """

    name: str
    sets: tuple[str, ...]
    resolved: ResolvedConfig


def plan_trials(recipe: str, sets: Sequence[str], varied: Sequence[str]) -> list[Trial]:
    """The runs in their order.

    Raises:
        ConfigError: If the two kinds of attention are compared and one is set, if a setting is
            varied that decides which tokens a run sees or changes nothing, if the recipe is varied,
            or if a run could log no step or needs several processes.
        ValidationError: If a value is none that the configuration takes.
    """
    trials: list[Trial] = []
    for name, own in _names(sets, varied).items():
        one = Trial(name, own, _resolve(recipe, own, flag=name if varied else ""))
        _check_different(one, trials)
        _check_trainable(one.resolved.config)
        trials.append(one)
    return trials


def _names(sets: Sequence[str], varied: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    if not varied:
        if any(parse_set(flag)[0] == "model.attention" for flag in sets):
            message = "--set model.attention: this bench trains both kinds of attention"
            raise ConfigError(message)
        return {one: (*sets, f"model.attention={one}") for one in ATTENTIONS}
    for flag in varied:
        key = parse_set(flag, "--vary")[0]
        if key == "recipe":
            message = (
                f"--vary {flag}: all runs have one recipe; choose it with --recipe, vary settings"
            )
            raise ConfigError(message)
        if key.startswith(_SAME_FOR_ALL):
            message = f"--vary {key}: the runs would not see the same tokens; use --set for all"
            raise ConfigError(message)
        if varied.count(flag) > 1:
            message = f"--vary {flag} is given twice"
            raise ConfigError(message)
    return {BASE: tuple(sets)} | {flag: (*sets, flag) for flag in varied}


def _resolve(recipe: str, sets: Sequence[str], *, flag: str) -> ResolvedConfig:
    """Resolve a run; what a varied setting breaks is said of that setting."""
    if flag in {"", BASE}:
        return resolve(recipe, sets=sets)
    try:
        return resolve(recipe, sets=sets)
    except (ConfigError, ValidationError) as error:
        message = f"--vary {flag}: {one_line(error).removeprefix('--set: ')}"
        raise ConfigError(message) from error


def _check_different(one: Trial, before: Sequence[Trial]) -> None:
    equal = next((other for other in before if other.resolved.config == one.resolved.config), None)
    if equal is not None:
        message = f"--vary {one.name} changes nothing: the run would be that of {equal.name}"
        raise ConfigError(message)


def _check_trainable(config: RunConfig) -> None:
    steps, every = config.schedule.steps, config.telemetry.log_every
    if steps < every:
        message = (
            f"schedule.steps {steps} is below telemetry.log_every {every}: no step would be "
            "logged, and none compared; add --set telemetry.log_every=1"
        )
        raise ConfigError(message)
    if config.num_ranks > 1:
        message = f"this bench trains in one process, and the run has {config.num_ranks} ranks"
        raise ConfigError(message)
