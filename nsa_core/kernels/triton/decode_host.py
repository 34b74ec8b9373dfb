"""Host side of `split_decode.py`: shapes in, four launches out, no question to the device.

Legend: B sequences, H query heads, G groups, h = H / G, D key width, E value width, C rows of the
compressed buffer, S = num_selected.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from nsa_core.config.backend_policy import decode_refusal
from nsa_core.kernels.decode_attention import CachedPairs, CountedReads, DecodedToken
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton import launch as launch_table
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
    (90, 64): DecodeLaunch(6, keys=32, warps=1, stages=3, ranked_blocks=64, rank_warps=2),
    (90, 128): DecodeLaunch(3, keys=64, warps=4, stages=3, ranked_blocks=64, rank_warps=4),
}


def decode_launch(device: torch.device, key_width: int, value_width: int) -> DecodeLaunch:
    """The row of the table for a device and these head widths."""
    arch = launch_table.device_architecture(device)
    if arch == launch_table.INTERPRETER:
        return _INTERPRETED
    return _TABLE[arch, launch_table.width_class(key_width, value_width)]


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


@cache
def _num_cores(device: torch.device) -> int:
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
        run = _Run.prepare(q_BHD, pairs, position_B, geometry)
        run.attend_cached()
        ids_BGS = run.attend_chosen(run.rank_blocks())
        return DecodedToken(run.merge(gate_BH3.contiguous()), ids_BGS, run.counted())


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
    """The tensors of one call: slices are [B, G, slot], scores [B, G, h, C] in units of ln 2."""

    q: Tensor
    pairs: CachedPairs
    position: Tensor
    geometry: BlockGeometry
    launch: DecodeLaunch
    slices: Slices
    scores: Tensor
    peaks: Tensor
    totals: Tensor
    parts: Tensor
    counts: Tensor

    @classmethod
    def prepare(
        cls, q: Tensor, pairs: CachedPairs, position: Tensor, geometry: BlockGeometry
    ) -> "_Run":
        widths = (q.shape[2], pairs.selected[1].shape[3])
        table = decode_launch(q.device, *widths).for_dtype(q.dtype)
        batch, rows, groups, _ = pairs.compressed[0].shape
        heads = q.shape[1] // groups
        programs = table.programs_per_core * _num_cores(q.device)
        slices = plan_slices(
            rows, geometry, pairs=batch * groups, programs=programs, tile=table.keys
        )
        kept = (batch, groups, slices.total, heads)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=q.device)

        return cls(
            q.contiguous(), pairs, position, geometry, table, slices,
            scores=empty(batch, groups, heads, rows),
            peaks=empty(*kept),
            totals=empty(*kept),
            parts=empty(*kept, pairs.selected[1].shape[3]),
            counts=empty(*kept[:3], dtype=torch.int32),
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
            _ROWS, self.launch.keys, self.launch.stages, num_warps=self.launch.warps,
        )  # fmt: skip

    def rank_blocks(self) -> Tensor:
        """The best blocks of each tile: keys [B, G, tiles, KEEP] int64."""
        geometry, heads = self.geometry, self.heads
        num_blocks = geometry.num_select_blocks(self.pairs.selected[0].shape[1])
        per_tile = max(
            self.launch.ranked_blocks, triton.next_power_of_2(triton.cdiv(num_blocks, _MAX_TILES))
        )
        tiles = triton.next_power_of_2(triton.cdiv(num_blocks, per_tile))
        keep = triton.next_power_of_2(geometry.num_selected)
        shape = (*self.scores.shape[:2], tiles, keep)
        best = torch.empty(shape, dtype=torch.int64, device=self.q.device)
        rank_blocks_kernel[(tiles, self.num_pairs)](
            self.scores, self.peaks, self.totals, self.position, best,
            self.scores.shape[3], self.slices.total, self.slices.compressed,
            geometry.compress_block, geometry.compress_stride, geometry.select_block,
            geometry.num_selected, self.groups, heads, triton.next_power_of_2(heads),
            triton.next_power_of_2(self.slices.compressed), per_tile, keep,
            num_warps=self.launch.rank_warps,
        )  # fmt: skip
        return best

    def attend_chosen(self, best: Tensor) -> Tensor:
        """Slices of the chosen blocks; returns their ids [B, G, S] int32."""
        k, v = self.pairs.selected
        geometry, slices, chosen = self.geometry, self.slices, self.geometry.num_selected
        shape = (*self.scores.shape[:2], chosen)
        ids = torch.empty(shape, dtype=torch.int32, device=self.q.device)
        ranked = best.shape[2] * best.shape[3]
        partial_chosen_kernel[(slices.chosen, self.num_pairs)](
            self.q, k, v, self.position, best, ids,
            self.peaks, self.totals, self.parts, self.counts,
            k.shape[1], slices.total, slices.compressed + slices.window, self.qk_scale,
            geometry.select_block, chosen, best.shape[3], ranked, slices.chosen_keys,
            self.groups, self.heads, k.shape[3], v.shape[3],
            _ROWS, self.launch.keys, self.launch.stages, num_warps=self.launch.warps,
        )  # fmt: skip
        return ids

    def merge(self, gate: Tensor) -> Tensor:
        """Gated sum [B, H, E] in the dtype of q."""
        slices, width = self.slices, self.parts.shape[4]
        out = torch.empty((*self.q.shape[:2], width), dtype=self.q.dtype, device=self.q.device)
        merge_kernel[(self.q.shape[0] * self.q.shape[1],)](
            self.peaks, self.totals, self.parts, gate, out,
            slices.total, slices.compressed, slices.window, slices.chosen,
            self.heads, width, triton.next_power_of_2(slices.compressed),
            triton.next_power_of_2(slices.window), triton.next_power_of_2(slices.chosen),
            num_warps=4,
        )  # fmt: skip
        return out

    def counted(self) -> CountedReads:
        """Keys that the programs of each branch read."""
        slices = (self.slices.compressed, self.slices.window, self.slices.chosen)
        compressed, window, chosen = self.counts.split(slices, dim=2)
        return CountedReads(compressed, chosen, window)
