"""Run a whole model on the Triton kernels under the interpreter; what was found as JSON."""

import dataclasses
import json
import sys

import torch

from nsa_core.checks.causality import perturbation_probe
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from nsa_core.kernels.triton.triton_backend import TritonBackend
from nsa_core.model.transformer import LanguageModel
from tests.core.model.cases import free_tokens, gradient_leaks, small_config, small_model, tokens

SIZES = {
    "compress_block": 8,
    "compress_stride": 4,
    "select_block": 16,
    "num_selected": 4,
    "window": 20,
}
#: No multiple of 4, 8, 16 or 20: six blocks, and 29 tokens that choose one of two or three. Its
#: first 20 tokens, and the documents of its packed half, are below the window.
LENGTHS = (93,)
DOCUMENTS = [19, 1, 73]


def model_on(backend) -> LanguageModel:
    """One layer of six heads in two groups, keys and values of different width."""
    config = small_config(
        num_layers=1, num_heads=6, head_dim_k=16, head_dim_v=32, nsa=SIZES, dim=16
    )
    return small_model(config, backends=BranchBackends.of(backend), dtype=torch.float32)


def gradients(backend) -> dict[str, torch.Tensor]:
    """Gradient of every parameter by the loss of packed documents, by name."""
    model, row = model_on(backend), tokens(1, sum(DOCUMENTS))
    model.loss(row, row.roll(-1, dims=1), Packing.from_lengths(DOCUMENTS)).sum.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradient_errors() -> dict[str, float]:
    """Relative L2 distance of every gradient from the reference's; infinite for zero and None."""
    found, expected = gradients(TritonBackend()), gradients(ReferenceBackend())
    return {
        name: float((found[name] - truth).norm() / truth.norm())
        if found[name] is not None and found[name].abs().max() > 0
        else float("inf")
        for name, truth in expected.items()
    }


def statistics(backend) -> dict[str, float]:
    """What a step records of its gates and of its choice."""
    model, row = model_on(backend), tokens(1, sum(DOCUMENTS))
    with torch.no_grad(), model.recording_statistics():
        model.loss(row, row.roll(-1, dims=1), Packing.from_lengths(DOCUMENTS))
    found = dataclasses.asdict(model.gate_statistics().worst)
    return found | dict(zip(("cmp", "slc", "win"), found.pop("branch_shares"), strict=True))


def later_nan(backend) -> dict[str, int]:
    """Bits that a NaN in the keys and values of later tokens moved, and tokens that show it."""
    config = model_on(backend).config.model_copy(update={"tie_embeddings": False})
    outs, first = [], 41
    row = tokens(1, 50) % 30
    row[:, first:] = 30
    for value in (0.5, float("nan")):
        model = small_model(config, backends=BranchBackends.of(backend), dtype=torch.float32)
        with torch.no_grad():
            model.embedding.weight[30] = value
            outs.append(model.hidden(row))
    moved = int((outs[0][:first] != outs[1][:first]).sum())
    return {"moved": moved, "shown": int(outs[1][first:].isnan().all(dim=-1).sum())}


def main() -> None:
    """All findings of one process."""
    model = model_on(TritonBackend())
    change = perturbation_probe(model, vocab_size=31, lengths=LENGTHS)
    found = {
        "num_cases": change.num_cases,
        "moved": [f"{leak.change} at {leak.token}" for leak in change.leaks],
        "reached": gradient_leaks(model, length=41, outputs=(0, 20, 39)),
        "gradient_errors": gradient_errors(),
        "free_tokens": [free_tokens(model.config, n) for n in LENGTHS],
        "later_nan": [later_nan(TritonBackend(dense_until=limit)) for limit in (0, 1 << 30)],
        "statistics": [statistics(TritonBackend()), statistics(ReferenceBackend())],
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
