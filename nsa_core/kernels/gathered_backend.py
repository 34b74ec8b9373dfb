"""Block-sparse attention in plain PyTorch: any GPU and CPU, no T * T tensor.

Legend: N tokens, H query heads, G groups, h = H / G, D key width, E value width, C compressed slots
(or compressed blocks of a document, in `select`), S = num_selected, J selection blocks, P tiles,
Q queries of a tile, R keys of a tile.
"""

import torch
from torch import Tensor

from nsa_core.config.backend_policy import Branch
from nsa_core.kernels.backend import DeviceFacts, check_compressed, check_tokens, nothing_visible
from nsa_core.kernels.gathered import (
    FiniteKeys,
    attention_probabilities,
    chunks,
    gathered_attention,
    to_tiles,
    wide_dtype,
)
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.selection import choose_blocks, select_scores
from nsa_core.kernels.tiles import (
    ChosenBlocksPlan,
    ChosenMaskPlan,
    CompressedPlan,
    SlidingPlan,
    query_rows,
)

#: Documents up to this many times the chosen keys are masked, longer ones are gathered.
MASKED_LENGTH_FACTOR = 8


def refusal(branch: Branch, facts: DeviceFacts) -> str | None:
    """Why this backend cannot run a branch on a device; it can run everywhere."""
    del branch, facts
    return None


def create_backend() -> "GatheredBackend":
    """Make the backend; called by the dispatcher."""
    return GatheredBackend()


class GatheredBackend:
    """The `AttentionBackend` that runs everywhere.

    Args:
        masked_until: Longest document whose selected branch is masked and not gathered; by default
            as many times the chosen keys as `MASKED_LENGTH_FACTOR` says.
    """

    name = "sdpa"

    def __init__(self, masked_until: int | None = None) -> None:
        self._masked_until = masked_until

    def compressed(
        self, q_NHD: Tensor, k_CGD: Tensor, v_CGE: Tensor, geometry: BlockGeometry, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.compressed`."""
        check_compressed(q_NHD, k_CGD, v_CGE, geometry, packing)
        if k_CGD.shape[0] == 0:
            return nothing_visible(q_NHD, k_CGD, v_CGE)
        return gathered_attention(q_NHD, k_CGD, v_CGE, CompressedPlan(geometry, packing))

    @torch.no_grad()
    def select(
        self,
        q_NHD: Tensor,
        k_CGD: Tensor,
        lse_NH: Tensor,
        geometry: BlockGeometry,
        packing: Packing,
    ) -> Tensor:
        """See `AttentionBackend.select`."""
        check_compressed(q_NHD, k_CGD, k_CGD, geometry, packing)
        num_groups, wide = k_CGD.shape[1], wide_dtype(q_NHD.dtype)
        plan = CompressedPlan(geometry, packing)
        q_PGQhD = to_tiles(q_NHD, num_groups, plan.queries)
        lse_PGQh = to_tiles(lse_NH.unsqueeze(-1), num_groups, plan.queries).squeeze(-1)
        keys, parts = FiniteKeys.of_keys(k_CGD), []
        limit = plan.queries * q_NHD.shape[1]
        for tiles in chunks(plan, packing.num_tokens, limit, q_NHD.device.type):
            position_PQ = packing.position_N[
                query_rows(tiles.start, tiles.stop, plan.queries, packing)
            ]
            prob_PQGC = _document_probabilities(
                q_PGQhD[tiles].to(wide), keys, lse_PGQh[tiles].to(wide), plan, tiles
            )
            num_blocks = geometry.num_select_blocks(packing.max_seqlen)
            score_PQGJ = select_scores(prob_PQGC, num_blocks, geometry)
            parts.append(choose_blocks(score_PQGJ, position_PQ, geometry).flatten(0, 1))
        return torch.cat(parts)[: packing.num_tokens]

    def selected(
        self,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGE: Tensor,
        ids_NGS: Tensor,
        geometry: BlockGeometry,
        packing: Packing,
    ) -> Tensor:
        """See `AttentionBackend.selected`."""
        check_tokens(q_NHD, k_NGD, v_NGE, packing)
        limit = self._masked_until
        if limit is None:
            limit = MASKED_LENGTH_FACTOR * geometry.num_selected * geometry.select_block
        is_short = packing.max_seqlen <= limit
        make_plan = ChosenMaskPlan if is_short else ChosenBlocksPlan
        return gathered_attention(q_NHD, k_NGD, v_NGE, make_plan(geometry, packing, ids_NGS))[0]

    def sliding(
        self, q_NHD: Tensor, k_NGD: Tensor, v_NGE: Tensor, geometry: BlockGeometry, packing: Packing
    ) -> Tensor:
        """See `AttentionBackend.sliding`."""
        check_tokens(q_NHD, k_NGD, v_NGE, packing)
        plan = SlidingPlan(geometry.window, packing)
        return gathered_attention(q_NHD, k_NGD, v_NGE, plan)[0]


def _document_probabilities(
    q_PGQhD: Tensor, keys: FiniteKeys, lse_PGQh: Tensor, plan: CompressedPlan, tiles: slice
) -> Tensor:
    """Compressed probabilities, summed over the heads of a group, in document order: [P, Q, G, C].

    The slots of a tile are shared by its documents, so each query shifts them to its own start.
    """
    geometry, packing, num_groups = plan.geometry, plan.packing, keys.k.shape[1]
    num_compressed = geometry.num_compressed(packing.max_seqlen)
    shape = (q_PGQhD.shape[0], q_PGQhD.shape[2], num_groups, num_compressed)
    if 0 in shape or keys.k.shape[0] == 0:
        return q_PGQhD.new_zeros(shape)
    rows = plan.tile_keys(tiles.start, tiles.stop, num_groups)
    prob_PGQhR = attention_probabilities(
        q_PGQhD, keys.gather(rows.row_PGR, q_PGQhD.dtype), rows.is_visible_PGQR, lse_PGQh
    )
    prob_PQGR = prob_PGQhR.sum(dim=3).transpose(1, 2)
    start_PQ = packing.start_N[query_rows(tiles.start, tiles.stop, plan.queries, packing)]
    first_P1 = plan.first_slots(tiles.start, tiles.stop).unsqueeze(-1)
    shift_PQ = start_PQ // geometry.compress_stride - first_P1
    column_PQC = shift_PQ.unsqueeze(-1) + torch.arange(num_compressed, device=keys.k.device)
    inside_PQGC = column_PQC.clamp(0, plan.keys - 1).unsqueeze(2).expand(shape)
    is_read_PQ1C = ((column_PQC >= 0) & (column_PQC < plan.keys)).unsqueeze(2)
    return torch.where(is_read_PQ1C, prob_PQGR.gather(-1, inside_PQGC), 0.0)
