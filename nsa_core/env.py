"""The pod's environment: the only place in nsa_core that reads it."""

import os
from collections.abc import Mapping
from pathlib import Path

from nsa_core.config.base import FrozenModel


class RankEnvironment(FrozenModel):
    """What torchrun tells each process; a single process is rank 0 of 1.

    Attributes:
        local_rank: Number of the process among those of its pod.
        local_size: Processes of its pod.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank keeps the tables and checkpoints of the run."""
        return self.rank == 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its pod: events, log and exit record."""
        return self.local_rank == 0

    @property
    def local_ranks(self) -> range:
        """The ranks of its pod."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)


_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})


def read_rank(environment: Mapping[str, str] | None = None) -> RankEnvironment:
    """RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them."""
    found = os.environ if environment is None else environment
    return RankEnvironment(
        rank=int(found.get("RANK", "0")),
        local_rank=int(found.get("LOCAL_RANK", "0")),
        world_size=int(found.get("WORLD_SIZE", "1")),
        local_size=int(found.get("LOCAL_WORLD_SIZE", "1")),
    )


def set_before_torch(name: str, value: str) -> None:
    """Set a variable that torch or its libraries read when they are first imported.

    A value that the operator set already stays.
    """
    os.environ.setdefault(name, value)


def trainer_environment(allocator: str, caches: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment a trainer is started with: this process's own and what a run needs.

    Ranks that an engine has given to its machines are not those of the run: torchrun sets its own.

    `allocator` is the value of PYTORCH_CUDA_ALLOC_CONF; empty leaves what is set.
    """
    needed = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    if allocator:
        needed["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    own = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    return {**own, **needed, **(caches or {})}


#: How torchrun lets the ranks of one pod meet: at a port that is free, and no name is looked up.
MEETING_ON_ONE_POD = (
    "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
    "--local-addr", "127.0.0.1",
)  # fmt: skip


def ranks_environment(
    *,
    num_local: int,
    threads: int,
    uses_cards: bool,
    interface: str | None,
    recorder_prefix: Path,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What the ranks of one pod need besides `trainer_environment`; what the owner has set stays.

    Args:
        num_local: Ranks of this pod, which share its processors.
        threads: Processor threads of each; 0 divides what there is.
        uses_cards: The ranks talk through NCCL.
        interface: Network interface that leads to the other pods, empty where the libraries choose
            it; None where there is one pod.
        recorder_prefix: Path of the flight recorder's dumps; torch appends the rank.
        environment: What the owner has set; by default this process's own.
    """
    found = os.environ if environment is None else environment
    share = threads or max(1, len(os.sched_getaffinity(0)) // num_local)
    wanted = {"OMP_NUM_THREADS": str(share)}
    if interface is None:  # else gloo looks up the host's name, which not every container knows
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    elif interface:
        wanted |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if uses_cards:
        wanted |= FLIGHT_RECORDER | {"TORCH_FR_DUMP_TEMP_FILE": str(recorder_prefix)}
    needed = {name: value for name, value in wanted.items() if not found.get(name)}
    return needed | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


#: A collective that takes too long ends its rank, and leaves the last collectives in a file. 3 ends
#: the process without aborting the communicators first, which can hang as well and lose the file.
FLIGHT_RECORDER = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
}

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
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "GLOO_SOCKET_IFNAME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_BUFFER_SIZE",
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
