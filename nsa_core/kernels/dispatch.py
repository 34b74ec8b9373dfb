"""Policy and capability in, one backend per branch out; refuses rather than guesses."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Literal

import torch

from nsa_core.config.backend_policy import (
    Branch,
    BranchPolicy,
    RowLayout,
    branch_policy,
    branches_of,
    decode_refusal,
)
from nsa_core.config.run import RunConfig
from nsa_core.config.training import RuntimeConfig
from nsa_core.kernels.backend import (
    AttentionBackend,
    BackendChoice,
    BranchBackends,
    DeviceFacts,
)
from nsa_core.kernels.decode_attention import DecodeAttention, GatheredDecode

#: Where each backend lives. A module offers `refusal(branch, facts) -> str | None` and
#: `create_backend() -> AttentionBackend`, and that of Triton `note(facts) -> str`, which of its
#: kernels run; it is imported only on a device that it could run on.
BACKEND_MODULES: dict[str, str] = {
    "triton": "nsa_core.kernels.triton.triton_backend",
    "flash": "nsa_core.kernels.flash",
    "sdpa": "nsa_core.kernels.gathered_backend",
}
NEEDS_CUDA = frozenset({"triton", "flash"})


def device_facts(
    device: torch.device, dtype: torch.dtype, config: RunConfig | None = None
) -> DeviceFacts:
    """Ask torch for the compute capability of a device; take sizes and rows from a run."""
    is_cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if is_cuda else None
    if config is None:
        return DeviceFacts(device.type, capability, dtype)
    model = config.model
    return DeviceFacts(
        device.type,
        capability,
        dtype,
        widths=(model.head_dim_k, model.head_dim_v),
        rows=RowLayout.of(config),
        heads=(model.num_heads, model.num_kv_groups),
        blocks=(model.nsa.select_block, model.nsa.compress_stride),
    )


def refusal(name: str, branch: Branch, facts: DeviceFacts) -> str | None:
    """Why a backend cannot run a branch on a device, or None if it can."""
    if name in NEEDS_CUDA and facts.device_type != "cuda":
        return f"{name} needs a CUDA device, and the device is {facts.device_type}"
    module = _load(name)
    if isinstance(module, str):
        return module
    answer: str | None = module.refusal(branch, facts)
    return answer


def choose_backend(
    policy: BranchPolicy, facts: DeviceFacts
) -> tuple[AttentionBackend, BackendChoice]:
    """The backend of one branch, with its name and the reason for it.

    Raises:
        ValueError: If a backend is named that cannot run this branch on this device.
    """
    passed_over = [policy.reason] if policy.reason else []
    for name in policy.backends:
        reason = refusal(name, policy.branch, facts)
        if reason is None:
            why = passed_over or ["the fastest of the known backends"]
            if name == "triton":
                why = [*why, importlib.import_module(BACKEND_MODULES[name]).note(facts)]
            return _create(name, facts), BackendChoice(policy.branch, name, "; ".join(why))
        if policy.is_named:
            message = (
                f"backend {name} cannot run the {policy.branch} branch: {reason}; "
                f"set runtime.backend_{policy.branch}, or use `auto`"
            )
            raise ValueError(message)
        passed_over.append(reason)
    message = f"no backend can run the {policy.branch} branch: {'; '.join(passed_over)}"
    raise ValueError(message)


def choose_backends(
    runtime: RuntimeConfig, facts: DeviceFacts, attention: Literal["nsa", "dense"] = "nsa"
) -> BranchBackends:
    """Apply the policy of the configuration to every branch that a model has; once, at its start.

    Raises:
        ValueError: As `choose_backend`.
    """
    chosen = [
        choose_backend(branch_policy(runtime, branch, facts.rows), facts)
        for branch in branches_of(attention)
    ]
    choices = tuple(choice for _, choice in chosen)
    if attention == "dense":
        plain = _create("sdpa", facts)
        return BranchBackends(plain, plain, plain, choices, dense=chosen[0][0])
    compressed, selected, sliding = (backend for backend, _ in chosen)
    return BranchBackends(
        compressed, selected, sliding, choices, not_in_decode=_decode_refusal(facts)
    )


def choose_decode_attention(backends: BranchBackends) -> DecodeAttention:
    """Triton where the policy gave it the compressed and chosen keys, and decode has the sizes."""
    is_wanted = backends.compressed.name == backends.selected.name == "triton"
    if is_wanted and backends.not_in_decode is None:
        module = importlib.import_module("nsa_core.kernels.triton.decode_host")
        made: DecodeAttention = module.TritonDecode()
        return made
    return GatheredDecode()


def _decode_refusal(facts: DeviceFacts) -> str | None:
    if facts.widths is None or facts.blocks is None or facts.heads is None:
        return None
    num_heads, num_groups = facts.heads
    return decode_refusal(facts.widths, facts.blocks, num_heads // num_groups)


def _load(name: str) -> ModuleType | str:
    """The module of a backend, or in one line why there is none here."""
    module_name = BACKEND_MODULES[name]
    if importlib.util.find_spec(module_name) is None:
        return f"{name} is not part of this installation ({module_name} is missing)"
    try:
        return importlib.import_module(module_name)
    except (ImportError, OSError) as error:  # such as a library of another build
        return f"{name} is not usable: {str(error).strip().partition(chr(10))[0]}"


@cache
def _create(name: str, facts: DeviceFacts) -> AttentionBackend:
    """One object a name, so that branches on the same backend know that they are."""
    module = importlib.import_module(BACKEND_MODULES[name])
    if name == "flash":  # it has no choice of blocks of its own
        has_triton = refusal("triton", "compressed", facts) is None
        made: AttentionBackend = module.create_backend(
            _create("triton" if has_triton else "sdpa", facts)
        )
        return made
    backend: AttentionBackend = module.create_backend()
    return backend
