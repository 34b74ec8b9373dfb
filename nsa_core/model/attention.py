"""The attention layers: Native Sparse Attention, and dense causal attention as its control.

Legend: N tokens (documents end to end), W model width, H query heads, G groups, D key width,
E value width, L tokens of a compressed block, C compressed slots, B batch, T tokens of a document.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_core.config.model import MAX_POSITIONS, ModelConfig
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.inputs import require_count
from nsa_core.kernels.mixing import gated_sum
from nsa_core.kernels.packing import CompressedSlots, Packing, compressed_slots
from nsa_core.model.compression import cut_strides, make_compression
from nsa_core.model.layers import BranchGate
from nsa_core.model.rotary import Rotary, rotate
from nsa_core.model.statistics import measure

#: Rows of a product in half precision begin at whole 16 bytes.
_ALIGNED_ROWS = 8
#: FlashAttention in torch shares key heads among query heads from this compute capability on.
GROUPED_SDPA_CAPABILITY = (8, 0)

#: From here on cuDNN's attention is the fastest in torch: 1.4 to 1.5 times flash at 65,536 tokens a
#: call (bench/results/kernels-h100.json). torch itself would take flash.
CUDNN_SDPA_CAPABILITY = (9, 0)
HOPPER_SDPA = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True, eq=False)
class AttentionContext:
    """What all layers of one forward pass have in common.

    Attributes:
        token_tables: Rotary tables of the tokens.
        slot_tables: Rotary tables of the compressed keys, at the first position of their block.
    """

    geometry: BlockGeometry
    packing: Packing
    slots: CompressedSlots
    token_tables: tuple[Tensor, Tensor]
    slot_tables: tuple[Tensor, Tensor]


def make_context(geometry: BlockGeometry, packing: Packing, rotary: Rotary) -> AttentionContext:
    """Derive the shared tables from the documents.

    Raises:
        ValueError: If a document may have more positions than rotary angles tell apart.
    """
    require_count("tokens of a document", packing.max_seqlen, most=MAX_POSITIONS)
    slots = compressed_slots(packing, geometry)
    return AttentionContext(
        geometry=geometry,
        packing=packing,
        slots=slots,
        token_tables=rotary.tables(packing.position_N),
        slot_tables=rotary.tables(slots.position_C),
    )


@dataclass(frozen=True, eq=False)
class KeysValues:
    """The three independent pairs of a layer (paper 3.3.3), before rotation."""

    k_cmp: Tensor
    k_slc: Tensor
    k_win: Tensor
    v_cmp: Tensor
    v_slc: Tensor
    v_win: Tensor


@dataclass(frozen=True, eq=False)
class Projected:
    """What a layer makes of its input, before rotation.

    Attributes:
        gate_NY: The gate's product with x; None where the gate has a hidden layer.
    """

    q_NHD: Tensor
    pairs: KeysValues
    gate_NY: Tensor | None


class NSAAttention(nn.Module):
    """Compressed, selected and sliding attention, mixed by gates (paper Eq. 5).

    `q`, `kv` and `gate.logits` hold weights by the names of the checkpoints; `project` multiplies
    with them, in training and in decode.
    """

    def __init__(self, config: ModelConfig, backends: BranchBackends) -> None:
        """Make the projections; `LanguageModel` fills them."""
        super().__init__()
        self.config, self.backends = config, backends
        groups, width_k, width_v = config.num_kv_groups, config.head_dim_k, config.head_dim_v
        self.q = nn.Linear(config.dim, config.num_heads * width_k, bias=False)
        self.kv = nn.Linear(config.dim, 3 * groups * (width_k + width_v), bias=False)
        self.phi_k, self.phi_v = (
            make_compression(
                config.nsa.phi,
                num_groups=groups,
                block=config.nsa.compress_block,
                width=width,
                hidden=width_k,
            )
            for width in (width_k, width_v)
        )
        self.gate = BranchGate(config.gate, config.dim, config.num_heads, groups)
        self.out = nn.Linear(config.num_heads * width_v, config.dim, bias=False)
        self.is_recording = False
        self.figures: Tensor | None = None

    def forward(self, x_NW: Tensor, context: AttentionContext) -> Tensor:
        """Attend within each document; returns [N, W]."""
        geometry, packing = context.geometry, context.packing
        projected = self.project(x_NW)
        pairs, q_NHD = projected.pairs, rotate(projected.q_NHD, context.token_tables)
        k_CGD, v_CGE = self._compress(pairs, context)
        k_slc, k_win = (rotate(k, context.token_tables) for k in (pairs.k_slc, pairs.k_win))
        gate_NH3 = self.gate(x_NW, projected.gate_NY)
        branches, fused = self.backends, self.backends.fused
        if fused is not None:
            mixed_NHE, ids_NGS = fused.attend(
                q_NHD, (k_CGD, v_CGE), (k_slc, pairs.v_slc), (k_win, pairs.v_win), gate_NH3,
                geometry, packing,
            )  # fmt: skip
        else:
            out_cmp, lse_NH = branches.compressed.compressed(q_NHD, k_CGD, v_CGE, geometry, packing)
            ids_NGS = branches.compressed.select(q_NHD, k_CGD, lse_NH, geometry, packing)
            selected, sliding = branches.selected, branches.sliding
            out_slc = selected.selected(q_NHD, k_slc, pairs.v_slc, ids_NGS, geometry, packing)
            out_win = sliding.sliding(q_NHD, k_win, pairs.v_win, geometry, packing)
            mixed_NHE = gated_sum(gate_NH3, (out_cmp, out_slc, out_win))
        if self.is_recording:
            self.figures = measure(gate_NH3, ids_NGS, packing.position_N, geometry.select_block)
        result: Tensor = self.out(mixed_NHE.flatten(1))
        return result

    def project(self, x_NW: Tensor, *, has_few_rows: bool = False) -> Projected:
        """Queries, keys with values, and the gate's product with x.

        Made by one matrix product: x is read once, its gradient written once, and the few rows of
        the gate cost no product of their own, which the tensor cores of no card like.

        With few rows each weight is multiplied where it lies: copying the weights side by side
        would cost a decode step more than it saves.
        """
        weights = [self.q.weight, self.kv.weight]
        if self.gate.hidden is None:
            weights.append(self.gate.logits.weight)
        if has_few_rows:
            q_NX, kv_NX, *gate = (F.linear(x_NW, weight) for weight in weights)
            parts = [q_NX, *torch.split(kv_NX, self._pair_widths, dim=-1), *gate]
        else:
            widths = [len(self.q.weight), *self._pair_widths]
            if self.gate.hidden is None:
                widths.append(len(self.gate.logits.weight))
            parts = _one_product(x_NW, weights, widths)
        q_NHD = parts[0].reshape(x_NW.shape[0], self.config.num_heads, self.config.head_dim_k)
        shape = (x_NW.shape[0], self.config.num_kv_groups, -1)
        pairs = KeysValues(*(part.reshape(shape) for part in parts[1:7]))
        return Projected(q_NHD, pairs, parts[7] if self.gate.hidden is None else None)

    @property
    def _pair_widths(self) -> list[int]:
        groups = self.config.num_kv_groups
        return [groups * self.config.head_dim_k] * 3 + [groups * self.config.head_dim_v] * 3

    def mix(self, gate_NH3: Tensor, outs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The output projection of the gated sum."""
        result: Tensor = self.out(gated_sum(gate_NH3, outs).flatten(1))
        return result

    def _compress(self, pairs: KeysValues, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Compressed keys (rotated at their first position) and values.

        Slots without a block hold anything: no backend lets them count (`AttentionBackend`).
        """
        geometry = context.geometry
        num_strides = geometry.compress_block // geometry.compress_stride
        k_CdGD, v_CdGE = (
            cut_strides(x, geometry, context.packing, context.slots)
            for x in (pairs.k_cmp, pairs.v_cmp)
        )
        k_CGD = self.phi_k.of_strides(k_CdGD, num_strides)
        v_CGE = self.phi_v.of_strides(v_CdGE, num_strides)
        return rotate(k_CGD, context.slot_tables), v_CGE


def _one_product(x_NW: Tensor, weights: list[Tensor], widths: list[int]) -> list[Tensor]:
    """The product of x with all weights at once, cut into parts of these widths.

    It is cut once, padding included: every further cut makes the gradient one more copy.
    """
    padding = -sum(widths) % _ALIGNED_ROWS
    if padding:
        filler = x_NW.new_zeros(padding, x_NW.shape[1], dtype=weights[0].dtype)
        weights, widths = [*weights, filler], [*widths, padding]
    return list(torch.split(F.linear(x_NW, torch.cat(weights)), widths, dim=-1))


class DenseAttention(nn.Module):
    """Causal attention over the whole document with the same heads: the honest baseline."""

    def __init__(self, config: ModelConfig, backends: BranchBackends) -> None:
        """Make the projections; `LanguageModel` fills them."""
        super().__init__()
        self.config, self.backends = config, backends
        groups = config.num_kv_groups
        self.q = nn.Linear(config.dim, config.num_heads * config.head_dim_k, bias=False)
        self.kv = nn.Linear(
            config.dim, groups * (config.head_dim_k + config.head_dim_v), bias=False
        )
        self.out = nn.Linear(config.num_heads * config.head_dim_v, config.dim, bias=False)

    def forward(self, x_NW: Tensor, context: AttentionContext) -> Tensor:
        """Attend within each document; returns [N, W]."""
        q_NHD, k_NGD, v_NGE = self.project(x_NW)
        q_NHD, k_NGD = (rotate(x, context.token_tables) for x in (q_NHD, k_NGD))
        packing = context.packing
        backend = self.backends.dense
        is_torchs = backend is None or backend.name == "sdpa"
        if packing.uniform_length is not None and is_torchs:
            out_NHE = _batched_sdpa(q_NHD, k_NGD, v_NGE, packing.uniform_length)
        else:
            everything = replace(context.geometry, window=packing.max_seqlen)
            windowed = backend or self.backends.sliding
            out_NHE = windowed.sliding(q_NHD, k_NGD, v_NGE, everything, packing)
        result: Tensor = self.out(out_NHE.flatten(1))
        return result

    def project(self, x_NW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, not rotated."""
        config, num_tokens = self.config, x_NW.shape[0]
        q_NHD = self.q(x_NW).view(num_tokens, config.num_heads, config.head_dim_k)
        widths = [
            config.num_kv_groups * config.head_dim_k,
            config.num_kv_groups * config.head_dim_v,
        ]
        k_NX, v_NX = self.kv(x_NW).split(widths, dim=-1)
        shape = (num_tokens, config.num_kv_groups, -1)
        return q_NHD, k_NX.reshape(shape), v_NX.reshape(shape)


def _batched_sdpa(q_NHD: Tensor, k_NGD: Tensor, v_NGE: Tensor, length: int) -> Tensor:
    """Run the attention of torch on equally long documents."""
    q, k, v = (x.reshape(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q_NHD, k_NGD, v_NGE))
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and q.is_cuda and not _shares_key_heads(q.device):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        is_grouped = False
    if q.is_cuda and torch.cuda.get_device_capability(q.device) >= CUDNN_SDPA_CAPABILITY:
        with sdpa_kernel(HOPPER_SDPA, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _shares_key_heads(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= GROUPED_SDPA_CAPABILITY
