"""How a token's attention is cut into slices and launched, per architecture and head width.

The form "four" is the measured one. The others compute the same and wait for a measurement:
`_FORMS` says which is used where.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import triton

from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton import launch as launch_table

ROWS = 16  # the fewest rows of a product
_MAX_SLICES = 64  # of one branch: the merge holds them all
_MAX_TILES = 16  # of ranked blocks: the choice goes through the best of all of them
_MAX_COUNTED = 64  # candidates up to which comparing each with each is the shorter way to a choice
_MERGE_ELEMENTS = 2048  # of outputs that a warp holds while it merges: 64 registers

#: "four": four launches. "lean": four with a shorter choice and merge. "overlapped": these, each
#: beginning while the one before it runs (sm_90). "single": one cooperative launch.
Form = Literal["four", "lean", "overlapped", "single"]


@dataclass(frozen=True)
class DecodeLaunch:
    """How the kernels of one architecture are launched.

    Attributes:
        programs_per_core: Slices are cut until there are about so many a multiprocessor.
        keys: Keys of a tile.
        warps: Of the kernels that read keys.
        stages: Tiles that are on their way at a time.
        ranked_blocks: Selection blocks that a program ranks, at least.
        rank_warps: Of that program.
        resident: Programs of the single launch that fit on a multiprocessor together.
    """

    programs_per_core: int
    keys: int
    warps: int
    stages: int
    ranked_blocks: int
    rank_warps: int
    resident: int = 1

    def for_dtype(self, dtype: torch.dtype) -> "DecodeLaunch":
        """Tiles of as many bytes: half the keys in float32, but no fewer than a product takes."""
        return replace(self, keys=max(ROWS, 2 * self.keys // dtype.itemsize))


_SM80 = DecodeLaunch(3, keys=64, warps=4, stages=2, ranked_blocks=64, rank_warps=4)
_INTERPRETED = DecodeLaunch(5, keys=16, warps=4, stages=1, ranked_blocks=4, rank_warps=4)
_TABLE = {
    (80, 64): _SM80,
    (80, 128): _SM80,
    (89, 64): _SM80,
    (89, 128): _SM80,
    # A product of 16 rows is the work of one warp: alone, it never waits for another.
    (90, 64): DecodeLaunch(6, keys=32, warps=1, stages=3, ranked_blocks=64, rank_warps=2),
    (90, 128): DecodeLaunch(3, keys=64, warps=4, stages=3, ranked_blocks=64, rank_warps=4),
}
#: The single launch needs the registers and shared memory of its largest step for all of them.
_SINGLE_SM80 = DecodeLaunch(1, keys=64, warps=4, stages=2, ranked_blocks=64, rank_warps=4)
_SINGLE_TABLE = {
    (80, 64): _SINGLE_SM80,
    (80, 128): _SINGLE_SM80,
    (89, 64): _SINGLE_SM80,
    (89, 128): _SINGLE_SM80,
    (90, 64): DecodeLaunch(8, 32, warps=1, stages=2, ranked_blocks=64, rank_warps=1, resident=8),
    (90, 128): DecodeLaunch(2, 64, warps=4, stages=2, ranked_blocks=64, rank_warps=4, resident=2),
}
#: By architecture and head width: (most sequences times groups, form), the fewest first; "four"
#: beyond. Empty until the forms are measured.
_FORMS: dict[tuple[int, int], tuple[tuple[int, Form], ...]] = {}


def decode_launch(
    device: torch.device, key_width: int, value_width: int, form: Form = "four"
) -> DecodeLaunch:
    """The row of the table for a device, these head widths and a form."""
    arch = launch_table.device_architecture(device)
    if arch == launch_table.INTERPRETER:
        return _INTERPRETED
    table = _SINGLE_TABLE if form == "single" else _TABLE
    return table[arch, launch_table.width_class(key_width, value_width)]


def choose_form(device: torch.device, key_width: int, value_width: int, pairs: int) -> Form:
    """The form for so many sequences times groups."""
    arch = launch_table.device_architecture(device)
    for most, form in _FORMS.get((arch, launch_table.width_class(key_width, value_width)), ()):
        if pairs <= most:
            return form
    return "four"


@dataclass(frozen=True)
class Slices:
    """Into how many slices the keys of each branch are cut."""

    compressed: int
    window: int
    chosen: int
    chosen_keys: int

    @property
    def total(self) -> int:
        """Of all branches."""
        return self.compressed + self.window + self.chosen


def plan_slices(
    compressed_rows: int, geometry: BlockGeometry, *, pairs: int, programs: int, tile: int
) -> Slices:
    """Cut so that a launch has about `programs` programs for `pairs` sequences and groups.

    The compressed keys and the window share a launch, so they share the length of a slice.
    """
    first = _slice_keys((compressed_rows + geometry.window) * pairs, programs, tile)
    first = max(first, _slice_keys(compressed_rows, _MAX_SLICES, tile))
    chosen = geometry.num_selected * geometry.select_block
    second = _slice_keys(chosen * pairs, programs, tile)
    second = max(second, _slice_keys(chosen, _MAX_SLICES, tile))
    return Slices(
        compressed=max(1, triton.cdiv(compressed_rows, first)),
        window=min(_MAX_SLICES, triton.cdiv(geometry.window, first)),
        chosen=triton.cdiv(chosen, second),
        chosen_keys=second,
    )


def _slice_keys(keys: int, slices: int, tile: int) -> int:
    tiles = -(-keys // (slices * tile))
    return max(1, tiles) * tile


@dataclass(frozen=True)
class Ranking:
    """How the selection blocks of a sequence are ranked: tiles of blocks, the best of each kept."""

    tiles: int
    blocks: int
    keep: int

    @property
    def candidates(self) -> int:
        """That all tiles leave."""
        return self.tiles * self.keep

    @property
    def is_counted(self) -> bool:
        """Whether the shorter choice compares each candidate with each."""
        return self.candidates <= _MAX_COUNTED


def plan_ranking(num_blocks: int, num_selected: int, ranked_blocks: int) -> Ranking:
    """Tiles of `ranked_blocks`, or of more where that would be too many tiles."""
    per_tile = max(ranked_blocks, triton.next_power_of_2(triton.cdiv(num_blocks, _MAX_TILES)))
    tiles = triton.next_power_of_2(triton.cdiv(num_blocks, per_tile))
    return Ranking(tiles, per_tile, triton.next_power_of_2(num_selected))


def merge_width(slots: int, width: int, warps: int) -> int:
    """Columns of an output that one program merges."""
    return max(1, min(width, _MERGE_ELEMENTS * warps // slots))


@cache
def num_cores(device: torch.device) -> int:
    """Multiprocessors; the interpreter pretends to have one."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
