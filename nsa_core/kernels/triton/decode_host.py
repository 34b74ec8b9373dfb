"""Host side of decode: shapes in, four launches or two out, no question to the device.

Legend: B sequences, H query heads, G groups, h = H / G, D key width, E value width, C rows of the
compressed buffer, S = num_selected.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.config.backend_policy import decode_refusal
from nsa_core.kernels.decode_attention import CachedPairs, CountedReads, DecodedToken
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton.decode_launch import (
    ROWS,
    DecodePlan,
    ShortLaunch,
    can_overlap,
    decode_launch,
    num_cores,
    plan_decode,
)
from nsa_core.kernels.triton.short_decode import partial_short_kernel
from nsa_core.kernels.triton.sizes import next_power_of_2
from nsa_core.kernels.triton.sources import LOG2E
from nsa_core.kernels.triton.split_decode import (
    merge_kernel,
    partial_cached_kernel,
    partial_chosen_kernel,
    rank_blocks_kernel,
)

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
        if run.plan.short is not None:
            run.attend_short(run.plan.short)
        else:
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

    `best` holds the best blocks of each tile, [B, G, tiles, keep]; it and the scores are empty in
    the short form. `ids` is [B, G, S], `out` [B, H, E] in the dtype of q.
    """

    q: Tensor
    pairs: CachedPairs
    gate: Tensor
    position: Tensor
    geometry: BlockGeometry
    plan: DecodePlan
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
        plan = plan_decode(
            decode_launch(q.device, q.shape[2], width, batch * groups),
            geometry,
            (rows, pairs.selected[0].shape[1]),
            pairs=batch * groups,
            cores=num_cores(q.device),
            dtype=q.dtype,
        )
        slices, ranking = plan.slices, plan.ranking
        num_scores, num_tiles = (0, 0) if plan.short is not None else (rows, ranking.tiles)
        kept = (batch, groups, slices.total, heads)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=q.device)

        return cls(
            q.contiguous(), pairs, gate.contiguous(), position, geometry, plan,
            scores=empty(batch, groups, heads, num_scores),
            peaks=empty(*kept),
            totals=empty(*kept),
            parts=empty(*kept, width),
            counts=empty(*kept[:3], dtype=torch.int32),
            best=empty(batch, groups, num_tiles, ranking.keep, dtype=torch.int64),
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

    def attend_short(self, launch: ShortLaunch) -> None:
        """Slices of all branches; one program more leaves the ids of the chosen blocks."""
        (k, v), selected, window = self.pairs.compressed, self.pairs.selected, self.pairs.sliding
        geometry, slices, ranking = self.geometry, self.plan.slices, self.plan.ranking
        is_full = k.shape[1] == ranking.blocks * geometry.compressed_per_select
        partial_short_kernel[(slices.total + 1, self.num_pairs)](
            self.q, k, v, *selected, *window, self.position, self.ids,
            self.peaks, self.totals, self.parts, self.counts,
            k.shape[1], selected[0].shape[1], window[0].shape[1],
            slices.total, slices.compressed, slices.window, self.qk_scale,
            geometry.compress_block, geometry.compress_stride, geometry.select_block,
            geometry.num_selected, geometry.window,
            ranking.blocks, ranking.keep, is_full, self.groups, self.heads,
            k.shape[3], v.shape[3], ROWS, launch.keys, launch.stages, self.is_overlapped,
            num_warps=launch.warps,
        )  # fmt: skip

    def attend_cached(self) -> None:
        """Slices of the compressed keys and of the window; leaves the compressed scores."""
        (k, v), (k_window, v_window) = self.pairs.compressed, self.pairs.sliding
        geometry, slices, launch = self.geometry, self.plan.slices, self.plan.launch
        partial_cached_kernel[(slices.compressed + slices.window, self.num_pairs)](
            self.q, k, v, k_window, v_window, self.position,
            self.scores, self.peaks, self.totals, self.parts, self.counts,
            k.shape[1], k_window.shape[1], slices.total, slices.compressed, slices.window,
            self.qk_scale, geometry.compress_block, geometry.compress_stride, geometry.window,
            self.groups, self.heads, k.shape[3], v.shape[3],
            ROWS, launch.keys, launch.stages, self.is_overlapped, num_warps=launch.warps,
        )  # fmt: skip

    def rank_blocks(self) -> None:
        """The best blocks of each tile."""
        geometry, heads = self.geometry, self.heads
        slices, ranking = self.plan.slices, self.plan.ranking
        rank_blocks_kernel[(ranking.tiles, self.num_pairs)](
            self.scores, self.peaks, self.totals, self.position, self.best,
            self.scores.shape[3], slices.total, slices.compressed,
            geometry.compress_block, geometry.compress_stride, geometry.select_block,
            geometry.num_selected, self.groups, heads, next_power_of_2(heads),
            next_power_of_2(slices.compressed), ranking.blocks, ranking.keep,
            self.is_overlapped, **self._options(self.plan.launch.rank_warps),
        )  # fmt: skip

    def attend_chosen(self) -> None:
        """Slices of the chosen blocks, and their ids."""
        k, v = self.pairs.selected
        geometry, plan = self.geometry, self.plan
        slices, ranking, launch = plan.slices, plan.ranking, plan.launch
        partial_chosen_kernel[(slices.chosen, self.num_pairs)](
            self.q, k, v, self.position, self.best, self.ids,
            self.peaks, self.totals, self.parts, self.counts,
            k.shape[1], slices.total, slices.compressed + slices.window, self.qk_scale,
            geometry.select_block, geometry.num_selected, ranking.keep, ranking.candidates,
            slices.chosen_keys, self.groups, self.heads, k.shape[3], v.shape[3],
            ROWS, launch.keys, launch.stages, ranking.is_counted, self.is_overlapped,
            **self._options(launch.warps),
        )  # fmt: skip

    def merge(self) -> None:
        """Gated sum of the branches."""
        slices, width = self.plan.slices, self.out.shape[2]
        slots = next_power_of_2(slices.total)
        columns = max(1, min(width, self.plan.launch.merged // slots))
        merge_kernel[(self.q.shape[0] * self.q.shape[1], width // columns)](
            self.peaks, self.totals, self.parts, self.gate, self.out,
            slices.total, slices.compressed, slices.window, self.heads, width, slots, columns,
            self.is_overlapped, **self._options(1),
        )  # fmt: skip

    def counted(self) -> CountedReads:
        """Keys that the programs of each branch read."""
        slices = self.plan.slices
        parts = (slices.compressed, slices.window, slices.chosen)
        compressed, window, chosen = self.counts.split(parts, dim=2)
        return CountedReads(compressed, chosen, window)
