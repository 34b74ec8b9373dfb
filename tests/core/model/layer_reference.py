"""The model token by token, written from the specification page and from no module.

Takes the weights out of a layer or a model and nothing else. float64, one document, Python loops.
"""

import cmath
import math

import torch
from torch import Tensor

from nsa_core.config.model import ModelConfig, RopeConfig

Weights = dict[str, Tensor]


def rope(x: Tensor, position: int, settings: RopeConfig) -> Tensor:
    """Turn each half-split pair (a, a + D/2) as one complex number; x is one head [D]."""
    half = x.shape[-1] // 2
    scaled = position / (settings.scale if settings.scaling == "linear" else 1.0)
    angles = [scaled * settings.base ** (-2 * pair / x.shape[-1]) for pair in range(half)]
    turns = torch.tensor([cmath.exp(1j * angle) for angle in angles], dtype=torch.complex128)
    turned = torch.complex(x[:half], x[half:]) * turns
    return torch.cat((turned.real, turned.imag))


def rope_rows(x_TGD: Tensor, positions: list[int], settings: RopeConfig) -> Tensor:
    """`rope` of every row at its own position, head by head."""
    rows = [
        torch.stack([rope(head, position, settings) for head in row])
        for row, position in zip(x_TGD, positions, strict=True)
    ]
    return torch.stack(rows) if rows else x_TGD


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(q.k / sqrt(D)) v over keys [R, D] and values [R, E]; 0 for none."""
    if not len(keys):
        return values.new_zeros(values.shape[1])
    return torch.softmax(keys @ q / math.sqrt(q.shape[-1]), dim=0) @ values


def phi(kind: str, weights: Weights, block_LD: Tensor, group: int) -> Tensor:
    """One compressed key of one group (Eq. 7)."""
    if kind == "avg":
        return block_LD.mean(0)
    if kind == "linear":
        return weights["weight"][group] @ block_LD.flatten()
    encoded = (block_LD + weights["position_LD"]).flatten()
    hidden = weights["up.weight"] @ encoded
    return block_LD.mean(0) + weights["down.weight"] @ (hidden * torch.sigmoid(hidden))


def named(weights: Weights, prefix: str) -> Weights:
    """The weights of a part, without its name."""
    start = prefix + "."
    return {name[len(start) :]: w for name, w in weights.items() if name.startswith(start)}


def gates(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
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


def compressed_pair(
    config: ModelConfig, weights: Weights, k_TGD: Tensor, v_TGE: Tensor
) -> tuple[Tensor, Tensor]:
    """All compressed keys [C, G, D], turned at their first position, and values [C, G, E]."""
    nsa, groups = config.nsa, range(config.num_kv_groups)
    starts = list(range(0, len(k_TGD) - nsa.compress_block + 1, nsa.compress_stride))

    def pooled(name: str, x_TGD: Tensor) -> Tensor:
        own = named(weights, name)
        rows = [
            torch.stack(
                [phi(nsa.phi, own, x_TGD[s : s + nsa.compress_block, g], g) for g in groups]
            )
            for s in starts
        ]
        return torch.stack(rows) if rows else x_TGD[:0]

    return rope_rows(pooled("phi_k", k_TGD), starts, config.rope), pooled("phi_v", v_TGE)


def nsa_layer(config: ModelConfig, weights: Weights, x_TW: Tensor) -> Tensor:
    """The whole layer for one document."""
    nsa, groups = config.nsa, config.num_kv_groups
    width_k, width_v = config.head_dim_k, config.head_dim_v
    length, positions = x_TW.shape[0], list(range(x_TW.shape[0]))
    q = (x_TW @ weights["q.weight"].T).reshape(length, config.num_heads, width_k)
    q = rope_rows(q, positions, config.rope)
    kv = x_TW @ weights["kv.weight"].T
    k_cmp, k_slc, k_win = (
        kv[:, : 3 * groups * width_k].reshape(length, 3, groups, width_k).unbind(1)
    )
    v_cmp, v_slc, v_win = (
        kv[:, 3 * groups * width_k :].reshape(length, 3, groups, width_v).unbind(1)
    )
    k_cmp, v_cmp = compressed_pair(config, weights, k_cmp, v_cmp)
    k_slc, k_win = (rope_rows(k, positions, config.rope) for k in (k_slc, k_win))
    rows = []
    for t in range(length):
        gate_H3, heads = gates(config, weights, x_TW[t]), []
        seen = sum(i * nsa.compress_stride + nsa.compress_block - 1 <= t for i in range(len(k_cmp)))
        for g in range(groups):
            members = range(g * config.heads_per_group, (g + 1) * config.heads_per_group)
            prob = [
                torch.softmax(k_cmp[:seen, g] @ q[t, head] / width_k**0.5, 0).detach()
                for head in members
            ]
            picked = chosen_blocks(config, prob, t)
            slc = [p for p in range(t + 1) if p // nsa.select_block in picked]
            win = range(max(0, t - nsa.window + 1), t + 1)
            for head in members:
                a, b, c = gate_H3[head]
                heads.append(
                    a * attend(q[t, head], k_cmp[:seen, g], v_cmp[:seen, g])
                    + b * attend(q[t, head], k_slc[slc, g], v_slc[slc, g])
                    + c * attend(q[t, head], k_win[win, g], v_win[win, g])
                )
        rows.append(weights["out.weight"] @ torch.cat(heads))
    return torch.stack(rows)


def dense_layer(config: ModelConfig, weights: Weights, x_TW: Tensor) -> Tensor:
    """Causal attention to every key up to the token, for one document."""
    length, groups, width_k = x_TW.shape[0], config.num_kv_groups, config.head_dim_k
    positions = list(range(length))
    q = (x_TW @ weights["q.weight"].T).reshape(length, config.num_heads, width_k)
    kv = x_TW @ weights["kv.weight"].T
    k = kv[:, : groups * width_k].reshape(length, groups, width_k)
    v = kv[:, groups * width_k :].reshape(length, groups, config.head_dim_v)
    q, k = (rope_rows(x, positions, config.rope) for x in (q, k))
    rows = []
    for t in positions:
        heads = []
        for head in range(config.num_heads):
            g = head // config.heads_per_group
            heads.append(attend(q[t, head], k[: t + 1, g], v[: t + 1, g]))
        rows.append(weights["out.weight"] @ torch.cat(heads))
    return torch.stack(rows)


def norm(config: ModelConfig, weight: Tensor, x_TW: Tensor) -> Tensor:
    """x / rms(x), times the weight."""
    return x_TW / (x_TW.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight


def mlp(config: ModelConfig, weights: Weights, x_TW: Tensor) -> Tensor:
    """SwiGLU, its gate first, or two matrices with SiLU between them."""
    inner = x_TW @ weights["up.weight"].T
    value: Tensor | float = 1.0
    if config.activation == "swiglu":
        inner, value = inner[:, : config.mlp_width], inner[:, config.mlp_width :]
    return (inner * torch.sigmoid(inner) * value) @ weights["down.weight"].T


def hidden_states(config: ModelConfig, weights: Weights, tokens_T: Tensor) -> Tensor:
    """Hidden states [T, W] of one document after the last norm."""
    layer = nsa_layer if config.attention == "nsa" else dense_layer
    x_TW = weights["embedding.weight"][tokens_T]
    for index in range(config.num_layers):
        own = named(weights, f"blocks.{index}")
        normed = norm(config, own["attention_norm.weight"], x_TW)
        x_TW = x_TW + layer(config, named(own, "attention"), normed)
        x_TW = x_TW + mlp(config, named(own, "mlp"), norm(config, own["mlp_norm.weight"], x_TW))
    return norm(config, weights["norm.weight"], x_TW)
