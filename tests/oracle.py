"""An independent float64 oracle of the three branches on packed rows, written from the
specification.

Nothing clever: per document one explicit mask [tokens, keys], one score matrix, one softmax, one
sum.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_core.kernels.geometry import BlockGeometry


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k, v [K, G, D|E], mask [T, K] or [G, T, K] -> out [T, H, E], lse [T, H]."""
    heads = q.shape[1] // k.shape[1]
    mask = mask.expand(k.shape[1], -1, -1).repeat_interleave(heads, 0)
    keys = k.repeat_interleave(heads, 1)
    values = v.repeat_interleave(heads, 1)
    scores = torch.einsum("thd,khd->htk", q, keys) / q.shape[2] ** 0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = (
        torch.logsumexp(scores, -1)
        if scores.shape[-1]
        else scores.new_full(scores.shape[:2], -torch.inf)
    )
    prob = torch.where(mask, torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None]), 0.0)
    return torch.einsum("htk,khe->the", prob, values), lse.T


def borders(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """[(start, stop)] of the documents that are not empty."""
    marks = cu_seqlens.tolist()
    return [(a, b) for a, b in itertools.pairwise(marks) if b > a]


def num_compressed(length: int, span: int, stride: int) -> int:
    """Whole compression blocks of a document."""
    return 0 if length < span else (length - span) // stride + 1


def compressed(q, k, v, cu_seqlens, span, stride):
    """Compressed branch; slot start // stride + i holds block i of the document at `start`."""
    outs, lses = [], []
    for start, stop in borders(cu_seqlens):
        count = num_compressed(stop - start, span, stride)
        slots = slice(start // stride, start // stride + count)
        position = torch.arange(stop - start, device=q.device)[:, None]
        mask = torch.arange(count, device=q.device)[None, :] * stride + span - 1 <= position
        out, lse = masked_attention(q[start:stop], k[slots], v[slots], mask)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def sliding(q, k, v, cu_seqlens, window) -> torch.Tensor:
    """Keys t - window + 1 .. t of the own document."""
    outs = []
    for start, stop in borders(cu_seqlens):
        t = torch.arange(stop - start, device=q.device)
        mask = (t[None, :] <= t[:, None]) & (t[None, :] > t[:, None] - window)
        outs.append(masked_attention(q[start:stop], k[start:stop], v[start:stop], mask)[0])
    return torch.cat(outs)


def selected(q, k, v, ids, cu_seqlens, block) -> torch.Tensor:
    """Keys up to t of the blocks named by ids [N, G, S]; -1 names none."""
    outs = []
    for start, stop in borders(cu_seqlens):
        length = stop - start
        t = torch.arange(length, device=q.device)
        chosen = torch.zeros(
            k.shape[1], length, -(-length // block) + 1, dtype=torch.bool, device=q.device
        )
        own = ids[start:stop].long().permute(1, 0, 2)
        chosen.scatter_(2, torch.where(own < 0, chosen.shape[2] - 1, own), True)
        mask = chosen[..., :-1].repeat_interleave(block, 2)[..., :length]
        mask = mask & (t[None, :] <= t[:, None])
        outs.append(masked_attention(q[start:stop], k[start:stop], v[start:stop], mask)[0])
    return torch.cat(outs)


def block_scores(q, k, cu_seqlens, span, stride, block):
    """Per document: scores [G, T, blocks] by brute-force overlap, summed over the group's heads."""
    heads = q.shape[1] // k.shape[1]
    result = []
    for start, stop in borders(cu_seqlens):
        length = stop - start
        count = num_compressed(length, span, stride)
        blocks = -(-length // block)
        slots = slice(start // stride, start // stride + count)
        t = torch.arange(length, device=q.device)
        mask = torch.arange(count, device=q.device)[None, :] * stride + span - 1 <= t[:, None]
        scores = (
            torch.einsum("thd,khd->htk", q[start:stop], k[slots].repeat_interleave(heads, 1))
            / q.shape[2] ** 0.5
        )
        prob = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1).nan_to_num(0.0)
        overlap = torch.zeros(count, blocks, dtype=q.dtype)
        for i in range(count):
            for j in range(blocks):
                shared = min(i * stride + span, (j + 1) * block) - max(i * stride, j * block)
                overlap[i, j] = max(0, shared) // stride
        summed = prob.unflatten(0, (k.shape[1], heads)).sum(1)
        result.append(summed @ overlap.to(q.device))
    return result


def choose(scores: Tensor, num_selected: int, block: int) -> Tensor:
    """Ids [T, G, S] of one document from scores [G, T, blocks]: the rule, one token at a time."""
    groups, length, _ = scores.shape
    ids = torch.full((length, groups, num_selected), -1, dtype=torch.int32)
    for g in range(groups):
        for t in range(length):
            current = t // block
            forced = {0, max(current - 1, 0), current}
            row = scores[g, t].tolist()
            rest = sorted(set(range(current + 1)) - forced, key=lambda j: (-row[j], j))
            picked = sorted(forced | set(rest[: num_selected - len(forced)]))
            ids[t, g, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
    return ids


def num_choices(position: int, block: int, num_selected: int) -> int:
    """Sets of blocks that a token may choose; 1 where forced blocks, or all, leave no choice."""
    started = set(range(position // block + 1))
    free = started - {0, position // block - 1, position // block}
    places = num_selected - len(started - free)
    return math.comb(len(free), min(places, len(free)))


def free_choices(lengths: Sequence[int], block: int, num_selected: int) -> int:
    """Tokens of documents of these lengths that have more candidates than places for them."""
    return sum(
        num_choices(position, block, num_selected) > 1
        for length in lengths
        for position in range(length)
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over the norm of the expected."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def num_reads(sizes: BlockGeometry, position: int) -> int:
    """Keys one decode step at this position has to read in the three branches together.

    Whole compressed blocks, the whole chosen blocks and the started one, and the window; of the
    geometry only the sizes are used.
    """
    seen = position + 1
    compressed = max(0, (seen - sizes.compress_block) // sizes.compress_stride + 1)
    num_whole, in_own_block = divmod(position, sizes.select_block)
    whole_blocks = min(sizes.num_selected - 1, num_whole)
    return (
        compressed + whole_blocks * sizes.select_block + in_own_block + 1 + min(sizes.window, seen)
    )
