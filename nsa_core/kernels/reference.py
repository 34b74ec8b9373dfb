"""The paper in plain PyTorch: score, mask, softmax, sum; slow, obvious, the ground truth.

Written from the specification, not from any kernel. Works document by document with T * T tensors,
in float32 or float64. Legend: T tokens of one document, H query heads, G groups, D key width,
E value width, C compressed blocks, J selection blocks, S = num_selected, R keys.
"""

import itertools
import math

import torch
from torch import Tensor

from nsa_core.kernels.backend import check_compressed, check_tokens
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing


def masked_softmax(score_HTR: Tensor, is_visible_TR: Tensor) -> Tensor:
    """Softmax over the visible keys only; a row that sees nothing is all zero."""
    hidden_HTR = score_HTR.masked_fill(~is_visible_TR, float("-inf"))
    sees_any_T1 = is_visible_TR.any(dim=-1, keepdim=True)
    prob_HTR = torch.softmax(hidden_HTR.masked_fill(~sees_any_T1, 0.0), dim=-1)
    return torch.where(sees_any_T1, prob_HTR, 0.0)


def scaled_scores(q_THD: Tensor, k_RGD: Tensor) -> Tensor:
    """q.k / sqrt(D) of every query head against the keys of its group: [H, T, R]."""
    heads_per_group = q_THD.shape[1] // k_RGD.shape[1]
    k_RHD = k_RGD.repeat_interleave(heads_per_group, dim=1)
    return torch.einsum("thd,rhd->htr", q_THD, k_RHD) * (1 / math.sqrt(q_THD.shape[-1]))


def attend(q_THD: Tensor, k_RGD: Tensor, v_RGE: Tensor, is_visible_HTR: Tensor) -> Tensor:
    """One explicit score-mask-softmax-sum; the mask may broadcast over H."""
    prob_HTR = masked_softmax(scaled_scores(q_THD, k_RGD), is_visible_HTR)
    heads_per_group = q_THD.shape[1] // k_RGD.shape[1]
    v_RHE = v_RGE.repeat_interleave(heads_per_group, dim=1)
    return weighted_values(prob_HTR, v_RHE, is_visible_HTR)


def weighted_values(prob_HTR: Tensor, v_RHE: Tensor, is_visible_HTR: Tensor) -> Tensor:
    """The weighted sum of the values; one that is not finite reaches only the rows that see it.

    A plain product would carry NaN to all rows: 0 * NaN is NaN.
    """
    finite_RHE = torch.nan_to_num(v_RHE, nan=0.0, posinf=0.0, neginf=0.0)
    out_THE = torch.einsum("htr,rhe->the", prob_HTR, finite_RHE)
    is_broken_H1R = ~v_RHE.isfinite().all(dim=-1).T.unsqueeze(1)
    sees_broken_HT = (is_visible_HTR & is_broken_H1R).any(dim=-1)
    return out_THE.masked_fill(sees_broken_HT.T.unsqueeze(-1), float("nan"))


def compressed_visibility(num_tokens: int, geometry: BlockGeometry) -> Tensor:
    """Bool [T, C]: token t sees block i iff i * d + l - 1 <= t."""
    last_C = (
        torch.arange(geometry.num_compressed(num_tokens)) * geometry.compress_stride
        + geometry.compress_block
        - 1
    )
    return last_C <= torch.arange(num_tokens)[:, None]


