"""The weights of a model: their first values, and by name to and from a checkpoint."""

import math

import torch
from torch import Tensor, nn

from nsa_core.config.model import ModelConfig
from nsa_core.model.compression import LinearCompression, MLPCompression
from nsa_core.model.layers import RMSNorm

WEIGHT_STD = 0.02


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter from one generator, in the order of the modules.

    Matrices are normal with std 0.02; those that write into the residual stream are divided by
    sqrt(2 * layers), as in GPT-2. Biases are 0 and norms 1.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = WEIGHT_STD / math.sqrt(2 * config.num_layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            writes_residual = name.endswith((".attention.out", ".mlp.down"))
            std = residual_std if writes_residual else WEIGHT_STD
            module.weight.normal_(0.0, std, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, WEIGHT_STD, generator=generator)
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
    for module in model.modules():
        if isinstance(module, LinearCompression | MLPCompression):
            module.reset(WEIGHT_STD, generator)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and persistent buffers by name, each shared tensor once."""
    unique: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        unique.setdefault(id(tensor), name)
    return {name: state[name].detach() for name in unique.values()}


def load_model_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy weights into a model in place.

    Raises:
        ValueError: If names or shapes differ; the first difference is named.
    """
    copy_tensors(model_tensors(model), tensors)


def copy_tensors(own: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Copy weights into those of a model, or of a part of it, in place.

    Raises:
        ValueError: If names or shapes differ; the first difference is named.
    """
    if own.keys() != tensors.keys():
        name = min(own.keys() ^ tensors.keys())
        side = "the model has" if name in own else "the checkpoint has"
        message = f"tensor `{name}` is on one side only: {side} it"
        raise ValueError(message)
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            message = (
                f"tensor `{name}` has shape {list(tensors[name].shape)} in the checkpoint "
                f"and {list(tensor.shape)} in the model"
            )
            raise ValueError(message)
        if tensor.is_floating_point() != tensors[name].is_floating_point():
            message = f"tensor `{name}` is {tensors[name].dtype} in the checkpoint"
            raise ValueError(message)
        tensor.copy_(tensors[name])
