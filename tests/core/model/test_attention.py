"""The NSA layer against a token-by-token reference, and what documents and positions change."""

from functools import cache

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from nsa_core.model.rotary import rotate
from tests.core.model.cases import (
    first_attention,
    free_tokens,
    run_attention,
    small_config,
    small_model,
    tokens,
)
from tests.core.model.layer_reference import nsa_layer


class FusedBackend(GatheredBackend):
    """Everything in one call, as the Triton backend offers it; float64 and CPU like its parent."""

    def attend(
        self,
        q_NHD: torch.Tensor,
        compressed,
        selected,
        sliding,
        gate_NH3: torch.Tensor,
        geometry,
        packing,
    ):
        out_cmp, lse_NH = self.compressed(q_NHD, *compressed, geometry, packing)
        ids_NGS = self.select(q_NHD, compressed[0], lse_NH, geometry, packing)
        out_slc = self.selected(q_NHD, *selected, ids_NGS, geometry, packing)
        out_win = self.sliding(q_NHD, *sliding, geometry, packing)
        outs = torch.stack((out_cmp, out_slc, out_win), dim=2)
        return (gate_NH3.unsqueeze(-1) * outs).sum(dim=2).to(q_NHD.dtype), ids_NGS


BACKENDS = {"reference": ReferenceBackend(), "sdpa": GatheredBackend(), "fused": FusedBackend()}
LAYERS = {
    "avg": small_config(nsa={"phi": "avg"}),
    "linear, mlp gate": small_config(nsa={"phi": "linear"}, gate={"kind": "mlp"}),
    "mlp, softmax gate": small_config(gate={"kind": "softmax", "temperature": 2.0}),
    "mlp, group gate": small_config(gate={"per": "group"}),
}


def inputs(rows, width: int = 16, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


LAYER_LENGTH = 43


def outputs_and_gradients(layer_of, layer):
    """Output of a layer, and the gradients of a projection of it by x and every weight."""
    weights, x = dict(layer.named_parameters()), inputs(LAYER_LENGTH).requires_grad_()
    out = layer_of(weights, x)
    direction = inputs(LAYER_LENGTH, seed=4)
    grads = torch.autograd.grad((out * direction).sum(), [x, *weights.values()])
    return out.detach(), dict(zip(["x", *weights], grads, strict=True))


@cache
def expected_layer(name):
    """By the token-by-token layer."""
    config = LAYERS[name]
    return outputs_and_gradients(
        lambda weights, x: nsa_layer(config, weights, x), first_attention(small_model(config))
    )


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("name", LAYERS)
def test_output_and_every_gradient_equal_the_token_by_token_layer(name: str, backend) -> None:
    assert free_tokens(LAYERS[name], LAYER_LENGTH) >= 20
    model = small_model(LAYERS[name], backends=BranchBackends.of(backend))
    packing = Packing.uniform(1, LAYER_LENGTH)
    found, grads = outputs_and_gradients(
        lambda _, x: run_attention(model, x, packing), first_attention(model)
    )
    expected, truths = expected_layer(name)
    # Angles are float32 in the model and float64 in the reference: 43 positions cost about 2e-6.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for weight, truth in truths.items():
        assert truth.abs().max() > 0, weight
        torch.testing.assert_close(
            grads[weight], truth, rtol=0, atol=1e-5, msg=lambda m, n=weight: n + m
        )


@pytest.mark.parametrize("phi", ["avg", "linear", "mlp"])
def test_float32_forward_is_within_1e_5(phi: str) -> None:
    config = small_config(nsa={"phi": phi})
    exact = run_attention(small_model(config), inputs(41), Packing.uniform(1, 41))
    model = small_model(config, dtype=torch.float32)
    found = run_attention(model, inputs(41).float(), Packing.uniform(1, 41))
    assert (found - exact).abs().max() <= 1e-5 * max(1.0, exact.abs().max())


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("phi", ["linear", "mlp"])
def test_gradcheck_of_the_whole_layer(phi: str, backend) -> None:
    config = small_config(
        dim=4, num_heads=2, num_kv_groups=1, head_dim_k=2, head_dim_v=2, nsa={"phi": phi}
    )
    model = small_model(config, backends=BranchBackends.of(backend))
    layer, packing = first_attention(model), Packing.from_lengths([9, 3])
    leaves = [inputs(12, width=4).requires_grad_(), *layer.parameters()]
    assert torch.autograd.gradcheck(
        lambda x, *_: run_attention(model, x, packing), leaves, fast_mode=True
    )


@pytest.mark.parametrize("phi", ["avg", "linear", "mlp"])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("lengths", [[7], [23], [7, 8]], ids=str)
def test_every_parameter_has_a_finite_gradient_that_is_not_zero(
    phi: str, backend, lengths: list[int]
) -> None:
    # At 6 tokens two compressed blocks of 4 with stride 2 are visible: the least that is promised.
    model = small_model(small_config(nsa={"phi": phi}), backends=BranchBackends.of(backend))
    row = tokens(1, sum(lengths))
    model.loss(row, row, Packing.from_lengths(lengths)).sum.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_packed_documents_equal_separate_ones(attention: str) -> None:
    model = small_model(small_config(attention=attention))
    lengths = [3, 47, 1, 32]
    assert free_tokens(model.config, *lengths) >= 30
    row = tokens(1, sum(lengths))
    packed = model(row, Packing.from_lengths(lengths))[0]
    alone = torch.cat([model(part)[0] for part in row.split(lengths, dim=1)])
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_padded_batch_equals_the_packed_documents(attention: str) -> None:
    model = small_model(small_config(attention=attention))
    lengths = [9, 52, 35]
    assert free_tokens(model.config, *lengths) >= 40
    padded, row = tokens(3, 52, seed=5), []
    for index, length in enumerate(lengths):
        row.append(padded[index, :length])
    packed = model(torch.cat(row)[None], Packing.from_lengths(lengths))[0]
    batched = model(padded)
    expected = torch.cat([batched[index, :length] for index, length in enumerate(lengths)])
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-10)


