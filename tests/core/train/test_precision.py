"""In half precision only the products are half: weights, gradients, moments and losses are not."""

import pytest
import torch

from nsa_core.config.training import OptimizerConfig
from nsa_core.evaluate.device import autocast
from nsa_core.rundir.manifest import read_manifest
from nsa_core.train.failure import TrainerConfigurationError
from nsa_core.train.learner import choose_device, make_learner
from nsa_core.train.loop import train
from nsa_core.train.optimizer import OptimizerSet
from tests.core.train.float64_loop import Float64Loop
from tests.core.train.models import CPU, make_batches, make_model, no_poll
from tests.core.train.sessions import new_run, opened, run_here, saved
from tests.integration.trainer_runs import rows

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def watch_activations(model):
    """The dtypes of what the attention and the MLP of each block give."""
    seen = set()
    for block in model.block_list:
        for module in (block.attention, block.mlp):
            module.register_forward_hook(lambda module, inputs, out: seen.add(out.dtype))
    return seen


def half_run(tmp_path, text, precision="bf16", **changes):
    return new_run(tmp_path, text, precision, runtime={"precision": precision}, **changes)


def watch_updates(session):
    """The dtype of every gradient at each update of the weights."""
    seen, update = [], session.steps.optimizers.step

    def step(*inputs):
        seen.append({p.grad.dtype for p in session.steps.optimizers.parameters})
        update(*inputs)

    session.steps.optimizers.step = step
    return seen


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_weights_gradients_and_moments_are_float32_and_activations_are_not(
    tmp_path, text, precision, kind
):
    changes = {"schedule": {"steps": 1, "warmup_steps": 0}, "optimizer": {"kind": kind}}
    run = half_run(tmp_path, text, precision, **changes)
    with opened(run) as session:
        gradients, activations = watch_updates(session), watch_activations(session.model)
        begun = [p.dtype for p in session.model.parameters()]
        train(session)
        ended = [p.dtype for p in session.model.parameters()]
        moments = {t.dtype for t in session.steps.optimizers.state_tensors().values()}
        assert session.steps.scaler is None
    assert {*begun, *ended} | moments == {torch.float32}
    assert gradients == [{torch.float32}]
    for tensors in saved(run, 1):
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert activations == {DTYPES[precision]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_are_half_are_refused(dtype):
    infos = make_model().to(dtype).parameter_infos()
    with pytest.raises(ValueError, match=rf"`embedding\.weight` is {dtype}.*float32"):
        OptimizerSet(infos, OptimizerConfig(), CPU)


def test_a_bf16_run_has_the_loss_and_the_norm_of_float64_up_to_its_rounding(tmp_path, text, texts):
    run = half_run(tmp_path, text)
    assert run_here(run).code == 0
    loop = Float64Loop(read_manifest(run).config, texts)
    for row, number in zip(rows(run.training_csv), range(1, 6), strict=True):
        expected = loop.step()
        assert float(row["loss"]) == pytest.approx(expected.loss, rel=1e-3)
        assert float(row["grad_norm"]) == pytest.approx(expected.norm, rel=0.02)
        # A loss may round to that of float32; a norm is 4e-4 off in bf16, 4e-7 in float32.
        assert float(row["grad_norm"]) != pytest.approx(expected.norm, rel=1e-5)
        loop.go_on_from(saved(run, number)[0])


def test_the_sum_over_micro_batches_is_kept_in_float32(tmp_path, text):
    """A sum in bf16 has eight bits: of losses between 256 and 512 it loses up to 1."""
    run = half_run(tmp_path, text, schedule={"steps": 1, "warmup_steps": 0})
    sums = []
    with opened(run) as session:
        loss = session.steps.loss

        def noted(*inputs):
            found = loss(*inputs)
            sums.append((found.sum.dtype, found.sum.item(), found.count.item()))
            return found

        session.steps.loss = noted
        train(session)
    assert {dtype for dtype, _, _ in sums} == {torch.float32}
    mean = sum(total for _, total, _ in sums) / sum(count for _, _, count in sums)
    assert float(rows(run.training_csv)[0]["loss"]) == pytest.approx(mean, rel=1e-6)


def fp16_learner(tmp_path, text, **optimizer):
    run = half_run(tmp_path, text, "fp16", optimizer=optimizer)
    return make_learner(read_manifest(run).config, CPU)


def test_fp16_scales_the_loss_and_clips_what_is_unscaled(tmp_path, text):
    learner = fp16_learner(tmp_path, text, clip_norm=0.01)
    batches = make_batches(2, length=48)
    scaler = learner.steps.scaler
    assert scaler is not None
    assert scaler.get_scale() == 2.0**16
    found = []
    update = learner.steps.optimizers.step

    def step(*inputs):
        grads = [p.grad for p in learner.steps.optimizers.parameters]
        found.append(torch.nn.utils.get_total_norm(grads).item())
        update(*inputs)

    learner.steps.optimizers.step = step
    activations = watch_activations(learner.model)
    result = learner.steps.run(batches, no_poll)
    assert result.fault is None
    assert activations == {torch.float16}
    assert found == [pytest.approx(0.01, rel=1e-4)]
    plain = make_learner(read_manifest(half_run(tmp_path, text, "fp32")).config, CPU).steps.run(
        batches, no_poll
    )
    assert result.grad_norm == pytest.approx(plain.grad_norm, rel=0.02)
    assert result.loss == pytest.approx(plain.loss, rel=1e-3)
    assert {p.dtype for p in learner.model.parameters()} == {torch.float32}


def test_fp16_needs_a_card(tmp_path, text):
    config = read_manifest(half_run(tmp_path, text, "fp16")).config
    with pytest.raises(TrainerConfigurationError, match="fp16 needs a CUDA card"):
        choose_device(config)


@pytest.mark.parametrize("precision", DTYPES)
def test_autocast_is_on_for_half_precisions_alone(precision):
    with autocast(CPU, precision):
        assert torch.is_autocast_enabled("cpu") == (precision != "fp32")
        if precision != "fp32":
            assert torch.get_autocast_dtype("cpu") == DTYPES[precision]
