"""Guardrails: what a long run must not be launched with, each with its reason and its override."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nsa_core.config.profile import HardwareProfile
from nsa_core.config.run import RunConfig
from nsa_core.rundir.redaction import redact
from nsa_core.rundir.report import CheckResult
from nsa_ops.errors import ConfigurationError, RefusedError
from nsa_ops.estimate import Estimate, judge_fit
from nsa_ops.machine.offer import PodCards
from nsa_ops.preflight.several_cards import (
    Finding,
    judge_kinds,
    judge_number,
    judge_shared_memory,
    judge_use,
    num_cards,
)
from nsa_ops.quantities import count_of, format_bytes

LONG_RUN_STEPS = 5000
TEST_RECIPES = ("tiny-cpu", "custom")
TOY_DIM = 256
TOY_LAYERS = 4
#: Overrides the whole preflight, not one guardrail of the configuration.
PREFLIGHT = "preflight"
_MIB = 2**20


@dataclass(frozen=True)
class Subject:
    """What guardrails look at.

    Attributes:
        profile: Where; None if no profile was named.
        disk_free_bytes: Free on the pod; None if unknown.
        card_memory_mib: Memory of the smallest card; None if unknown or no card is used.
        cards: That the run can use; None if unknown.
        shm_free_bytes: Free in /dev/shm; None if unknown.
    """

    config: RunConfig
    profile: HardwareProfile | None
    estimate: Estimate
    disk_free_bytes: int | None
    card_memory_mib: float | None
    cards: PodCards | None = None
    shm_free_bytes: int | None = None


@dataclass(frozen=True)
class Guardrail:
    """One rule.

    Attributes:
        name: Its id, as `--override` takes it.
        fix: What to do instead of overriding it.
        any_length: It holds for short runs too.
        several_cards: It is only about runs on several cards of a pod, short ones too.
        is_final: Nothing overrides it: what it refuses cannot work.
    """

    name: str
    look: Callable[[Subject], Finding]
    fix: str | Callable[[Subject], str]
    any_length: bool = False
    several_cards: bool = False
    is_final: bool = False


def _precision(subject: Subject) -> Finding:
    profile, precision = subject.profile, subject.config.runtime.precision
    if profile is None or not profile.needs_card or precision != "fp32":
        return False, f"precision is {precision}"
    better = profile.precisions[0]
    return better != "fp32", f"precision is fp32 on a card that computes {better} many times faster"


def _checkpoints(subject: Subject) -> Finding:
    every = subject.config.checkpoint.save_every
    if every == 0:
        return True, "save_every is 0: a crash loses the whole run"
    return False, f"a checkpoint every {count_of(every, 'step')}"


def _dimensions(subject: Subject) -> Finding:
    model = subject.config.model
    toy = model.dim < TOY_DIM or model.num_layers < TOY_LAYERS
    return toy, f"dim {model.dim} and {count_of(model.num_layers, 'layer')}" + (
        " are a toy" if toy else ""
    )


def _recipe(subject: Subject) -> Finding:
    recipe = subject.config.recipe
    return recipe in TEST_RECIPES, f"recipe is {recipe}"


def _data(subject: Subject) -> Finding:
    data = subject.config.data
    if data.source == "synthetic" or data.synthetic_on_fail:
        return True, "the run could train on random tokens"
    return False, f"data comes from {data.source}"


def _schedule(subject: Subject) -> Finding:
    schedule = subject.config.schedule
    if schedule.warmup_steps >= schedule.steps:
        return (
            True,
            f"warm-up of {count_of(schedule.warmup_steps, 'step')} fills all {schedule.steps}",
        )
    return False, f"the schedule ends at step {schedule.steps}, where the run ends"


def _validation(subject: Subject) -> Finding:
    fraction = subject.config.data.validation_fraction
    if subject.config.evaluation.eval_every == 0:
        return True, "eval_every is 0: nothing is measured on text that was not trained on"
    return False, f"{100 * fraction:.1f} % of the documents, chosen by hash, are never trained on"


def _disk(subject: Subject) -> Finding:
    need, free = subject.estimate.disk_bytes, subject.disk_free_bytes
    shards = subject.estimate.staging.shard_bytes
    ours = f"checkpoints need {format_bytes(need - (shards or 0))}, shards of the data "
    ours += "come on top" if shards is None else format_bytes(shards)
    if free is None:
        return None, f"{ours}; free space is unknown"
    return need > free, f"{ours}; {format_bytes(free)} are free"


def _memory(subject: Subject) -> Finding:
    if subject.profile is not None and not subject.profile.needs_card:
        return False, "no card is used"
    need, have = subject.estimate.memory.total, subject.card_memory_mib
    if have is None:
        return None, f"a step needs about {need:,.0f} MiB, the card's memory is unknown"
    fit = judge_fit(subject.config, have)
    return not fit.is_fitting, fit.sentence


def _memory_fix(subject: Subject) -> str:
    return judge_fit(subject.config, subject.card_memory_mib or 0.0).advice


GUARDRAILS: Mapping[str, Guardrail] = {
    rail.name: rail
    for rail in (
        Guardrail("precision", _precision, "Leave `runtime.precision` to the profile"),
        Guardrail("checkpoints", _checkpoints, "Set `checkpoint.save_every=1000`"),
        Guardrail("dimensions", _dimensions, "Name a real recipe with `--recipe`"),
        Guardrail("recipe", _recipe, "Name a real recipe with `--recipe m7c-125m`"),
        Guardrail("data", _data, "Set `data.source` to real text"),
        Guardrail("schedule", _schedule, "Make `schedule.warmup_steps` a small share of the steps"),
        Guardrail("validation", _validation, "Set `evaluation.eval_every=1000`"),
        Guardrail(
            "disk",
            _disk,
            "Free space, lower `checkpoint.keep_last`, or set `data.max_tokens`",
            any_length=True,
        ),
        Guardrail("memory", _memory, _memory_fix, any_length=True),
        Guardrail(
            "cards",
            lambda subject: judge_number(subject.config, subject.cards),
            "Set `runtime.num_gpus=auto`, or take a pod with more cards",
            several_cards=True,
            is_final=True,
        ),
        Guardrail(
            "busy-cards",
            lambda subject: judge_use(subject.config, subject.cards),
            "Wait for them, set `runtime.num_gpus=auto`",
            several_cards=True,
        ),
        Guardrail(
            "card-kinds",
            lambda subject: judge_kinds(subject.config, subject.cards),
            "Lower `runtime.num_gpus` to the cards of one kind",
            several_cards=True,
        ),
        Guardrail(
            "shared-memory",
            lambda subject: judge_shared_memory(subject.config, subject.shm_free_bytes),
            "Start the container with `--shm-size=1g`",
            several_cards=True,
        ),
    )
}


def check_guardrails(subject: Subject) -> list[CheckResult]:
    """What every guardrail says of a run; those for long runs are skipped for short ones; pure."""
    is_long = subject.config.schedule.steps >= LONG_RUN_STEPS
    has_several = num_cards(subject.config) > 1
    return [
        _check(rail, subject, is_long=is_long)
        for rail in GUARDRAILS.values()
        if has_several or not rail.several_cards
    ]


def _check(rail: Guardrail, subject: Subject, *, is_long: bool) -> CheckResult:
    name = f"guardrail.{rail.name}"
    if not (is_long or rail.any_length or rail.several_cards):
        message = f"only for runs of at least {LONG_RUN_STEPS} steps"
        return CheckResult(name=name, status="skipped", message=message)
    against, message = rail.look(subject)
    if against is None:
        return CheckResult(name=name, status="unknown", message=message)
    if not against:
        return CheckResult(name=name, status="pass", message=message)
    fix = rail.fix if isinstance(rail.fix, str) else rail.fix(subject)
    hint = fix if rail.is_final else f"{fix}, or `--override {rail.name}=REASON`"
    return CheckResult(name=name, status="fail", message=message, hint=hint)


def parse_overrides(flags: Sequence[str], more: Sequence[str] = ()) -> dict[str, str]:
    """Names and redacted reasons of `--override NAME=REASON`; `more` are further known names.

    Raises:
        ConfigurationError: If a name is unknown or a reason is missing.
    """
    overrides = {}
    for flag in flags:
        name, _, reason = flag.partition("=")
        known = [*(rail.name for rail in GUARDRAILS.values() if not rail.is_final)]
        known += [PREFLIGHT, *more]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"Did you mean `{near[0]}`?" if near else f"Known: {', '.join(known)}"
            message = f"There is no guardrail `{name}`"
            raise ConfigurationError(message, hint=advice)
        if not reason.strip():
            message = f"`--override {name}` needs a reason, which is recorded with the run"
            raise ConfigurationError(message, hint=f"Write `--override {name}='why it is fine'`")
        overrides[name] = redact(reason.strip())
    return overrides


def apply_overrides(
    results: Sequence[CheckResult], overrides: Mapping[str, str]
) -> list[CheckResult]:
    """The results where an overridden failure is a warning that carries its reason."""
    return [
        result.model_copy(
            update={"status": "warn", "message": f"{result.message}; overridden: {reason}"}
        )
        if result.status == "fail"
        and (reason := overrides.get(result.name.removeprefix("guardrail.")))
        else result
        for result in results
    ]


def require_guardrails(subject: Subject, overrides: Mapping[str, str]) -> list[CheckResult]:
    """What every guardrail says of a run, where none forbids it.

    Raises:
        RefusedError: With the first one's reason and override, and the names of the others.
    """
    return _require(apply_overrides(check_guardrails(subject), overrides))


def require_several_cards(subject: Subject, overrides: Mapping[str, str]) -> list[CheckResult]:
    """The same for those that are about several cards of a pod alone.

    Raises:
        RefusedError: As `require_guardrails`.
    """
    rails = [rail for rail in GUARDRAILS.values() if rail.several_cards]
    if num_cards(subject.config) < 2:
        return []
    return _require(
        apply_overrides([_check(one, subject, is_long=True) for one in rails], overrides)
    )


def _require(results: list[CheckResult]) -> list[CheckResult]:
    failed = [result for result in results if result.status == "fail"]
    if not failed:
        return results
    first, *others = failed
    names = ", ".join(f"`{other.name}`" for other in others)
    more = f" (also {names})" if others else ""
    message = f"Refused by `{first.name}`: {first.message}{more}"
    raise RefusedError(message, hint=first.hint)
