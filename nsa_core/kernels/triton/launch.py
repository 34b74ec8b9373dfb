"""Launch tables: tiles, warps and stages of every kernel, per architecture and head width.

Rows are (token, head) pairs, keys are key rows of a tile. The sm_90 numbers were measured on an
H100 or an H200 (docs/kernel-experiments.md); sm_80 and sm_89 are cut to their shared memory
(163 KB, 99 KB) and only compiled. A kernel's tile follows the data where it must: `row_tile` never
pads a group, a key tile of the forward over chosen blocks is one selection block, and the key
gradients of the window and of chosen blocks take one (or two). The keys of `one_tile` are the
fewest of its tile.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

Kernel = Literal[
    "compressed_forward", "short_compressed_forward", "sliding_forward", "chosen_forward",
    "query_gradient", "compressed_key_gradient", "sliding_key_gradient", "chosen_key_gradient",
    "one_tile", "score", "item_forward", "item_backward", "merge", "band",
]  # fmt: skip
MAX_SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched."""

    rows: int
    keys: int
    warps: int
    stages: int
    max_registers: int | None = None

    def options(self) -> dict[str, int]:
        """Keyword arguments of a Triton launch."""
        options = {"num_warps": self.warps}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options


@dataclass(frozen=True)
class KernelPolicy:
    """Choices between algorithms, measured per architecture and head width."""

    dense_until: int  # longest document for which the masked-dense path is the faster one
    short_until: int  # longest document whose compressed forward is launched as a short one's
    one_tile_keys: int  # compressed keys up to which attention and the choice share a kernel
    chunk_tokens: int  # queries whose partial outputs are alive at a time (memory)
    item_queries: int  # queries per work item of a KV block
    segment_tokens: int  # queries per program of the compressed key gradient
    partial_dq: bool  # items leave partial dq for a second kernel instead of adding by atomics


def _attend(forward: Launch, query_gradient: Launch, key_gradient: Launch) -> dict[Kernel, Launch]:
    """The same launches for all three modes of `attend.py`."""
    return {
        "compressed_forward": forward,
        "short_compressed_forward": forward,
        "sliding_forward": forward,
        "chosen_forward": forward,
        "query_gradient": query_gradient,
        "compressed_key_gradient": key_gradient,
        "sliding_key_gradient": key_gradient,
        "chosen_key_gradient": key_gradient,
    }


_SM90_64: dict[Kernel, Launch] = {
    **_attend(Launch(64, 64, 4, 3), Launch(64, 64, 4, 3, 168), Launch(64, 64, 4, 3)),
    "compressed_forward": Launch(64, 64, 4, 3, 128),
    "short_compressed_forward": Launch(64, 32, 4, 3),
    "sliding_forward": Launch(64, 32, 4, 3),
    "chosen_forward": Launch(64, 64, 4, 3, 128),
    "one_tile": Launch(64, 64, 4, 3),
    "score": Launch(64, 32, 4, 1),
    "item_forward": Launch(64, 64, 4, 1, 80),
    "item_backward": Launch(64, 64, 4, 1),
    "merge": Launch(64, 64, 4, 4, 128),
    "band": Launch(64, 64, 4, 1),
}
_SM90_128: dict[Kernel, Launch] = {
    **_attend(Launch(128, 64, 8, 3), Launch(64, 64, 4, 2), Launch(64, 128, 8, 3)),
    "one_tile": Launch(64, 128, 4, 1),
    "score": Launch(64, 256, 8, 2),
    "item_forward": Launch(64, 64, 4, 1),
    "item_backward": Launch(64, 64, 4, 2),
    "merge": Launch(64, 64, 4, 3, 168),
    "band": Launch(64, 64, 4, 1),
}
# Before sm_90 products are made by single warps from registers: more warps for the same tile.
_SM80_64: dict[Kernel, Launch] = {
    **_attend(Launch(64, 64, 4, 2), Launch(64, 64, 8, 2), Launch(64, 64, 8, 1)),
    "score": Launch(64, 64, 8, 2),
    "item_forward": Launch(64, 64, 4, 1),
    "item_backward": Launch(64, 64, 8, 1),
    "merge": Launch(64, 64, 8, 1),
    "band": Launch(64, 64, 8, 1),
}
_SM80_128: dict[Kernel, Launch] = {
    **_attend(Launch(64, 64, 8, 2), Launch(64, 64, 8, 1), Launch(64, 64, 8, 1)),
    "score": Launch(64, 64, 8, 2),
    "item_forward": Launch(64, 64, 8, 1),
    "item_backward": Launch(32, 64, 8, 1),
    "merge": Launch(64, 64, 8, 1),
    "band": Launch(64, 64, 8, 1),
}
_TABLES: dict[tuple[int, int], dict[Kernel, Launch]] = {
    (80, 64): _SM80_64,
    (80, 128): _SM80_128,
    (89, 64): _SM80_64,
    (89, 128): _SM80_128,
    (90, 64): _SM90_64,
    (90, 128): _SM90_128,
}
_POLICIES = {
    64: KernelPolicy(
        dense_until=3328,
        short_until=8192,
        one_tile_keys=128,
        chunk_tokens=16384,
        item_queries=128,
        segment_tokens=1024,
        partial_dq=False,
    ),
    128: KernelPolicy(
        dense_until=3328,
        short_until=0,
        one_tile_keys=128,
        chunk_tokens=8192,
        item_queries=64,
        segment_tokens=1024,
        partial_dq=True,
    ),
}
_INTERPRETED = Launch(32, 16, 4, 1)
_INTERPRETED_POLICY = KernelPolicy(
    dense_until=3328,
    short_until=0,
    one_tile_keys=32,
    chunk_tokens=64,
    item_queries=16,
    segment_tokens=64,
    partial_dq=False,
)