def overlap_counts(num_tokens: int, geometry: BlockGeometry) -> Tensor:
    """Int [C, J]: strides that compressed block i and selection block j have in common (Eq. 9).

    Counted token by token: tokens in both, over d.
    """
    num_compressed = geometry.num_compressed(num_tokens)
    count_CJ = torch.zeros(num_compressed, geometry.num_select_blocks(num_tokens))
    for block in range(num_compressed):
        first = block * geometry.compress_stride
        for token in range(first, first + geometry.compress_block):
            count_CJ[block, token // geometry.select_block] += 1
    return count_CJ / geometry.compress_stride


def block_scores(q_THD: Tensor, k_CGD: Tensor, geometry: BlockGeometry) -> Tensor:
    """Importance of each selection block for each token and group, [T, G, J] (Eq. 8-10)."""
    num_tokens, num_groups = q_THD.shape[0], k_CGD.shape[1]
    is_visible_TC = compressed_visibility(num_tokens, geometry).to(q_THD.device)
    prob_HTC = masked_softmax(scaled_scores(q_THD, k_CGD), is_visible_TC)
    score_HTJ = prob_HTC @ overlap_counts(num_tokens, geometry).to(prob_HTC)
    by_group_GhTJ = score_HTJ.reshape(num_groups, -1, *score_HTJ.shape[1:])
    return by_group_GhTJ.sum(dim=1).transpose(0, 1)


def choose(score_J: list[float], position: int, geometry: BlockGeometry) -> list[int]:
    """Forced blocks, then the best of the rest; the lowest index wins an exact tie (Eq. 11)."""
    forced = list(geometry.forced_blocks(position))
    started = range(position // geometry.select_block + 1)
    rest = sorted((j for j in started if j not in forced), key=lambda j: (-score_J[j], j))
    return sorted(forced + rest[: geometry.num_selected - len(forced)])


def selected_visibility(ids_TGS: Tensor, geometry: BlockGeometry) -> Tensor:
    """Bool [G, T, T]: the keys of the chosen blocks, up to the token itself (Eq. 12)."""
    num_tokens, num_groups, _ = ids_TGS.shape
    block_T = torch.arange(num_tokens, device=ids_TGS.device) // geometry.select_block
    is_chosen_TGT = (ids_TGS[..., None] == block_T).any(dim=2)
    is_past_TT = torch.ones(num_tokens, num_tokens, device=ids_TGS.device).tril().bool()
    return is_chosen_TGT.transpose(0, 1) & is_past_TT.expand(num_groups, -1, -1)


def sliding_visibility(num_tokens: int, window: int) -> Tensor:
    """Bool [T, T]: keys t - w + 1 .. t."""
    age_TT = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    return (age_TT >= 0) & (age_TT < window)


def document_borders(packing: Packing) -> list[tuple[int, int]]:
    """First row and row after the last of every document that is not empty."""
    borders = packing.cu_seqlens.tolist()
    return [(start, stop) for start, stop in itertools.pairwise(borders) if stop > start]


def document_slots(start: int, stop: int, geometry: BlockGeometry) -> slice:
    """Slots of the compressed blocks of the document in rows start .. stop - 1."""
    first = start // geometry.compress_stride
    return slice(first, first + geometry.num_compressed(stop - start))


class ReferenceBackend:
    """The `AttentionBackend` that every other one is compared with."""

    name = "reference"

    def compressed(
        self, q_NHD: Tensor, k_CGD: Tensor, v_CGE: Tensor, geometry: BlockGeometry, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.compressed`."""
        check_compressed(q_NHD, k_CGD, v_CGE, geometry, packing)
        outs, lses = [], []
        for start, stop in document_borders(packing):
            q_THD, slots = q_NHD[start:stop], document_slots(start, stop, geometry)
            is_visible_TC = compressed_visibility(stop - start, geometry).to(q_NHD.device)
            outs.append(attend(q_THD, k_CGD[slots], v_CGE[slots], is_visible_TC))
            score_HTC = scaled_scores(q_THD.detach(), k_CGD[slots].detach())
            hidden_HTC = score_HTC.masked_fill(~is_visible_TC, float("-inf"))
            lses.append(hidden_HTC.logsumexp(dim=-1).T)
        return torch.cat(outs), torch.cat(lses)

    def select(
        self,
        q_NHD: Tensor,
        k_CGD: Tensor,
        lse_NH: Tensor,
        geometry: BlockGeometry,
        packing: Packing,
    ) -> Tensor:
        """See `AttentionBackend.select`; takes its own softmax and leaves lse alone."""
        check_compressed(q_NHD, k_CGD, k_CGD, geometry, packing)
        del lse_NH
        num_groups = k_CGD.shape[1]
        ids_NGS = torch.full((packing.num_tokens, num_groups, geometry.num_selected), -1)
        for start, stop in document_borders(packing):
            slots = document_slots(start, stop, geometry)
            score_TGJ = block_scores(q_NHD[start:stop].detach(), k_CGD[slots].detach(), geometry)
            for position, score_GJ in enumerate(score_TGJ.tolist()):
                for group, score_J in enumerate(score_GJ):
                    chosen = choose(score_J, position, geometry)
                    ids_NGS[start + position, group, : len(chosen)] = torch.tensor(chosen)
        return ids_NGS.to(device=q_NHD.device, dtype=torch.int32)

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
        heads_per_group = q_NHD.shape[1] // k_NGD.shape[1]
        outs = []
        for start, stop in document_borders(packing):
            rows = slice(start, stop)
            is_visible_GTT = selected_visibility(ids_NGS[rows], geometry)
            is_visible_HTT = is_visible_GTT.repeat_interleave(heads_per_group, dim=0)
            outs.append(attend(q_NHD[rows], k_NGD[rows], v_NGE[rows], is_visible_HTT))
        return torch.cat(outs)

    def sliding(
        self, q_NHD: Tensor, k_NGD: Tensor, v_NGE: Tensor, geometry: BlockGeometry, packing: Packing
    ) -> Tensor:
        """See `AttentionBackend.sliding`."""
        check_tokens(q_NHD, k_NGD, v_NGE, packing)
        outs = []
        for start, stop in document_borders(packing):
            rows = slice(start, stop)
            is_visible_TT = sliding_visibility(stop - start, geometry.window).to(q_NHD.device)
            outs.append(attend(q_NHD[rows], k_NGD[rows], v_NGE[rows], is_visible_TT))
        return torch.cat(outs)
