"""One NSA layer token by token, written from the specification page and from no module.

Takes the weights out of a layer and nothing else. float64, one document, Python loops.
"""

import cmath
import math

import torch
from torch import Tensor

from nsa_core.config.model import ModelConfig


def rope(x: Tensor, position: int, base: float) -> Tensor:
    """Turn each half-split pair (a, a + D/2) as one complex number; x is one head [D]."""
    half = x.shape[-1] // 2
    turns = [cmath.exp(1j * position * base ** (-2 * pair / x.shape[-1])) for pair in range(half)]
    turned = torch.complex(x[:half], x[half:]) * torch.tensor(turns, dtype=torch.complex128)
    return torch.cat((turned.real, turned.imag))


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """softmax(q.k / sqrt(D)) v over a list of keys; 0 for none."""
    if not keys:
        return torch.zeros_like(values[0]) if values else torch.zeros(())
    scores = torch.stack([q @ key for key in keys]) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=0) @ torch.stack(values)


def phi(kind: str, weights: dict[str, Tensor], block_LD: Tensor, group: int) -> Tensor:
    """One compressed key of one group (Eq. 7)."""
    if kind == "avg":
        return block_LD.mean(0)
    if kind == "linear":
        return weights["weight"][group] @ block_LD.flatten()
    encoded = (block_LD + weights["position_LD"]).flatten()
    hidden = weights["up.weight"] @ encoded
    return block_LD.mean(0) + weights["down.weight"] @ (hidden * torch.sigmoid(hidden))


def named(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = prefix + "."
    return {name[len(start) :]: w for name, w in weights.items() if name.startswith(start)}


def gates(config: ModelConfig, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """[H, 3] for one token."""
    if config.gate.kind == "mlp":
        hidden = weights["gate.hidden.weight"] @ x + weights["gate.hidden.bias"]
        x = hidden * torch.sigmoid(hidden)
    logits = (weights["gate.logits.weight"] @ x + weights["gate.logits.bias"]).reshape(-1, 3)
    if config.gate.kind == "softmax":
        exponent = torch.exp(logits / config.gate.temperature)
        values = exponent / exponent.sum(-1, keepdim=True)
    else:
        values = 1 / (1 + torch.exp(-logits))
    if config.gate.per == "head":
        return values
    return torch.stack([values[head // config.heads_per_group] for head in range(config.num_heads)])


def chosen_blocks(config: ModelConfig, prob: list[Tensor], t: int) -> list[int]:
    """Blocks of one token and group from the heads' compressed probabilities (Eq. 8-12)."""
    nsa, current = config.nsa, t // config.nsa.select_block
    scores = []
    for j in range(current + 1):
        own = range(j * nsa.select_block, (j + 1) * nsa.select_block)
        score = 0.0
        for head in prob:
            for i, p in enumerate(head.tolist()):
                first = i * nsa.compress_stride
                shared = len(set(own) & set(range(first, first + nsa.compress_block)))
                score += p * shared / nsa.compress_stride
        scores.append(score)
    forced = {0, current, max(0, current - 1)}
    rest = [j for j in range(current + 1) if j not in forced]
    best = sorted(rest, key=lambda j: (-scores[j], j))[: nsa.num_selected - len(forced)]
    return sorted(forced | set(best))


def nsa_layer(config: ModelConfig, weights: dict[str, Tensor], x_TW: Tensor) -> Tensor:
    """The whole layer for one document."""
    nsa, groups = config.nsa, config.num_kv_groups
    width_k, width_v = config.head_dim_k, config.head_dim_v
    length, base = x_TW.shape[0], config.rope.base
    q = (x_TW @ weights["q.weight"].T).reshape(length, config.num_heads, width_k)
    kv = x_TW @ weights["kv.weight"].T
    k_cmp, k_slc, k_win = (
        kv[:, : 3 * groups * width_k].reshape(length, 3, groups, width_k).unbind(1)
    )
    v_cmp, v_slc, v_win = (
        kv[:, 3 * groups * width_k :].reshape(length, 3, groups, width_v).unbind(1)
    )
    phi_k, phi_v = named(weights, "phi_k"), named(weights, "phi_v")
    starts = range(0, length - nsa.compress_block + 1, nsa.compress_stride)
    rows = []
    for t in range(length):
        gate_H3, heads = gates(config, weights, x_TW[t]), [torch.zeros(())] * config.num_heads
        for g in range(groups):
            seen = [s for s in starts if s + nsa.compress_block - 1 <= t]
            blocks = [slice(s, s + nsa.compress_block) for s in seen]
            keys = [
                rope(phi(nsa.phi, phi_k, k_cmp[block, g], g), s, base)
                for s, block in zip(seen, blocks, strict=True)
            ]
            values = [phi(nsa.phi, phi_v, v_cmp[block, g], g) for block in blocks]
            members = range(g * config.heads_per_group, (g + 1) * config.heads_per_group)
            turned = {head: rope(q[t, head], t, base) for head in members}
            prob = [
                torch.softmax(torch.stack([turned[head] @ k for k in keys]) / width_k**0.5, 0)
                for head in members
                if keys
            ]
            picked = chosen_blocks(config, [p.detach() for p in prob], t)
            slc = [p for p in range(t + 1) if p // nsa.select_block in picked]
            win = range(max(0, t - nsa.window + 1), t + 1)
            for head in members:
                out_cmp = (
                    attend(turned[head], keys, values) if keys else torch.zeros(width_v).double()
                )
                out_slc = attend(
                    turned[head],
                    [rope(k_slc[p, g], p, base) for p in slc],
                    [v_slc[p, g] for p in slc],
                )
                out_win = attend(
                    turned[head],
                    [rope(k_win[p, g], p, base) for p in win],
                    [v_win[p, g] for p in win],
                )
                a, b, c = gate_H3[head]
                heads[head] = a * out_cmp + b * out_slc + c * out_win
        rows.append(weights["out.weight"] @ torch.cat(heads))
    return torch.stack(rows)
