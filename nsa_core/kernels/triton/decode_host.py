"""Host side of `split_decode.py`: shapes in, four launches out, no question to the device.

Legend: B sequences, H query heads, G groups, h = H / G, D key width, E value width, C rows of the
compressed buffer, S = num_selected.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from nsa_core.config.backend_policy import decode_refusal
from nsa_core.kernels.decode_attention import CachedPairs, CountedReads, DecodedToken
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton import launch as launch_table
from nsa_core.kernels.triton.sizes import cdiv, next_power_of_2
from nsa_core.kernels.triton.split_decode import (
    merge_kernel,
    partial_cached_kernel,
    partial_chosen_kernel,
    rank_blocks_kernel,
)

LOG2E = 1.4426950408889634
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROWS = 16  # the fewest rows of a product
_MAX_SLICES = 64  # of one branch: the merge holds them all
_MAX_TILES = 16  # of ranked blocks: the choice goes through the best of all of them
_MAX_COUNTED = 64  # candidates up to which comparing each with each is the shorter way to a choice
_MERGED_ELEMENTS = 2048  # of outputs that the one warp of a merge holds: 64 registers
_OVERLAPPING_ARCHITECTURE = 90
_FEW_PAIRS = 16  # sequences times groups: 2 and 32 of them want different rows (docs/decode.md)


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
    """

    programs_per_core: int
    keys: int
    warps: int
    stages: int
    ranked_blocks: int
    rank_warps: int

    def for_dtype(self, dtype: torch.dtype) -> "DecodeLaunch":
        """Tiles of as many bytes: half the keys in float32, but no fewer than a product takes."""
        return replace(self, keys=max(_ROWS, 2 * self.keys // dtype.itemsize))


_SM80 = DecodeLaunch(3, keys=64, warps=4, stages=2, ranked_blocks=64, rank_warps=4)
_INTERPRETED = DecodeLaunch(5, keys=16, warps=4, stages=1, ranked_blocks=4, rank_warps=4)
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
    (90, 64): DecodeLaunch(8, keys=32, warps=1, stages=2, ranked_blocks=64, rank_warps=2),
}


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


class TritonDecode:
    """The `DecodeAttention` of these kernels, from sm_80 on."""

    name = "triton"

    def attend(
        self,
        q_BHD: Tensor,
        pairs: CachedPairs,
        gate_BH3: Tensor,
        position_B: Tensor,
        geometry: BlockGeometry,
    ) -> DecodedToken:
        """See `DecodeAttention.attend`.

        Raises:
            ValueError: If a width, block or group size is none that the kernels serve.
        """
        check_shapes(q_BHD, pairs, geometry)
        run = _Run.prepare(q_BHD, pairs, gate_BH3, position_B, geometry)
        run.attend_cached()
        run.rank_blocks()
        run.attend_chosen()
        run.merge()
        return DecodedToken(run.out, run.ids, run.counted())


def check_shapes(q_BHD: Tensor, pairs: CachedPairs, geometry: BlockGeometry) -> None:
    """Refuse what the kernels would compute wrongly.

    Raises:
        ValueError: As `decode_refusal` says, or if a dtype is not one of `SUPPORTED_DTYPES`.
    """
    k, v = pairs.selected
    reason = decode_refusal(
        (k.shape[3], v.shape[3]),
        (geometry.select_block, geometry.compress_stride),
        q_BHD.shape[1] // k.shape[2],
    )
    if reason is not None:
        raise ValueError(reason)
    dtypes = {q_BHD.dtype, *(x.dtype for x in (*pairs.compressed, k, v, *pairs.sliding))}
    if len(dtypes) > 1 or q_BHD.dtype not in SUPPORTED_DTYPES:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        message = f"triton decode computes in bfloat16, float16 or float32 throughout, got {found}"
        raise ValueError(message)


@dataclass(frozen=True, eq=False)
class _Run:
    """The tensors of one call: slices are [B, G, slot], scores [B, G, h, C] in units of ln 2.

    `best` holds the best blocks of each tile, [B, G, tiles, keep]; `ids` is [B, G, S], `out`
    [B, H, E] in the dtype of q.
    """

    q: Tensor
    pairs: CachedPairs
    gate: Tensor
    position: Tensor
    geometry: BlockGeometry
    launch: DecodeLaunch
    slices: Slices
    ranking: Ranking
    scores: Tensor
    peaks: Tensor
    totals: Tensor
    parts: Tensor
    counts: Tensor
    best: Tensor
    ids: Tensor
    out: Tensor

    @classmethod
    def prepare(
        cls, q: Tensor, pairs: CachedPairs, gate: Tensor, position: Tensor, geometry: BlockGeometry
    ) -> "_Run":
        """Allocate and copy before the first launch: a launch reads gates before the last ends."""
        batch, rows, groups, _ = pairs.compressed[0].shape
        heads, width = q.shape[1] // groups, pairs.selected[1].shape[3]
        table = decode_launch(q.device, q.shape[2], width, batch * groups).for_dtype(q.dtype)
        programs = table.programs_per_core * num_cores(q.device)
        slices = plan_slices(
            rows, geometry, pairs=batch * groups, programs=programs, tile=table.keys
        )
        num_blocks = geometry.num_select_blocks(pairs.selected[0].shape[1])
        ranking = plan_ranking(num_blocks, geometry.num_selected, table.ranked_blocks)
        kept = (batch, groups, slices.total, heads)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=q.device)

        return cls(
            q.contiguous(), pairs, gate.contiguous(), position, geometry, table, slices, ranking,
            scores=empty(batch, groups, heads, rows),
            peaks=empty(*kept),
            totals=empty(*kept),
            parts=empty(*kept, width),
            counts=empty(*kept[:3], dtype=torch.int32),
            best=empty(batch, groups, ranking.tiles, ranking.keep, dtype=torch.int64),
            ids=empty(batch, groups, geometry.num_selected, dtype=torch.int32),
            out=empty(batch, q.shape[1], width, dtype=q.dtype),
        )  # fmt: skip

    @property
    def heads(self) -> int:
        return self.scores.shape[2]

    @property
    def groups(self) -> int:
        return self.scores.shape[1]

    @property
    def num_pairs(self) -> int:
        return self.scores.shape[0] * self.scores.shape[1]

    @property
    def qk_scale(self) -> float:
        return LOG2E / math.sqrt(self.q.shape[2])

    @property
    def is_overlapped(self) -> bool:
        return can_overlap(self.q.device)

    def _options(self, warps: int) -> dict[str, int]:
        """Of a launch that follows another, and may begin before that one has ended."""
        early = {"launch_pdl": True} if self.is_overlapped else {}
        return {"num_warps": warps, **early}

    def attend_cached(self) -> None:
        """Slices of the compressed keys and of the window; leaves the compressed scores."""
        (k, v), (k_window, v_window) = self.pairs.compressed, self.pairs.sliding
        geometry, slices = self.geometry, self.slices
        partial_cached_kernel[(slices.compressed + slices.window, self.num_pairs)](
            self.q, k, v, k_window, v_window, self.position,
            self.scores, self.peaks, self.totals, self.parts, self.counts,
            k.shape[1], k_window.shape[1], slices.total, slices.compressed, slices.window,
            self.qk_scale, geometry.compress_block, geometry.compress_stride, geometry.window,
            self.groups, self.heads, k.shape[3], v.shape[3],
            _ROWS, self.launch.keys, self.launch.stages, self.is_overlapped,
            num_warps=self.launch.warps,
        )  # fmt: skip

    def rank_blocks(self) -> None:
        """The best blocks of each tile."""
        geometry, heads, ranking = self.geometry, self.heads, self.ranking
        rank_blocks_kernel[(ranking.tiles, self.num_pairs)](
            self.scores, self.peaks, self.totals, self.position, self.best,
            self.scores.shape[3], self.slices.total, self.slices.compressed,
            geometry.compress_block, geometry.compress_stride, geometry.select_block,
            geometry.num_selected, self.groups, heads, next_power_of_2(heads),
            next_power_of_2(self.slices.compressed), ranking.blocks, ranking.keep,
            self.is_overlapped, **self._options(self.launch.rank_warps),
        )  # fmt: skip

    def attend_chosen(self) -> None:
        """Slices of the chosen blocks, and their ids."""
        k, v = self.pairs.selected
        geometry, slices, ranking = self.geometry, self.slices, self.ranking
        partial_chosen_kernel[(slices.chosen, self.num_pairs)](
            self.q, k, v, self.position, self.best, self.ids,
            self.peaks, self.totals, self.parts, self.counts,
            k.shape[1], slices.total, slices.compressed + slices.window, self.qk_scale,
            geometry.select_block, geometry.num_selected, ranking.keep, ranking.candidates,
            slices.chosen_keys, self.groups, self.heads, k.shape[3], v.shape[3],
            _ROWS, self.launch.keys, self.launch.stages, ranking.is_counted, self.is_overlapped,
            **self._options(self.launch.warps),
        )  # fmt: skip

    def merge(self) -> None:
        """Gated sum of the branches."""
        slices, width = self.slices, self.out.shape[2]
        slots = next_power_of_2(slices.total)
        columns = max(1, min(width, _MERGED_ELEMENTS // slots))
        merge_kernel[(self.q.shape[0] * self.q.shape[1], width // columns)](
            self.peaks, self.totals, self.parts, self.gate, self.out,
            slices.total, slices.compressed, slices.window, self.heads, width, slots, columns,
            self.is_overlapped, **self._options(1),
        )  # fmt: skip

    def counted(self) -> CountedReads:
        """Keys that the programs of each branch read."""
        slices = (self.slices.compressed, self.slices.window, self.slices.chosen)
        compressed, window, chosen = self.counts.split(slices, dim=2)
        return CountedReads(compressed, chosen, window)
