"""Probe that a whole attention layer is the paper's: written out in float64 from its weights alone.

Everything around the branches is judged here: how a fused projection is split, what is rotated,
how blocks are compressed, which gate weighs which branch. Branches are judged by `numerics.py`.
Legend: T tokens, W model width, H query heads, G groups, D key width, E value width, C compressed
blocks, L tokens of a compressed block.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa_core.config.model import ModelConfig
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from nsa_core.model.attention import make_context
from nsa_core.model.rotary import amplitude, exact_frequencies
from nsa_core.model.transformer import LanguageModel

#: Share of the tokens that must be within the limit: a tie of two blocks may go the other way.
JUDGED_SHARE = 0.9
#: The model's angles are float32 by rule: one of 2,000 rad is exact to 1.2e-4, and scores, and so
#: outputs, move by no more of their own size. Rotated values are off by about 1.
EXACT_LIMIT = 1e-3


@dataclass(frozen=True)
class LayerResult:
    """How far the first attention layer of a model is from what it should compute.

    Attributes:
        num_tokens: T.
        exact: Relative L2 of a token's output, plain PyTorch in float64 against the written-out
            layer, at `JUDGED_SHARE` of the tokens.
        kernels: The same, the run's backends against plain PyTorch in the run's precision, over
            the tokens that attend to every block: in half precision, others choose blocks of
            nearly one score as their sums round (`parity.choice` judges that).
    """

    num_tokens: int
    exact: float
    kernels: float


@torch.no_grad()
def layer_probe(
    model: LanguageModel,
    plain: LanguageModel,
    *,
    num_tokens: int,
    autocast: torch.autocast,
    seed: int = 0,
) -> LayerResult:
    """Compare the first attention layer of two models of equal weights, and of neither.

    `plain` is in float64 afterwards; T is best with more blocks than may be chosen.
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.weight.device
    x_TW = torch.randn(num_tokens, model.config.dim, generator=generator).to(device)
    all_chosen_TW = x_TW[: model.geometry.num_selected * model.geometry.select_block]
    with autocast:
        found, other = _attention(model, all_chosen_TW), _attention(plain, all_chosen_TW)
    exact = _attention(plain.double(), x_TW.double())
    wanted = expected_attention(plain, x_TW.double())
    return LayerResult(num_tokens, _error(exact, wanted), _error(found, other))


def _attention(model: LanguageModel, x_TW: Tensor) -> Tensor:
    packing = Packing.uniform(1, len(x_TW), x_TW.device)
    out: Tensor = model.block_list[0].attention(
        x_TW, make_context(model.geometry, packing, model.rotary)
    )
    return out


def _error(found_TW: Tensor, wanted_TW: Tensor) -> float:
    """Relative L2 of a token at `JUDGED_SHARE` of them; NaN if one is NaN."""
    wanted_TW = wanted_TW.double()
    gap_T = (found_TW.double() - wanted_TW).norm(dim=-1)
    return float((gap_T / wanted_TW.norm(dim=-1).clamp(min=1e-30)).quantile(JUDGED_SHARE))


def expected_attention(model: LanguageModel, x_TW: Tensor) -> Tensor:
    """Output [T, W] of the first attention layer for one document, from its weights.

    Of the float64 model only the configuration and the weights of the layer are used.
    """
    config, layer = model.config, model.block_list[0].attention
    weights: dict[str, Tensor] = dict(layer.named_parameters())
    groups, width_k, width_v = config.num_kv_groups, config.head_dim_k, config.head_dim_v
    num_pairs = 1 if config.attention == "dense" else 3
    q_THD = (x_TW @ weights["q.weight"].T).view(len(x_TW), config.num_heads, width_k)
    widths = [num_pairs * groups * width_k, num_pairs * groups * width_v]
    k_TX, v_TX = torch.split(x_TW @ weights["kv.weight"].T, widths, dim=1)
    keys = k_TX.view(len(x_TW), num_pairs, groups, width_k).unbind(1)
    values = v_TX.view(len(x_TW), num_pairs, groups, width_v).unbind(1)
    q_THD = _turned(q_THD, config)
    if config.attention == "dense":
        mixed_THE = _dense(q_THD, _turned(keys[0], config), values[0], config)
    else:
        mixed_THE = _sparse(q_THD, keys, values, _gates(weights, config, x_TW), weights, config)
    return mixed_THE.flatten(1) @ weights["out.weight"].T


