"""How decode is cut into launches: the table of tiles and warps, slices, and which form is taken.

Two forms: the four launches of `split_decode.py` for any cache, and the two of `short_decode.py`.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton import launch as launch_table
from nsa_core.kernels.triton.sizes import cdiv, next_power_of_2

ROWS = 16  # the fewest rows of a product
_MAX_SLICES = 64  # of one branch: the merge holds them all
_MAX_TILES = 16  # of ranked blocks: the choice goes through the best of all of them
_MAX_COUNTED = 64  # candidates up to which comparing each with each is the shorter way to a choice
_OVERLAPPING_ARCHITECTURE = 90
_FEW_PAIRS = 16  # sequences times groups: 2 and 32 of them want different rows (docs/decode.md)


def ranked_at_once(num_blocks: int) -> int:
    """Selection blocks that the one tile of the short form holds, those of the buffer or more."""
    return max(ROWS, next_power_of_2(num_blocks))


@dataclass(frozen=True)
class ShortLaunch:
    """How the short form is launched, and what it serves.

    Attributes:
        programs_per_core: As in `DecodeLaunch`, for the compressed keys and the window.
        keys: Keys of a tile, and of a slice of a chosen block.
        warps: Of a program, which ranks all blocks and then reads one tile.
        stages: As in `DecodeLaunch`.
        max_pairs: Sequences times groups.
        max_bytes: Of an element of the keys.
        max_blocks: Selection blocks of the buffer, each compared with each.
        max_rows: Compressed keys of the buffer, which a program holds at once.
        max_compared: Comparisons of blocks by one program of each sequence and group, in all.
    """

    programs_per_core: int
    keys: int
    warps: int
    stages: int
    max_pairs: int = 16
    max_bytes: int = 2
    max_blocks: int = 128
    max_rows: int = 512
    max_compared: int = 4 * 128 * 128

    def serves(
        self, geometry: BlockGeometry, num_blocks: int, pairs: int, dtype: torch.dtype
    ) -> bool:
        """Whether caches of so many selection blocks are short, and few."""
        blocks = ranked_at_once(num_blocks)
        return (
            pairs <= self.max_pairs
            and num_blocks <= self.max_blocks
            and blocks * geometry.compressed_per_select <= self.max_rows
            and blocks * blocks * pairs <= self.max_compared
            and dtype.itemsize <= self.max_bytes
            and geometry.select_block % self.keys == 0
            and geometry.num_selected * geometry.select_block <= _MAX_SLICES * self.keys
        )


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
        merged: Numbers of the output, times slices, that the one warp of a merge holds.
        short: How a short cache is read instead; None if all caches are read in one way.
    """

    programs_per_core: int
    keys: int
    warps: int
    stages: int
    ranked_blocks: int
    rank_warps: int
    merged: int = 2048  # 64 registers
    short: ShortLaunch | None = None

    def for_dtype(self, dtype: torch.dtype) -> "DecodeLaunch":
        """Tiles of as many bytes: half the keys in float32, but no fewer than a product takes."""
        return replace(self, keys=max(ROWS, 2 * self.keys // dtype.itemsize))


_SM80 = DecodeLaunch(3, keys=64, warps=4, stages=2, ranked_blocks=64, rank_warps=4)
_INTERPRETED = DecodeLaunch(
    5, keys=16, warps=4, stages=1, ranked_blocks=4, rank_warps=4,
    short=ShortLaunch(
        5, keys=16, warps=4, stages=1, max_pairs=64, max_bytes=4, max_compared=1 << 20
    ),
)  # fmt: skip
_TABLE = {
    (80, 64): _SM80,
    (80, 128): _SM80,
    (89, 64): _SM80,
    (89, 128): _SM80,
    # A product of 16 rows is the work of one warp: alone, it never waits for another.
    (90, 64): DecodeLaunch(6, keys=32, warps=1, stages=3, ranked_blocks=32, rank_warps=1),
    (90, 128): DecodeLaunch(3, keys=64, warps=4, stages=3, ranked_blocks=64, rank_warps=4),
}
_FEW_PAIRS_TABLE = {
    (90, 64): DecodeLaunch(
        8, keys=32, warps=1, stages=2, ranked_blocks=64, rank_warps=2, merged=1024,
        short=ShortLaunch(4, keys=64, warps=8, stages=2),
    ),
}  # fmt: skip


def decode_launch(
    device: torch.device, key_width: int, value_width: int, pairs: int
) -> DecodeLaunch:
    """The row of the table for a device, these head widths and so many sequences times groups."""
    arch = launch_table.device_architecture(device)
    if arch == launch_table.INTERPRETER:
        return _INTERPRETED
    key = arch, launch_table.width_class(key_width, value_width)
    if pairs <= _FEW_PAIRS and key in _FEW_PAIRS_TABLE:
        return _FEW_PAIRS_TABLE[key]
    return _TABLE[key]


def can_overlap(device: torch.device) -> bool:
    """Whether a launch may begin while the one before it runs (programmatic dependent launch)."""
    return launch_table.device_architecture(device) >= _OVERLAPPING_ARCHITECTURE


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
        compressed=max(1, cdiv(compressed_rows, first)),
        window=min(_MAX_SLICES, cdiv(geometry.window, first)),
        chosen=cdiv(chosen, second),
        chosen_keys=second,
    )


def _slice_keys(keys: int, slices: int, tile: int) -> int:
    tiles = cdiv(keys, slices * tile)
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
        """Whether the choice compares each candidate with each."""
        return self.candidates <= _MAX_COUNTED


def plan_ranking(num_blocks: int, num_selected: int, ranked_blocks: int) -> Ranking:
    """Tiles of `ranked_blocks`, or of more where that would be too many tiles."""
    per_tile = max(ranked_blocks, next_power_of_2(cdiv(num_blocks, _MAX_TILES)))
    tiles = next_power_of_2(cdiv(num_blocks, per_tile))
    return Ranking(tiles, per_tile, next_power_of_2(num_selected))


@cache
def num_cores(device: torch.device) -> int:
    """Multiprocessors; the interpreter pretends to have one."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class DecodePlan:
    """How one call is cut into launches.

    Attributes:
        launch: Tiles and warps of the four launches.
        ranking: How blocks are ranked; in the short form all of them in one tile.
        short: Those of the short form, where that is taken.
    """

    launch: DecodeLaunch
    slices: Slices
    ranking: Ranking
    short: ShortLaunch | None = None


def plan_decode(
    launch: DecodeLaunch,
    geometry: BlockGeometry,
    rows: tuple[int, int],
    *,
    pairs: int,
    cores: int,
    dtype: torch.dtype,
) -> DecodePlan:
    """Take the short form where it serves; `rows` are of the compressed and the token buffer."""
    num_blocks = geometry.num_select_blocks(rows[1])
    short = launch.short
    if short is not None and short.serves(geometry, num_blocks, pairs, dtype):
        keys = geometry.num_selected * geometry.select_block
        slices = replace(
            _cut(short, geometry, rows[0], pairs, cores),
            chosen=keys // short.keys,
            chosen_keys=short.keys,
        )
        ranking = plan_ranking(num_blocks, geometry.num_selected, ranked_at_once(num_blocks))
        return DecodePlan(launch, slices, ranking, short)
    launch = launch.for_dtype(dtype)
    ranking = plan_ranking(num_blocks, geometry.num_selected, launch.ranked_blocks)
    return DecodePlan(launch, _cut(launch, geometry, rows[0], pairs, cores), ranking)


def _cut(
    launch: DecodeLaunch | ShortLaunch, geometry: BlockGeometry, rows: int, pairs: int, cores: int
) -> Slices:
    programs = launch.programs_per_core * cores
    return plan_slices(rows, geometry, pairs=pairs, programs=programs, tile=launch.keys)
