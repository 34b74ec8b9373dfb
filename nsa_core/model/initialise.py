"""Initial weights, the same for the same seed on every machine."""

import math

import torch
from torch import nn

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
