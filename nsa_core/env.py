"""The pod's environment: the only place in nsa_core that reads it."""

import os
from collections.abc import Mapping

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


def trainer_environment(allocator: str) -> dict[str, str]:
    """The environment a trainer is started with: this process's own and what a run needs.

    Args:
        allocator: Value of PYTORCH_CUDA_ALLOC_CONF; empty leaves what is set.
    """
    needed = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    if allocator:
        needed["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    return {**os.environ, **needed}


#: Variables that change what a run computes or how fast; recorded in env.json, nothing else is.
RECORDED = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_P2P_DISABLE",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
    "HF_HUB_OFFLINE",
)


def recorded_environment() -> dict[str, str]:
    """The variables of `RECORDED` that are set; never a secret."""
    return {name: os.environ[name] for name in RECORDED if name in os.environ}
