"""Policy and capability in, one backend per branch out; refuses rather than guesses."""

import importlib
import importlib.util
from types import ModuleType

import torch

from nsa_core.config.training import BackendName, RuntimeConfig
from nsa_core.kernels.backend import (
    BRANCHES,
    AttentionBackend,
    BackendChoice,
    Branch,
    BranchBackends,
    DeviceFacts,
)

#: Where each backend lives. A module offers `refusal(branch, facts) -> str | None` and
#: `create_backend() -> AttentionBackend`; it is imported only on a device that it could run on.
BACKEND_MODULES: dict[str, str] = {
    "triton": "nsa_core.kernels.triton.backend",
    "flash": "nsa_core.kernels.flash",
    "sdpa": "nsa_core.kernels.sdpa",
}
#: Backends that `auto` tries, fastest first; the last one runs everywhere.
AUTO_ORDER = ("triton", "sdpa")
NEEDS_CUDA = frozenset({"triton", "flash"})


def device_facts(device: torch.device, dtype: torch.dtype) -> DeviceFacts:
    """Ask torch for the compute capability of a device."""
    is_cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if is_cuda else None
    return DeviceFacts(device.type, capability, dtype)


def refusal(name: str, branch: Branch, facts: DeviceFacts) -> str | None:
    """Why a backend cannot run a branch on a device, or None if it can."""
    if name in NEEDS_CUDA and facts.device_type != "cuda":
        return f"{name} needs a CUDA device, and the device is {facts.device_type}"
    module = _load(name)
    if module is None:
        return f"{name} is not part of this installation ({BACKEND_MODULES[name]} is missing)"
    answer: str | None = module.refusal(branch, facts)
    return answer


def choose_backend(
    wanted: BackendName, branch: Branch, facts: DeviceFacts
) -> tuple[AttentionBackend, BackendChoice]:
    """The backend of one branch, with its name and the reason for it.

    Raises:
        ValueError: If a backend is named that cannot run this branch on this device.
    """
    if wanted != "auto":
        reason = refusal(wanted, branch, facts)
        if reason is not None:
            message = f"backend {wanted} cannot run the {branch} branch: {reason}; use `auto`"
            raise ValueError(message)
        return _create(wanted), BackendChoice(branch, wanted, "named by the configuration")
    passed_over: list[str] = []
    for name in AUTO_ORDER:
        reason = refusal(name, branch, facts)
        if reason is None:
            why = "; ".join(passed_over) or "the fastest of the known backends"
            return _create(name), BackendChoice(branch, name, why)
        passed_over.append(reason)
    message = f"no backend can run the {branch} branch: {'; '.join(passed_over)}"
    raise ValueError(message)


def choose_backends(runtime: RuntimeConfig, facts: DeviceFacts) -> BranchBackends:
    """Apply the configuration: a branch's own backend if it is named, else the common one.

    Raises:
        ValueError: As `choose_backend`.
    """
    own: dict[Branch, BackendName] = {
        "compressed": runtime.backend_compressed,
        "selected": runtime.backend_selected,
        "sliding": runtime.backend_sliding,
    }
    chosen = []
    for branch in BRANCHES:
        wanted = runtime.backend if own[branch] == "auto" else own[branch]
        chosen.append(choose_backend(wanted, branch, facts))
    compressed, selected, sliding = (backend for backend, _ in chosen)
    choices = tuple(choice for _, choice in chosen)
    return BranchBackends(compressed, selected, sliding, choices)


def _load(name: str) -> ModuleType | None:
    module_name = BACKEND_MODULES[name]
    if importlib.util.find_spec(module_name) is None:
        return None
    return importlib.import_module(module_name)


def _create(name: str) -> AttentionBackend:
    module = importlib.import_module(BACKEND_MODULES[name])
    backend: AttentionBackend = module.create_backend()
    return backend
