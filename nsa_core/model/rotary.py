"""Rotary position embedding, half-split pairs, one table of float32 angles for q and k.

Legend: R rows, D head width (even).
"""

import math

import torch
from torch import Tensor

from nsa_core.config.model import RopeConfig

#: Wavelengths that turn more often than this in the trained context are kept (arXiv 2309.00071).
YARN_FAST_TURNS = 32.0
#: Wavelengths that turn less often than this are divided by the scale, like linear scaling.
YARN_SLOW_TURNS = 1.0


def exact_frequencies(config: RopeConfig, width: int) -> Tensor:
    """Angle per position of each of the D / 2 pairs, float64."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    plain = config.base**-exponent
    if config.scaling == "linear":
        return plain / config.scale
    if config.scaling == "yarn":
        kept = _yarn_kept_share(plain, config.trained_context)
        return plain * (kept + (1 - kept) / config.scale)
    return plain


def frequencies(config: RopeConfig, width: int) -> Tensor:
    """The table of the model: `exact_frequencies` rounded to float32."""
    return exact_frequencies(config, width).float()


def amplitude(config: RopeConfig) -> float:
    """Factor on rotated q and k; YaRN sharpens the softmax by its square as the scale grows."""
    if config.scaling != "yarn" or config.scale <= 1:
        return 1.0
    return 0.1 * math.log(config.scale) + 1.0


def _yarn_kept_share(frequency: Tensor, trained_context: int) -> Tensor:
    turns = trained_context * frequency / (2 * math.pi)
    return ((turns - YARN_SLOW_TURNS) / (YARN_FAST_TURNS - YARN_SLOW_TURNS)).clamp(0, 1)


class Rotary(torch.nn.Module):
    """Turns the two halves of each head by the angle of its position."""

    frequency: Tensor

    def __init__(self, config: RopeConfig, width: int) -> None:
        """Make the table for heads of this width."""
        super().__init__()
        self.amplitude = amplitude(config)
        self.register_buffer("frequency", frequencies(config, width), persistent=False)

    def tables(self, position_R: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [R, 1, D / 2], float32, for these positions."""
        angle = position_R.float().unsqueeze(-1) * self.frequency.float()
        return (
            (angle.cos() * self.amplitude).unsqueeze(-2),
            (angle.sin() * self.amplitude).unsqueeze(-2),
        )


def rotate(x_RHD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the angles per head; computed in float32 (float64 for float64), returned as x.

    Both halves are computed as one tensor of pairs: a compiler would make a copy of the gradient
    of halves that are put together.
    """
    cos, sin = (table.unsqueeze(-2) for table in tables)
    wide = x_RHD.to(torch.promote_types(x_RHD.dtype, torch.float32))
    half = wide.shape[-1] // 2
    pairs = wide.reshape(*wide.shape[:-1], 2, half)  # first half, second half
    sign = 2 * torch.arange(2, device=x_RHD.device, dtype=sin.dtype).unsqueeze(-1) - 1
    turned = pairs * cos + pairs.flip(-2) * (sin * sign)
    return turned.flatten(-2).to(x_RHD.dtype)
