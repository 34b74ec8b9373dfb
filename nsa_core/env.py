"""The pod's environment: the only place in nsa_core that reads it."""

import os
from collections.abc import Mapping
from pathlib import Path

from nsa_core.config.base import FrozenModel


class RankEnvironment(FrozenModel):
    """What torchrun tells each process; a single process is rank 0 of 1."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def read_rank(environment: Mapping[str, str] | None = None) -> RankEnvironment:
    """RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them."""
    found = os.environ if environment is None else environment
    return RankEnvironment(
        rank=int(found.get("RANK", "0")),
        local_rank=int(found.get("LOCAL_RANK", "0")),
        world_size=int(found.get("WORLD_SIZE", "1")),
    )


def set_before_torch(name: str, value: str) -> None:
    """Set a variable that torch or its libraries read when they are first imported.

    A value that the operator set already stays.
    """
    os.environ.setdefault(name, value)


def trainer_environment(allocator: str, caches: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment a trainer is started with: this process's own and what a run needs.

    `allocator` is the value of PYTORCH_CUDA_ALLOC_CONF; empty leaves what is set.
    """
    needed = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    if allocator:
        needed["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    return {**os.environ, **needed, **(caches or {})}


#: Where the compilers keep what they made, below the folder of the pod's caches.
COMPILER_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "torchinductor"}


def compiler_caches(
    pod_root: Path, code_id: str, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Folders of the compilers' caches for one code, which every attempt of it finds again.

    Each code has its own: a cache that other code filled can hold nothing that this one may use,
    and goes when that code goes. A folder that the pod's owner has set stays.
    Without a hash of the code the folders stay as they are.
    """
    found = os.environ if environment is None else environment
    if code_id in ("", "unknown"):
        return {}
    caches = {}
    for variable, folder in COMPILER_CACHES.items():
        shared = pod_root / "caches" / folder
        owned = found.get(variable, "")
        if not owned or Path(owned).resolve() == shared.resolve():
            caches[variable] = str(shared / code_id)
    return caches


#: Variables that change what a run computes or how fast; recorded in env.json, nothing else is.
RECORDED = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_P2P_DISABLE",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
    "HF_HUB_OFFLINE",
)


def recorded_environment() -> dict[str, str]:
    """The variables of `RECORDED` that are set; never a secret."""
    return {name: os.environ[name] for name in RECORDED if name in os.environ}
