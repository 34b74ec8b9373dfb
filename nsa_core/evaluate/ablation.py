"""Take parts of a trained model away for an evaluation and put them back afterwards.

Legend: N tokens, H heads, G groups, S = num_selected.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from nsa_core.config.backend_policy import Branch
from nsa_core.kernels.backend import BRANCHES, AttentionBackend
from nsa_core.kernels.geometry import BlockGeometry, is_forced
from nsa_core.kernels.packing import Packing
from nsa_core.model.attention import NSAAttention
from nsa_core.model.transformer import LanguageModel

_NO_BLOCK = 2**31 - 1  # sorts behind every block


def nsa_layers(model: LanguageModel) -> list[NSAAttention]:
    """The layers with three branches; none in a dense model."""
    attentions = (block.attention for block in model.block_list)
    return [attention for attention in attentions if isinstance(attention, NSAAttention)]


@contextmanager
def cut_branches(model: LanguageModel, *branches: Branch) -> Iterator[None]:
    """Inside, the gates of these branches are exactly 0 in every layer, in decode as well.

    Raises:
        ValueError: If the model has no branches to cut: a control that does nothing misleads.
    """
    layers = nsa_layers(model)
    if not layers or not branches:
        message = f"nothing to cut: {len(layers)} NSA layers, branches {list(branches)}"
        raise ValueError(message)
    columns = [BRANCHES.index(branch) for branch in branches]

    def close(_gate: nn.Module, _inputs: object, gate_NH3: Tensor) -> Tensor:
        return gate_NH3.index_fill(-1, torch.tensor(columns, device=gate_NH3.device), 0.0)

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.gate.register_forward_hook(close))
        yield


@contextmanager
def only_forced_blocks(model: LanguageModel) -> Iterator[None]:
    """Inside, the selected branch reads the blocks that are always selected and no others.

    It works, but it cannot choose: what a model loses by this, the choice of blocks has carried.
    Decode keeps its own choice.
    """
    layers = nsa_layers(model)
    kept = [layer.backends for layer in layers]
    for layer in layers:
        chooser = _ForcedChoice(layer.backends.compressed)
        layer.backends = replace(layer.backends, compressed=chooser)
    try:
        yield
    finally:
        for layer, backends in zip(layers, kept, strict=True):
            layer.backends = backends


class _ForcedChoice:
    """The inner backend, but it chooses block 0, the current block and the one before it."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.inner, self.name = inner, inner.name
        self.compressed, self.selected, self.sliding = (
            inner.compressed,
            inner.selected,
            inner.sliding,
        )

    def select(
        self,
        q_NHD: Tensor,
        k_CGD: Tensor,
        lse_NH: Tensor,
        geometry: BlockGeometry,
        packing: Packing,
    ) -> Tensor:
        """The forced ones among the inner backend's blocks, ascending, -1 behind them."""
        ids_NGS = self.inner.select(q_NHD, k_CGD, lse_NH, geometry, packing)
        current_N11 = (packing.position_N // geometry.select_block)[:, None, None]
        is_kept_NGS = (ids_NGS >= 0) & is_forced(ids_NGS, current_N11)
        kept_NGS = torch.where(is_kept_NGS, ids_NGS, _NO_BLOCK).sort(dim=-1).values
        return torch.where(kept_NGS < _NO_BLOCK, kept_NGS, -1)
