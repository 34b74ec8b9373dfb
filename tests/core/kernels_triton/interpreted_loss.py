"""Run the cross-entropy kernel under the interpreter and print what it got wrong as JSON."""

import json
import sys

import torch
from torch.nn import functional as F

from nsa_core.kernels.triton.cross_entropy import cross_entropy_
from nsa_core.model.loss import loss_sum

#: One tile that is full, a ragged one, several tiles with a ragged end.
VOCABULARIES = (64, 50, 9000)


def kernel_errors(vocabulary: int) -> dict[str, float]:
    """Largest differences from `cross_entropy` in float64; the last row's target is ignored."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 30 * torch.randn(4, vocabulary, generator=generator)
    logits[1] = -3e4  # far below zero, where a careless maximum gives NaN
    target = torch.tensor([0, vocabulary - 1, vocabulary // 2, -1])
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, ignore_index=-1, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    kept = logits.clone()
    loss_alone = cross_entropy_(kept, target, with_gradient=False)
    loss = cross_entropy_(logits, target, with_gradient=True)
    return {
        "loss": float(((loss - expected) / expected.clamp_min(1)).abs().max()),
        "loss_alone": float((loss_alone - loss).abs().max()),
        "gradient": float((logits - gradient).abs().max()),
        "overwritten": float((kept.double() - exact).abs().max()),
    }


def half_errors() -> dict[str, float]:
    """Differences on bfloat16 logits far from zero, where a product in bfloat16 is off by 0.3."""
    generator = torch.Generator().manual_seed(0)
    logits = (60 + 2 * torch.randn(3, 90, generator=generator)).bfloat16()
    target = torch.tensor([0, 89, 40])
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    loss = cross_entropy_(logits, target, with_gradient=True)
    rounding = torch.finfo(torch.bfloat16).eps * gradient.abs()  # the interpreter cuts bits off
    return {
        "loss": float((loss - expected.detach()).abs().max()),
        "gradient_over_rounding": float(((logits - gradient).abs() - rounding).clamp_min(0).max()),
    }


def whole_loss_errors() -> dict[str, float]:
    """The chunked loss with the kernel against the one without it, gradients included."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=generator), torch.randn(20, 8, generator=generator)
    target = torch.tensor([0, 19, 3, -1, 7, 7, -1, 2, 5])
    found = []
    for in_place in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        total = loss_sum(*leaves, target, in_place=in_place).sum
        found.append([total, *torch.autograd.grad(3 * total, leaves)])
    names = ("sum", "grad_hidden", "grad_weight")
    return {
        name: float((mine - theirs).detach().abs().max())
        for name, mine, theirs in zip(names, *found, strict=True)
    }


if __name__ == "__main__":
    results = {f"kernel-{size}": kernel_errors(size) for size in VOCABULARIES}
    results |= {"bfloat16": half_errors(), "whole": whole_loss_errors()}
    sys.stdout.write(json.dumps(results))