def _dense(q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, config: ModelConfig) -> Tensor:
    packing = Packing.uniform(1, len(q_THD), q_THD.device)
    everything = replace(BlockGeometry.from_config(config.nsa), window=len(q_THD))
    return ReferenceBackend().sliding(q_THD, k_TGD, v_TGE, everything, packing)


def _sparse(
    q_THD: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    gate_TH3: Tensor,
    weights: dict[str, Tensor],
    config: ModelConfig,
) -> Tensor:
    reference, geometry = ReferenceBackend(), BlockGeometry.from_config(config.nsa)
    packing = Packing.uniform(1, len(q_THD), q_THD.device)
    k_CGD = _compressed(keys[0], "phi_k", weights, config)
    k_CGD = _turned(k_CGD, config, config.nsa.compress_stride)
    v_CGE = _compressed(values[0], "phi_v", weights, config)
    unused = geometry.num_slots(len(q_THD)) - len(k_CGD)
    k_CGD, v_CGE = (F.pad(x, (0, 0, 0, 0, 0, unused)) for x in (k_CGD, v_CGE))
    out_cmp, lse_TH = reference.compressed(q_THD, k_CGD, v_CGE, geometry, packing)
    ids_TGS = reference.select(q_THD, k_CGD, lse_TH, geometry, packing)
    k_slc, k_win = (_turned(k, config) for k in keys[1:])
    outs = (
        out_cmp,
        reference.selected(q_THD, k_slc, values[1], ids_TGS, geometry, packing),
        reference.sliding(q_THD, k_win, values[2], geometry, packing),
    )
    mixed_THE = torch.zeros_like(out_cmp)
    for branch, out_THE in enumerate(outs):
        mixed_THE += gate_TH3[..., branch, None] * out_THE
    return mixed_THE


def _turned(x_RHD: Tensor, config: ModelConfig, stride: int = 1) -> Tensor:
    """Rotary positions 0, stride, 2 stride, ...: each pair (a, a + D / 2) as a complex number."""
    width = x_RHD.shape[-1]
    position_R = torch.arange(len(x_RHD), device=x_RHD.device, dtype=torch.float64) * stride
    angle = position_R[:, None] * exact_frequencies(config.rope, width).to(x_RHD.device)
    turn = torch.polar(torch.full_like(angle, amplitude(config.rope)), angle)
    pairs = torch.complex(x_RHD[..., : width // 2], x_RHD[..., width // 2 :]) * turn[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def _compressed(x_TGD: Tensor, phi: str, weights: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """Compressed keys or values [C, G, D] (Eq. 7)."""
    nsa = config.nsa
    block_CGLD = x_TGD.unfold(0, nsa.compress_block, nsa.compress_stride).transpose(2, 3)
    if nsa.phi == "linear":
        return torch.einsum("cgx,gdx->cgd", block_CGLD.flatten(2), weights[f"{phi}.weight"])
    mean_CGD = block_CGLD.mean(dim=2)
    if nsa.phi == "avg":
        return mean_CGD
    encoded = (block_CGLD + weights[f"{phi}.position_LD"]).flatten(2)
    inner = F.silu(encoded @ weights[f"{phi}.up.weight"].T)
    return mean_CGD + inner @ weights[f"{phi}.down.weight"].T


def _gates(weights: dict[str, Tensor], config: ModelConfig, x_TW: Tensor) -> Tensor:
    """Gates [T, H, 3] in the order compressed, selected, window (Eq. 5)."""
    if config.gate.kind == "mlp":
        x_TW = F.silu(x_TW @ weights["gate.hidden.weight"].T + weights["gate.hidden.bias"])
    logits_TX = x_TW @ weights["gate.logits.weight"].T + weights["gate.logits.bias"]
    logits_TY3 = logits_TX.view(len(x_TW), -1, 3)
    if config.gate.kind == "softmax":
        gate_TY3 = torch.softmax(logits_TY3 / config.gate.temperature, dim=-1)
    else:
        gate_TY3 = 1 / (1 + torch.exp(-logits_TY3))
    return gate_TY3.repeat_interleave(config.num_heads // gate_TY3.shape[1], dim=1)