def width_class(key_width: int, value_width: int) -> int:
    """64 or 128: the table that serves these head widths."""
    return 64 if max(key_width, value_width) <= 64 else 128


def architecture(major: int, minor: int) -> int:
    """The table's architecture for a compute capability.

    Raises:
        ValueError: If the card is older than sm_80, for which there are no Triton kernels here.
    """
    capability = 10 * int(major) + int(minor)
    if capability < 80:
        message = (
            f"the Triton kernels need sm_80 or newer, and this card is sm_{capability}; "
            "use the sdpa backend"
        )
        raise ValueError(message)
    if 90 <= capability < 120:
        return 90
    return 80 if capability in {80, 87} else 89


INTERPRETER = 0


def device_architecture(device: torch.device) -> int:
    """Architecture of the table for a device; a CPU can only interpret the kernels."""
    if device.type == "cpu":
        return INTERPRETER
    found: int = _card_architecture(device)  # its decorator has no types
    return found


@torch.compiler.assume_constant_result  # a compiler that traces into a cache warns of it
def _card_architecture(device: torch.device) -> int:
    return _cached_architecture(device)


@cache
def _cached_architecture(device: torch.device) -> int:
    return architecture(*torch.cuda.get_device_capability(device))


@cache
def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a card; None of a CPU."""
    return None if device.type == "cpu" else torch.cuda.get_device_capability(device)


def launch_for(kernel: Kernel, device: torch.device, key_width: int, value_width: int) -> Launch:
    """How to launch `kernel` on `device` for these head widths."""
    arch = device_architecture(device)
    if arch == INTERPRETER:
        return _INTERPRETED
    return _TABLES[arch, width_class(key_width, value_width)][kernel]


def policy_for(device: torch.device, key_width: int, value_width: int) -> KernelPolicy:
    """Thresholds and chunk sizes for `device`."""
    if device_architecture(device) == INTERPRETER:
        return _INTERPRETED_POLICY
    return _POLICIES[width_class(key_width, value_width)]


def row_tile(launch: Launch, block: int, heads: int) -> int:
    """Largest power of two up to `launch.rows` that divides the rows of a query block exactly."""
    rows = launch.rows
    while (block * heads) % rows:
        rows //= 2
    return rows


def key_tile(launch: Launch, block: int) -> int:
    """Key tile of kernels whose key tiles are selection blocks: one block, or two."""
    return 2 * block if launch.keys >= 2 * block else block