def test_scores_depend_on_relative_position_only() -> None:
    model = small_model()
    packing = Packing.uniform(1, 50)
    assert free_tokens(model.config, 50) >= 30
    x = inputs(50)
    found = run_attention(model, x, packing)
    tables = model.rotary.tables
    for shift in (1, 1000):
        model.rotary.tables = lambda position, c=shift: tables(position + c)
        shifted = run_attention(model, x, packing)
        # float32 angles of about 1000 radians are exact to about 3e-5.
        torch.testing.assert_close(shifted, found, rtol=0, atol=1e-6 * shift + 1e-6)


def test_the_fused_operator_is_used_where_one_backend_has_it_for_every_branch() -> None:
    fused, plain = FusedBackend(), GatheredBackend()
    assert BranchBackends.of(fused).fused is fused
    assert BranchBackends(fused, fused, FusedBackend()).fused is None
    assert BranchBackends.of(plain).fused is None


def test_statistics_are_those_of_the_single_branches() -> None:
    figures = []
    for backend in (FusedBackend(), GatheredBackend()):
        model = small_model(small_config(), backends=BranchBackends.of(backend))
        with model.recording_statistics():
            run_attention(model, inputs(41), Packing.uniform(1, 41))
        figures.append(first_attention(model).figures)
    torch.testing.assert_close(*figures, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("phi", ["linear", "mlp"])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_without_a_compressed_block_the_gradients_of_phi_are_zeros(
    phi: str, backend, length: int
) -> None:
    # Below d = 2 there is no slot for a block, below l = 4 there is one without a block.
    model = small_model(small_config(nsa={"phi": phi}), backends=BranchBackends.of(backend))
    row = tokens(1, length)
    model.loss(row, row).sum.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert ".phi_" not in name or not parameter.grad.any(), name


def operators_of_gradient(function, x: torch.Tensor) -> list[str]:
    """Names of the operators that compute `function` of x and its gradient by x."""

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(sum(part.square().sum() for part in function(x)), x)[0]

    return [
        node.target.__name__
        for node in make_fx(gradient)(x).graph.nodes
        if node.op == "call_function"
    ]


def test_a_compiler_finds_the_gradient_of_the_projections_put_together_once() -> None:
    """A cut within a cut, or padding that is sliced off, costs a copy of the whole gradient."""
    layer = first_attention(small_model())

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        projected = layer.project(x)
        return [projected.q_NHD, *vars(projected.pairs).values(), projected.gate_NY]

    names = operators_of_gradient(parts, inputs(8))
    assert sum(name.startswith("cat") for name in names) == 2  # the weights, and the gradient
    assert not [name for name in names if "slice" in name or "pad" in name]


def test_a_rotation_puts_no_halves_together() -> None:
    tables = small_model().rotary.tables(torch.arange(8))
    names = operators_of_gradient(lambda x: [rotate(x.unsqueeze(1), tables)], inputs(8, width=6))
    assert not [name for name in names if name.startswith(("cat", "slice", "stack"))]
