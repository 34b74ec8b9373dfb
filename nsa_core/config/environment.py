"""The NSA_* variables that people have in their shells, and what each one means here."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nsa_core.config.backend_policy import ALL_BRANCHES
from nsa_core.config.base import VariableError

#: Variables of the operator's own settings begin so and are not the run's.
OPERATOR_PREFIX = "NSA_OPS_"

Values = dict[str, Any]


@dataclass(frozen=True)
class Variable:
    """One variable."""

    meaning: str  # what it does, in one line for the reference table
    #: Turns its value into configuration values by dotted key; None if something else replaced it,
    #: and `meaning` then says what.
    fields: Callable[[str], Values] | None = None


def _integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        message = f"{name}={value!r} must be a whole number; unset it or use --set instead"
        raise VariableError(message) from error


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        message = f"{name}={value!r} must be a number; unset it or use --set instead"
        raise VariableError(message) from error


def _whole(name: str, key: str, meaning: str) -> tuple[str, Variable]:
    return name, Variable(f"{key}: {meaning}", lambda value: {key: _integer(name, value)})


def _is_on(name: str, value: str) -> bool:
    """1 is on; 0 and the sentinel -1 are off.

    Raises:
        VariableError: For anything else.
    """
    found = _integer(name, value)
    if found not in (-1, 0, 1):
        message = f"{name}={value!r} must be 1, 0 or -1; unset it or use --set instead"
        raise VariableError(message)
    return found == 1


def _flash(name: str, *keys: str) -> tuple[str, Variable]:
    meaning = f"{', '.join(keys)}: 1 lets flash-attn serve it from any length, 0 and -1 are off"
    return name, Variable(
        meaning, lambda value: dict.fromkeys(keys, 0 if _is_on(name, value) else -1)
    )


def _tokenizer(value: str) -> Values:
    vocabulary = {"byte": 320, "gpt2": 50_304}
    return {"data.tokenizer": value} | (
        {"model.vocab_size": vocabulary[value]} if value in vocabulary else {}
    )


def _triton_selection(value: str) -> Values:
    on = _is_on("NSA_USE_TRITON_SEL", value)
    return {"runtime.backend_selected": "triton" if on else "sdpa"}


def _rope_scale(value: str) -> Values:
    scale = _number("NSA_ROPE_SCALE", value)
    return {"model.rope.scale": scale, "model.rope.scaling": "none" if scale == 1 else "linear"}


def _force_parity(value: str) -> Values:
    keys = ("backend", *(f"backend_{branch}" for branch in ALL_BRANCHES))
    is_on = _is_on("NSA_FORCE_PARITY", value)
    return dict.fromkeys((f"runtime.{key}" for key in keys), "sdpa") if is_on else {}


def _prefetch(value: str) -> Values:
    return {} if _is_on("NSA_FWE_PREFETCH", value) else {"data.prefetch": 0}


def _replaced(meaning: str) -> Variable:
    return Variable(f"accepted and without effect: {meaning}")


_ONE_PATH = _replaced("there is one mathematics and one prefill path; backends change speed only")

#: Every variable that is known. Order matters: later entries override earlier ones.
VARIABLES: Mapping[str, Variable] = dict(
    [
        _whole("NSA_BATCH_SIZE", "batch.micro_batch", "sequences of one micro-step on one card"),
        _whole(
            "NSA_ACCUM",
            "batch.accumulation",
            "micro-steps of one optimizer step, on all ranks together",
        ),
        ("NSA_TOKENIZER", Variable("data.tokenizer and a vocabulary that fits it", _tokenizer)),
        _whole("NSA_FWE_DOC_BATCH", "data.document_batch", "documents tokenised at a time"),
        _whole("NSA_FWE_Q", "data.prefetch", "batches kept ready"),
        ("NSA_FWE_PREFETCH", Variable("data.prefetch: 0 fetches in the loop", _prefetch)),
        _whole("NSA_FWE_WARMUP_BATCHES", "data.warmup_batches", "batches fetched before step 1"),
        (
            "NSA_FWE_WARMUP_TIMEOUT",
            Variable(
                "data.loader_timeout_s: deadline of a batch",
                lambda value: {"data.loader_timeout_s": _number("NSA_FWE_WARMUP_TIMEOUT", value)},
            ),
        ),
        ("NSA_ROPE_SCALE", Variable("model.rope.scale with linear scaling", _rope_scale)),
        _flash("NSA_USE_FA2", "runtime.flash_min_len_sliding", "runtime.flash_min_len_compressed"),
        _flash("NSA_USE_FA2_WIN", "runtime.flash_min_len_sliding"),
        _flash("NSA_USE_FA2_CMP", "runtime.flash_min_len_compressed"),
        _whole(
            "NSA_FA2_MIN_LEN_WIN",
            "runtime.flash_min_len_sliding",
            "tokens; -1 is off, and so is any length beside NSA_USE_FA2=0",
        ),
        _whole(
            "NSA_FA2_MIN_LEN_CMP",
            "runtime.flash_min_len_compressed",
            "tokens; -1 is off, and so is any length beside NSA_USE_FA2=0",
        ),
        (
            "NSA_USE_TRITON_SEL",
            Variable("runtime.backend_selected: 1 triton, 0 and -1 sdpa", _triton_selection),
        ),
        (
            "NSA_FORCE_PARITY",
            Variable(
                "runtime.backend and runtime.backend_<branch>: 1 is sdpa everywhere, whatever "
                "NSA_USE_TRITON_SEL says",
                _force_parity,
            ),
        ),
        ("NSA_PREFILL_BATCHED", _ONE_PATH),
        ("NSA_PREFILL_TILE", _replaced("long prompts are prefilled in chunks by themselves")),
        ("NSA_USE_SEL_PACK", _ONE_PATH),
        ("NSA_USE_SEL_VARLEN", _ONE_PATH),
        ("NSA_SEL_RANGES_V2", _ONE_PATH),
        ("NSA_SEL_RANGES_V2_MIN_S", _ONE_PATH),
        ("NSA_STRICT_ASSERTS", _replaced("`nsa-ops preflight` runs the checks before a run")),
        ("NSA_DEBUG_COMPARE", _replaced("`nsa-ops preflight` compares with the reference")),
        ("NSA_SDPA_AUDIT", _replaced("each heartbeat names the kernel of every branch")),
        ("NSA_DEBUG_TIMING", _replaced("each heartbeat holds step, data and fetch times")),
        ("NSA_ENV_STATIC", _replaced("variables are read once, before the launch")),
        ("DDP_SAFE", _replaced("accumulation never syncs between micro-steps")),
    ]
)


@dataclass(frozen=True)
class EnvironmentValues:
    """What the variables say."""

    values: Values  # configuration values by dotted key
    origins: dict[str, str]  # variable that each one comes from
    notes: list[str]  # one line for every variable that was accepted without effect


def read_variables(environment: Mapping[str, str]) -> EnvironmentValues:
    """Translate the NSA_* variables of an environment; pure.

    Raises:
        VariableError: For an NSA_* name that is not known, or a value that cannot be read.
    """
    given = [
        name
        for name in environment
        if name == "DDP_SAFE" or (name.startswith("NSA_") and not name.startswith(OPERATOR_PREFIX))
    ]
    for name in given:
        if name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1)
            advice = f"did you mean {near[0]}?" if near else "unset it"
            message = f"{name} is not a variable of this project: {advice}"
            raise VariableError(message)
    values: Values = {}
    origins: dict[str, str] = {}
    notes: list[str] = []
    for name, variable in VARIABLES.items():
        if name not in given:
            continue
        if variable.fields is None:
            notes.append(f"{name}: {variable.meaning}")
            continue
        for key, value in variable.fields(environment[name].strip()).items():
            values[key], origins[key] = value, name
    for key, name in _flash_switched_off(environment).items():
        values[key], origins[key] = -1, name
    return EnvironmentValues(values, origins, notes)


def _flash_switched_off(environment: Mapping[str, str]) -> dict[str, str]:
    """By key, the switch that keeps flash-attn off whatever length was given beside it."""
    found = {}
    for branch, short in (("sliding", "WIN"), ("compressed", "CMP")):
        given = [name for name in (f"NSA_USE_FA2_{short}", "NSA_USE_FA2") if name in environment]
        if given and not _is_on(given[0], environment[given[0]].strip()):
            found[f"runtime.flash_min_len_{branch}"] = given[0]
    return found
