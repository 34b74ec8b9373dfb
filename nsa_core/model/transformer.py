"""The decoder-only language model around the attention layers.

Legend: B batch, T tokens of a row, N = B * T, W model width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa_core.config.model import ModelConfig
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.model.attention import AttentionContext, DenseAttention, NSAAttention, make_context
from nsa_core.model.layers import MLP, RMSNorm
from nsa_core.model.loss import LossSum, loss_sum
from nsa_core.model.rotary import Rotary
from nsa_core.model.statistics import AttentionStatistics, read_statistics
from nsa_core.model.weights import initialise

ActivationCheckpointing = Literal["none", "full", "selective"]
#: The Triton kernel needs a card and half precision; speed and memory only.
LossKernel = Literal["torch", "triton"]


TOKEN_DTYPES = (torch.int64, torch.int32)
#: Attention of one layer: normed input [N, W] in, what it adds [N, W] out.
Attend = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ParameterInfo:
    """A parameter and how the optimizer should treat it.

    Attributes:
        is_decayed: Weight decay applies: matrices do, norms, biases and embeddings do not.
        is_block_matrix: A two-dimensional weight inside a block, gates left out, which Muon
            may take.
    """

    name: str
    parameter: nn.Parameter
    is_decayed: bool
    is_block_matrix: bool


class Block(nn.Module):
    """Pre-norm attention, then pre-norm MLP."""

    def __init__(self, config: ModelConfig, backends: BranchBackends) -> None:
        """Make one layer."""
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention: NSAAttention | DenseAttention
        if config.attention == "nsa":
            self.attention = NSAAttention(config, backends)
        else:
            self.attention = DenseAttention(config, backends)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x_NW: Tensor, context: AttentionContext, *, is_selective: bool = False
    ) -> Tensor:
        """Add attention and MLP to the residual stream."""
        if is_selective:
            return self.add(x_NW, lambda normed_NW: _recomputed(self.attention, normed_NW, context))
        return self.add(x_NW, lambda normed_NW: self.attention(normed_NW, context))

    def add(self, x_NW: Tensor, attend: Attend) -> Tensor:
        """Add to the residual stream what `attend` makes of its norm, then the MLP."""
        x_NW = x_NW + attend(self.attention_norm(x_NW))
        mapped: Tensor = self.mlp(self.mlp_norm(x_NW))
        return x_NW + mapped


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head; the loss is part of it so that logits stay in chunks.

    Attributes:
        has_half_residual: Under autocast the residual stream has its dtype, and float32 otherwise.
    """

    def __init__(
        self, config: ModelConfig, backends: BranchBackends | None = None, *, seed: int = 0
    ) -> None:
        """Make the model on the current default device, the same weights for the same seed.

        Without `backends` it is plain PyTorch. No global random state is used or changed.
        """
        super().__init__()
        self.config = config
        self.geometry = BlockGeometry.from_config(config.nsa)
        self.backends = backends or BranchBackends.of(GatheredBackend(), "runs everywhere")
        self.activation_checkpointing: ActivationCheckpointing = "none"
        self.loss_kernel: LossKernel = "torch"
        self.has_half_residual = False
        with torch.random.fork_rng(devices=[]):  # torch fills modules when it makes them
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
            self.rotary = Rotary(config.rope, config.head_dim_k)
            self.blocks = nn.ModuleList(
                Block(config, self.backends) for _ in range(config.num_layers)
            )
            self.norm = RMSNorm(config.dim, config.norm_eps)
            self.head = (
                None
                if config.tie_embeddings
                else nn.Linear(config.dim, config.vocab_size, bias=False)
            )
        initialise(self, config, seed)

    @property
    def head_weight(self) -> Tensor:
        """[V, W]: the embedding if tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens_BT: Tensor, packing: Packing | None = None) -> Tensor:
        """Logits [B, T, V] in the compute dtype; use `loss` where the vocabulary is large."""
        hidden_NW = self.hidden(tokens_BT, packing)
        return nn.functional.linear(hidden_NW, self.head_weight).view(*tokens_BT.shape, -1)

    def hidden(self, tokens_BT: Tensor, packing: Packing | None = None) -> Tensor:
        """Hidden states [N, W] after the last norm.

        Without `packing`, the documents of the flattened batch, each row is one document.

        Raises:
            ValueError: If there is no token, an id is no int64 or int32, or the documents and the
                batch differ in their number of tokens.
        """
        check_tokens(tokens_BT)
        if packing is None:
            packing = Packing.uniform(tokens_BT.shape[0], tokens_BT.shape[1], tokens_BT.device)
        if packing.num_tokens != tokens_BT.numel():
            message = (
                f"the documents hold {packing.num_tokens} tokens and the batch has "
                f"{tokens_BT.numel()}"
            )
            raise ValueError(message)
        context = make_context(self.geometry, packing, self.rotary)
        mode = self.activation_checkpointing if torch.is_grad_enabled() else "none"

        def run(_index: int, block: Block, x_NW: Tensor) -> Tensor:
            if mode == "full":
                return _recomputed(block, x_NW, context)
            after_NW: Tensor = block(x_NW, context, is_selective=mode == "selective")
            return after_NW

        return self.through_blocks(tokens_BT.reshape(-1), run)

    def through_blocks(
        self, token_N: Tensor, run: Callable[[int, Block, Tensor], Tensor]
    ) -> Tensor:
        """Embed these ids, let `run` take the stream through every block, and norm: [N, W].

        `run` takes the layer from 0, its block and the residual stream [N, W], and returns that.
        """
        x_NW = self.embedding(token_N)
        if self.has_half_residual and torch.is_autocast_enabled(x_NW.device.type):
            x_NW = x_NW.to(torch.get_autocast_dtype(x_NW.device.type))
        for index, block in enumerate(self.block_list):
            x_NW = run(index, block, x_NW)
        hidden: Tensor = self.norm(x_NW)
        return hidden

    def loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, packing: Packing | None = None
    ) -> LossSum:
        """Summed cross-entropy and the number of targets; a target of -1 is ignored.

        Raises:
            ValueError: If targets and tokens differ in shape; else as `hidden` and `loss_sum`.
        """
        if targets_BT.shape != tokens_BT.shape:
            message = (
                f"targets of shape {list(targets_BT.shape)} do not fit tokens of shape "
                f"{list(tokens_BT.shape)}"
            )
            raise ValueError(message)
        hidden_NW = self.hidden(tokens_BT, packing)
        in_place = self.loss_kernel == "triton"
        return loss_sum(hidden_NW, self.head_weight, targets_BT.reshape(-1), in_place=in_place)

    @property
    def kernel_paths(self) -> dict[str, str]:
        """Which code computes each branch and the loss; a field of every heartbeat."""
        paths: dict[str, str] = {choice.branch: choice.name for choice in self.backends.choices}
        paths["loss"] = self.loss_kernel
        return paths

    def num_parameters(self) -> int:
        """Trained numbers; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def parameter_infos(self) -> list[ParameterInfo]:
        """Every parameter with its treatment by the optimizer, in a fixed order."""
        infos = []
        for name, parameter in self.named_parameters():
            is_table = name.startswith("embedding.") or name.endswith("position_LD")
            is_decayed = parameter.ndim >= 2 and not is_table
            is_inside = name.startswith("blocks.") and ".gate." not in name
            is_block_matrix = is_decayed and is_inside and parameter.ndim == 2
            infos.append(ParameterInfo(name, parameter, is_decayed, is_block_matrix))
        return infos

    @contextmanager
    def recording_statistics(self) -> Iterator[None]:
        """Let forward passes inside record gate and selection figures; free when not used."""
        for layer in self._nsa_layers():
            layer.is_recording = True
        try:
            yield
        finally:
            for layer in self._nsa_layers():
                layer.is_recording = False

    def gate_statistics(self) -> AttentionStatistics | None:
        """Figures of the last recorded forward pass; None if there was none or it is dense.

        Reading waits for the device.
        """
        figures = {
            index: layer.figures
            for index, layer in enumerate(self._nsa_layers())
            if layer.figures is not None
        }
        return read_statistics(figures) if figures else None

    @property
    def block_list(self) -> list[Block]:
        """The blocks, with their type."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def _nsa_layers(self) -> list[NSAAttention]:
        attentions = (block.attention for block in self.block_list)
        return [attention for attention in attentions if isinstance(attention, NSAAttention)]


def check_tokens(tokens_BT: Tensor) -> None:
    """Refuse what is no batch of ids.

    Raises:
        ValueError: If it is not [B, T] with B and T at least 1, or its dtype is not one of ids.
    """
    if tokens_BT.ndim != 2 or tokens_BT.dtype not in TOKEN_DTYPES:
        message = (
            f"tokens must be [batch, tokens] of int64 or int32, got {list(tokens_BT.shape)} "
            f"of {tokens_BT.dtype}"
        )
        raise ValueError(message)
    if 0 in tokens_BT.shape:
        message = f"there are no tokens in a batch of shape {list(tokens_BT.shape)}"
        raise ValueError(message)


def _recomputed(module: nn.Module, *inputs: object) -> Tensor:
    out: Tensor = checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out
