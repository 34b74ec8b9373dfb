"""Host side of the decode kernels: shapes in, launches out, no question to the device.

Legend: B sequences, H query heads, G groups, h = H / G, D key width, E value width, C rows of the
compressed buffer, S = num_selected.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nsa_core.config.backend_policy import decode_refusal
from nsa_core.kernels.decode_attention import CachedPairs, CountedReads, DecodedToken
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton import launch as launch_table
from nsa_core.kernels.triton.decode_plan import (
    ROWS,
    DecodeLaunch,
    Form,
    Ranking,
    Slices,
    choose_form,
    decode_launch,
    merge_width,
    num_cores,
    plan_ranking,
    plan_slices,
)
from nsa_core.kernels.triton.single_decode import (
    ALL_STEPS,
    COUNTERS,
    PITCH,
    single_decode_kernel,
)
from nsa_core.kernels.triton.split_decode import (
    merge_at_once_kernel,
    merge_kernel,
    partial_cached_kernel,
    partial_chosen_kernel,
    rank_blocks_kernel,
)

LOG2E = 1.4426950408889634
OVERLAPPING_ARCHITECTURE = 90
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonDecode:
    """The `DecodeAttention` of these kernels, from sm_80 on; one call at a time on a device.

    Args:
        form: How it is launched; None is what the table says.
        launch: Tiles and warps; None is the row of the table.
    """

    name = "triton"

    def __init__(self, form: Form | None = None, launch: DecodeLaunch | None = None) -> None:
        self._form = form
        self._launch = launch
        self._counters: dict[tuple[torch.device, int], Tensor] = {}

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
            ValueError: If a width, block or group size is none that the kernels serve, or the card
                has no launches that overlap and such were asked for.
            RuntimeError: If the first call of the single launch is being captured.
        """
        check_shapes(q_BHD, pairs, geometry)
        k, v = pairs.selected
        widths = (k.shape[3], v.shape[3])
        num_pairs = q_BHD.shape[0] * k.shape[2]
        form = self._form or choose_form(q_BHD.device, *widths, num_pairs)
        check_form(form, q_BHD.device)
        launch = self._launch or decode_launch(q_BHD.device, *widths, form)
        run = _Run.prepare(
            q_BHD, pairs, gate_BH3, position_B, geometry, launch.for_dtype(q_BHD.dtype), form
        )
        if form == "single":
            run.attend_in_one_launch(self._counters_of(q_BHD.device, num_pairs))
        else:
            run.attend_cached()
            run.rank_blocks()
            run.attend_chosen()
            run.merge()
        return DecodedToken(run.out, run.ids, run.counted())

    def _counters_of(self, device: torch.device, num_pairs: int) -> Tensor:
        """Zeros that every launch leaves as zeros; kept, since a graph may hold their address."""
        held = self._counters.get((device, num_pairs))
        if held is not None:
            return held
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            message = (
                "the first call of the single launch makes its counters: make it, then capture"
            )
            raise RuntimeError(message)
        shape = (num_pairs, COUNTERS.value, PITCH.value)
        made = torch.zeros(shape, dtype=torch.int32, device=device)
        self._counters[device, num_pairs] = made
        return made


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


