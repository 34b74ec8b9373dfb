"""The parts of a block that are not attention: norm, MLP, gate.

Legend: X any leading sizes, W model width (`dim`).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa_core.config.counts import gate_hidden_width
from nsa_core.config.model import GateConfig, ModelConfig

NUM_BRANCHES = 3


def widen(x: Tensor) -> Tensor:
    """At least float32: half types go up, float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / rms(x) times a weight, in at least float32."""

    def __init__(self, width: int, eps: float) -> None:
        """Start as the plain normalisation."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_XW: Tensor) -> Tensor:
        """Normalise the last axis; returns the dtype of x."""
        normed = F.rms_norm(widen(x_XW), self.weight.shape, widen(self.weight), self.eps)
        return normed.to(x_XW.dtype)


class MLP(nn.Module):
    """SwiGLU, or two matrices with SiLU between them; no biases."""

    def __init__(self, config: ModelConfig) -> None:
        """Make the matrices; `LanguageModel` fills them."""
        super().__init__()
        self.is_gated = config.activation == "swiglu"
        inner = config.mlp_width * (2 if self.is_gated else 1)
        self.up = nn.Linear(config.dim, inner, bias=False)
        self.down = nn.Linear(config.mlp_width, config.dim, bias=False)

    def forward(self, x_XW: Tensor) -> Tensor:
        """Map each token by itself."""
        inner = self.up(x_XW)
        if self.is_gated:
            gate, value = inner.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.silu(inner)
        out: Tensor = self.down(hidden)
        return out


class BranchGate(nn.Module):
    """How much of each branch a head takes (Eq. 5), from the input of the layer."""

    def __init__(self, config: GateConfig, dim: int, num_heads: int, num_groups: int) -> None:
        """Make the logits' matrices; a zero bias starts all branches equal."""
        super().__init__()
        self.config, self.num_heads = config, num_heads
        self.num_gates = num_heads if config.per == "head" else num_groups
        width = dim
        self.hidden: nn.Linear | None = None
        if config.kind == "mlp":
            width = gate_hidden_width(dim)
            self.hidden = nn.Linear(dim, width)
        self.logits = nn.Linear(width, self.num_gates * NUM_BRANCHES)

    def forward(self, x_XW: Tensor, product_XY: Tensor | None = None) -> Tensor:
        """Gates [X, H, 3] in at least float32, order compressed, selected, sliding.

        `product_XY` is `x @ logits.weight.T`, where the caller has it already.
        """
        if product_XY is None:
            inner_XW = x_XW if self.hidden is None else F.silu(self.hidden(x_XW))
            product_XY = F.linear(inner_XW, self.logits.weight)
        flat = widen(product_XY) + widen(self.logits.bias)
        logits = flat.view(*flat.shape[:-1], self.num_gates, NUM_BRANCHES)
        if self.config.kind == "softmax":
            gates = torch.softmax(logits / self.config.temperature, dim=-1)
        else:
            gates = torch.sigmoid(logits)
        return gates.repeat_interleave(self.num_heads // self.num_gates, dim=-2)
