"""Small models with weights large enough that every part of a layer matters."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nsa_core.config.model import GateConfig, ModelConfig, NSAConfig
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.packing import Packing
from nsa_core.model.attention import NSAAttention, make_context
from nsa_core.model.transformer import LanguageModel
from tests.oracle import free_choices

#: Three of the five blocks are forced, so two are chosen freely from position 20 on.
SIZES = {
    "compress_block": 4,
    "compress_stride": 2,
    "select_block": 4,
    "num_selected": 5,
    "window": 5,
}


def free_tokens(config: ModelConfig, *lengths: int) -> int:
    """Tokens of documents of these lengths that choose freely; all of them in a dense model."""
    if config.attention == "dense":
        return sum(lengths)
    return free_choices(lengths, config.nsa.select_block, config.nsa.num_selected)


def small_config(**changes) -> ModelConfig:
    nsa = NSAConfig(**SIZES | changes.pop("nsa", {}))
    gate = GateConfig(**changes.pop("gate", {}))
    sizes = {
        "vocab_size": 31,
        "dim": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_groups": 2,
        "head_dim_k": 6,
        "head_dim_v": 5,
        "mlp_width": 24,
    }
    return ModelConfig(nsa=nsa, gate=gate, **sizes | changes)


def small_model(
    config: ModelConfig | None = None,
    *,
    backends: BranchBackends | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> LanguageModel:
    """A model whose random weights are far from their small start."""
    model = LanguageModel(config or small_config(), backends, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.3 if parameter.ndim < 3 else 0.1))
    return model.to(dtype)


def tokens(batch: int, length: int, seed: int = 0, vocab_size: int = 31) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, length), generator=generator)


def first_attention(model: LanguageModel) -> NSAAttention:
    attention = model.block_list[0].attention
    assert isinstance(attention, NSAAttention)
    return attention


def run_attention(model: LanguageModel, x_NW: Tensor, packing: Packing) -> Tensor:
    """The first layer's attention alone."""
    context = make_context(model.geometry, packing, model.rotary)
    return first_attention(model)(x_NW, context)


def gradient_leaks(
    model: LanguageModel, *, length: int, outputs: Sequence[int]
) -> list[tuple[int, int]]:
    """Outputs t of one document, each with the first later input for which d out / d x is not 0."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    handle = model.embedding.register_forward_hook(keep)
    row = tokens(1, length, vocab_size=model.config.vocab_size)
    hidden_NW = model.hidden(row.to(model.embedding.weight.device))
    handle.remove()
    leaks = []
    for token in outputs:
        (grad_NW,) = torch.autograd.grad(hidden_NW[token].sum(), kept[-1], retain_graph=True)
        later = torch.nonzero((grad_NW[token + 1 :] != 0).any(dim=-1)).flatten().tolist()
        leaks += [(token, token + 1 + later[0])] if later else []
    return leaks