def check_form(form: Form, device: torch.device) -> None:
    """Refuse launches that overlap where no card has them.

    Raises:
        ValueError: If the device is older than sm_90, or not a card.
    """
    arch = launch_table.device_architecture(device)
    if form == "overlapped" and arch < OVERLAPPING_ARCHITECTURE:
        message = f"launches that overlap need sm_{OVERLAPPING_ARCHITECTURE}, and this is sm_{arch}"
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
    form: Form
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
        cls, q: Tensor, pairs: CachedPairs, gate: Tensor, position: Tensor,
        geometry: BlockGeometry, launch: DecodeLaunch, form: Form,
    ) -> "_Run":  # fmt: skip
        """Allocate everything: between the launches of a form nothing else is launched."""
        batch, rows, groups, _ = pairs.compressed[0].shape
        heads, width = q.shape[1] // groups, pairs.selected[1].shape[3]
        programs = launch.programs_per_core * num_cores(q.device)
        if form == "single":  # rounding makes two slices more of a pair, and all shall fit at once
            programs = max(1, programs - 2 * batch * groups)
        slices = plan_slices(
            rows, geometry, pairs=batch * groups, programs=programs, tile=launch.keys
        )
        num_blocks = geometry.num_select_blocks(pairs.selected[0].shape[1])
        ranking = plan_ranking(num_blocks, geometry.num_selected, launch.ranked_blocks)
        kept = (batch, groups, slices.total, heads)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=q.device)

        return cls(
            q.contiguous(), pairs, gate.contiguous(), position, geometry, launch, form, slices,
            ranking,
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
        return self.form == "overlapped"

    @property
    def is_lean(self) -> bool:
        return self.form != "four"

    @property
    def is_counted(self) -> bool:
        return self.is_lean and self.ranking.is_counted

    def _options(self, warps: int, *, follows: bool) -> dict[str, int]:
        """Options of a launch; one that follows another may begin before that one has ended."""
        early = {"launch_pdl": True} if self.is_overlapped and follows else {}
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
            ROWS, self.launch.keys, self.launch.stages, self.is_overlapped,
            **self._options(self.launch.warps, follows=False),
        )  # fmt: skip

    def rank_blocks(self) -> None:
        """The best blocks of each tile."""
        geometry, ranking = self.geometry, self.ranking
        rank_blocks_kernel[(ranking.tiles, self.num_pairs)](
            self.scores, self.peaks, self.totals, self.position, self.best,
            self.scores.shape[3], self.slices.total, self.slices.compressed,
            geometry.compress_block, geometry.compress_stride, geometry.select_block,
            geometry.num_selected, self.groups, self.heads, triton.next_power_of_2(self.heads),
            triton.next_power_of_2(self.slices.compressed), ranking.blocks, ranking.keep,
            self.is_lean, self.is_overlapped,
            **self._options(self.launch.rank_warps, follows=True),
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
            ROWS, self.launch.keys, self.launch.stages, self.is_counted, self.is_overlapped,
            **self._options(self.launch.warps, follows=True),
        )  # fmt: skip

    def merge(self) -> None:
        """Gated sum of the branches."""
        slices, width = self.slices, self.out.shape[2]
        num_rows = self.q.shape[0] * self.q.shape[1]
        if self.form == "four":
            merge_kernel[(num_rows,)](
                self.peaks, self.totals, self.parts, self.gate, self.out,
                slices.total, slices.compressed, slices.window, slices.chosen,
                self.heads, width, triton.next_power_of_2(slices.compressed),
                triton.next_power_of_2(slices.window), triton.next_power_of_2(slices.chosen),
                num_warps=4,
            )  # fmt: skip
            return
        slots = triton.next_power_of_2(slices.total)
        columns = merge_width(slots, width, warps=1)
        merge_at_once_kernel[(num_rows, width // columns)](
            self.peaks, self.totals, self.parts, self.gate, self.out,
            slices.total, slices.compressed, slices.window, self.heads, width, slots, columns,
            self.is_overlapped, **self._options(1, follows=True),
        )  # fmt: skip

    def attend_in_one_launch(self, counters: Tensor) -> None:
        """All of it; under the interpreter one step after the other, as programs cannot wait."""
        slices, width = self.slices, self.out.shape[2]
        slots = triton.next_power_of_2(slices.total)
        columns = merge_width(slots, width, self.launch.warps)
        if launch_table.device_architecture(self.q.device) == launch_table.INTERPRETER:
            for step in range(1, COUNTERS.value + 1):
                self._launch_single(3, counters, slots, columns, step)
            return
        items = self.num_pairs * max(
            slices.compressed + slices.window, self.ranking.tiles, slices.chosen,
            self.heads * (width // columns),
        )  # fmt: skip
        resident = self.launch.resident * num_cores(self.q.device)
        self._launch_single(min(items, resident), counters, slots, columns, ALL_STEPS.value)

    def _launch_single(
        self, programs: int, counters: Tensor, slots: int, columns: int, step: int
    ) -> None:
        (k, v), (k_window, v_window) = self.pairs.compressed, self.pairs.sliding
        k_chosen, v_chosen = self.pairs.selected
        geometry, slices, ranking = self.geometry, self.slices, self.ranking
        single_decode_kernel[(programs,)](
            self.q, k, v, k_window, v_window, k_chosen, v_chosen, self.position, self.gate,
            self.scores, self.peaks, self.totals, self.parts, self.counts, self.best, self.ids,
            self.out, counters,
            self.num_pairs, k.shape[1], k_window.shape[1], k_chosen.shape[1],
            slices.compressed, slices.window, slices.chosen, ranking.tiles, self.qk_scale,
            geometry.compress_block, geometry.compress_stride, geometry.window,
            geometry.select_block, geometry.num_selected,
            self.groups, self.heads, k.shape[3], v.shape[3],
            ROWS, self.launch.keys, self.launch.stages,
            triton.next_power_of_2(self.heads), triton.next_power_of_2(slices.compressed),
            ranking.blocks, ranking.keep, ranking.candidates, slices.chosen_keys,
            self.is_counted, slots, columns, step,
            num_warps=self.launch.warps, launch_cooperative_grid=True,
        )  # fmt: skip

    def counted(self) -> CountedReads:
        """Keys that the programs of each branch read."""
        slices = (self.slices.compressed, self.slices.window, self.slices.chosen)
        compressed, window, chosen = self.counts.split(slices, dim=2)
        return CountedReads(compressed, chosen, window)
