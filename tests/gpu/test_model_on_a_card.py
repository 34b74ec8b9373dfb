"""The model on a real card: precision, causality, no waiting, memory, compilation."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from nsa_core.checks.causality import SentinelSettings, perturbation_probe, sentinel_probe
from nsa_core.config.model import GateConfig, ModelConfig, NSAConfig
from nsa_core.data.batch import BatchShape, make_batch
from nsa_core.evaluate.device import move
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from nsa_core.kernels.triton.triton_backend import TritonBackend
from nsa_core.model.statistics import AttentionStatistics
from nsa_core.model.transformer import LanguageModel
from tests.core.kernels.cases import Inputs, make_inputs, run
from tests.oracle import free_choices

pytestmark = pytest.mark.gpu

SIZES = BlockGeometry(32, 16, 64, 4, 100)
SMALL = ModelConfig(
    vocab_size=64,
    dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_groups=2,
    head_dim_k=16,
    head_dim_v=16,
    mlp_width=128,
    nsa=NSAConfig(num_selected=4, window=48),
)


def inputs_on_card(packing: Packing, dtype: torch.dtype) -> tuple[Inputs, Inputs]:
    """The same numbers in float64 and in the dtype under test."""
    made = make_inputs(Packing.from_lengths(packing.length_N.unique_consecutive().tolist()), SIZES)
    rounded = [tensor.detach().to("cuda", dtype) for tensor in made.all()]
    low = Inputs(*(tensor.clone().requires_grad_() for tensor in rounded))
    exact = Inputs(*(tensor.double().requires_grad_() for tensor in rounded))
    return low, exact


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)]
)
def test_every_branch_and_gradient_is_within_its_bar(dtype, limit):
    packing = Packing.from_lengths([5, 300, 31, 515], "cuda")
    low, exact = inputs_on_card(packing, dtype)
    truth = run(ReferenceBackend(), exact, SIZES, packing)
    found = run(GatheredBackend(), low, SIZES, packing, truth.ids)
    for out, expected in zip(found.branches(), truth.branches(), strict=True):
        assert (out - expected).norm() <= limit * expected.norm()
    grads, expected_grads = gradients_on_card(found, low), gradients_on_card(truth, exact)
    for grad, expected in zip(grads, expected_grads, strict=True):
        assert (grad - expected).norm() <= limit * expected.norm()


def gradients_on_card(outputs, inputs):
    """Gradients of the sum of all outputs weighted by a fixed pattern."""
    total = sum(
        (out.double() * torch.arange(out.numel(), device="cuda").view(out.shape).sin()).sum()
        for out in outputs.branches()
    )
    return torch.autograd.grad(total, inputs.all())


def test_ids_are_exact_in_float64():
    packing = Packing.from_lengths([5, 300, 31, 515], "cuda")
    _, exact = inputs_on_card(packing, torch.float32)
    ids = [run(b, exact, SIZES, packing).ids for b in (ReferenceBackend(), GatheredBackend())]
    assert torch.equal(*ids)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_the_future_changes_no_bit_of_the_past(dtype, attention):
    model = LanguageModel(SMALL.model_copy(update={"attention": attention})).cuda()
    with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
        result = perturbation_probe(
            model, vocab_size=64, lengths=(31, 47, 48, 49, 333, 701), device="cuda"
        )
    assert result.leaks == ()


def test_random_tokens_cannot_be_predicted_at_full_size():
    model = LanguageModel(SMALL).cuda()
    settings = SentinelSettings()
    result = sentinel_probe(list(model.parameters()), model.loss, settings, "cuda")
    assert settings.batch * settings.seq_len >= 4096
    assert result.is_causal


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_step_never_waits_for_the_card(attention, is_packed):
    model = LanguageModel(SMALL.model_copy(update={"attention": attention})).cuda()
    row = torch.randint(64, (2, 400), device="cuda")
    ids = (torch.arange(400, device="cuda") // 370).expand(2, -1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packing = Packing.from_document_ids(ids) if is_packed else None
        with torch.autocast("cuda", torch.bfloat16), model.recording_statistics():
            result = model.loss(row, row, packing)
        (result.sum / result.count).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.sum.isfinite().item()


GATES = [
    GateConfig(kind=kind, per=per)
    for kind, per in (
        ("linear", "head"),
        ("softmax", "head"),
        ("softmax", "group"),
        ("mlp", "group"),
    )
]


@dataclass(frozen=True)
class Trained:
    """Loss, gradients and statistics of one step."""

    loss: float
    grads: dict[str, torch.Tensor]
    statistics: AttentionStatistics | None


def one_step(
    config: ModelConfig, backends: BranchBackends, how: str = "eager", recomputed: str = "none"
) -> Trained:
    """Loss and gradients of one step on packed rows under bf16."""
    model = LanguageModel(config, backends, seed=1).cuda()
    model.activation_checkpointing = recomputed
    loss = model.loss
    if how == "blocks":
        for block in model.blocks:
            block.compile(fullgraph=True)
    if how == "whole":
        loss = torch.compile(model.loss)
    generator = torch.Generator("cuda").manual_seed(0)
    row = torch.randint(64, (2, 800), device="cuda", generator=generator)
    ids = (torch.arange(800, device="cuda") // 390).expand(2, -1)
    assert free_choices([390, 390, 20] * 2, 64, SMALL.nsa.num_selected) == 536
    packing = Packing.from_document_ids(ids, max_documents=6)
    with torch.autocast("cuda", torch.bfloat16), model.recording_statistics():
        result = loss(row, row, packing)
    (result.sum / result.count).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None or not grad.norm() > 0] == []
    return Trained(float(result.sum.detach()), grads, model.gate_statistics())


def distance(a: Trained, b: Trained) -> float:
    """Relative L2 distance of all gradients together."""
    gap = sum((a.grads[name] - b.grads[name]).square().sum() for name in a.grads)
    return float((gap / sum(grad.square().sum() for grad in b.grads.values())).sqrt())


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate.kind}-{gate.per}")
def test_the_fused_operator_trains_as_the_single_branches_do(gate):
    config = SMALL.model_copy(update={"gate": gate})
    triton = TritonBackend()
    fused = BranchBackends.of(triton)
    single = BranchBackends(triton, triton, TritonBackend())
    assert fused.fused is triton
    assert single.fused is None
    ours, theirs = one_step(config, fused), one_step(config, single)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)
    assert distance(ours, theirs) < 1e-2
    assert ours.statistics.worst.entropy_mean == pytest.approx(
        theirs.statistics.worst.entropy_mean, rel=1e-2
    )
    assert ours.statistics.worst.selected_blocks == theirs.statistics.worst.selected_blocks


@pytest.mark.parametrize("recomputed", ["selective", "full"])
def test_a_model_that_recomputes_has_the_gradients_of_one_that_keeps(recomputed):
    backends = BranchBackends.of(TritonBackend())
    ours = one_step(SMALL, backends, recomputed=recomputed)
    theirs = one_step(SMALL, backends)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert distance(ours, theirs) < 1e-2  # atomics add in any order


@pytest.mark.filterwarnings("ignore")  # of the compiler itself, which are not ours to mend
@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_a_compiled_model_has_the_gradients_of_the_eager_one(how):
    torch.compiler.reset()
    backends = BranchBackends.of(TritonBackend())
    compiled, eager = one_step(SMALL, backends, how), one_step(SMALL, backends)
    assert compiled.loss == pytest.approx(eager.loss, rel=1e-3)
    # Inductor keeps fp32 where eager rounds to bf16 between operators. Measured on an H100: 0.011
    # for the worst parameter.
    assert distance(compiled, eager) < 2e-2


def peak_bytes(length: int) -> int:
    geometry, packing = BlockGeometry.from_config(NSAConfig()), Packing.uniform(1, length, "cuda")
    inputs = make_inputs(
        Packing.uniform(1, length), geometry, dtype=torch.float32, heads=4, groups=1
    )
    moved = Inputs(*(x.detach().cuda().bfloat16().requires_grad_() for x in inputs.all()))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients_on_card(run(GatheredBackend(), moved, geometry, packing), moved)
    return torch.cuda.max_memory_allocated() - before


def test_memory_from_8k_to_64k_grows_at_most_linearly():
    short, long = peak_bytes(8192), peak_bytes(65_536)
    assert long <= 1.2 * 8 * short


def test_a_pinned_batch_reaches_the_card_as_it_was():
    batch = make_batch([np.arange(9), np.arange(3)], BatchShape(8, True, 2, np.ones(16, np.int32)))
    pinned = batch.pinned()
    tensors = (pinned.tokens_BT, pinned.targets_BT, pinned.cu_seqlens)
    assert all(tensor.is_pinned() for tensor in tensors)
    moved = move(pinned, torch.device("cuda"))
    assert torch.equal(moved[0].cpu(), batch.tokens_BT)
    assert torch.equal(moved[1].cpu(), batch.targets_BT)
