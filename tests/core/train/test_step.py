import math
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nsa_core.data.batch import IGNORED
from nsa_core.env import RankEnvironment
from nsa_core.model.loss import LossSum
from nsa_core.train.checkpoint_files import TrainingState
from nsa_core.train.group import RankGroup
from nsa_core.train.step import find_breach, find_fault, recent
from tests.core.train.models import make_batches, make_model, make_steps, no_poll, same, weights


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0])
def test_a_loss_or_gradient_that_is_not_finite_or_exactly_zero_is_a_fault(bad):
    assert "loss" in find_fault(bad, 1.0, 8)
    assert "gradient norm" in find_fault(2.0, bad, 8)


def test_a_batch_without_targets_has_no_loss():
    assert "missing" in find_fault(0.0, 0.0, 0)


def test_a_usable_step_has_no_fault():
    assert find_fault(2.0, 0.3, 8) is None


def breach(unusable, step):
    return find_breach(unusable, step, in_row=2, in_100=3)


def test_one_skipped_step_does_not_end_the_run():
    assert breach([7], 7) is None


def test_two_in_a_row_end_it():
    assert "2 steps in a row" in breach([7, 8], 8)


def test_three_in_a_hundred_end_it_and_three_in_more_do_not():
    assert "3 of 100" in breach([1, 50, 100], 100)
    assert breach(recent([1, 50, 101], 101), 101) is None


def test_a_good_step_after_two_bad_ones_is_no_breach():
    assert breach([7, 9], 10) is None


def test_the_loss_is_the_mean_over_all_valid_tokens_and_not_over_micro_batches():
    model, batches = make_model(), make_batches(1) + make_batches(1, seed=1, rows=5)
    parts = [make_steps(make_model()).run([batch], no_poll) for batch in batches]
    counts = [batch.num_targets for batch in batches]
    expected = sum(p.loss * n for p, n in zip(parts, counts, strict=True)) / sum(counts)
    assert make_steps(model).run(batches, no_poll).loss == pytest.approx(expected, rel=1e-6)


def test_accumulation_gives_the_gradient_of_one_large_batch():
    one, several = make_model(), make_model()
    large = make_batches(1, rows=4)[0]
    small = list(_split(large))
    first = make_steps(one, learning_rate=1e-2).run([large], no_poll)
    second = make_steps(several, learning_rate=1e-2).run(small, no_poll)
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-5)


def _split(batch):
    rows, length = batch.tokens_BT.shape
    borders = batch.cu_seqlens.tolist()
    for row in range(rows):
        begin, end = row * length, (row + 1) * length
        targets = batch.targets_BT[row : row + 1]
        inside = [border - begin for border in borders if begin <= border <= end]
        yield type(batch)(
            tokens_BT=batch.tokens_BT[row : row + 1],
            targets_BT=targets,
            cu_seqlens=torch.tensor(inside, dtype=torch.int32),
            max_seqlen=batch.max_seqlen,
            num_targets=int((targets != IGNORED).sum()),
            num_text_bytes=0,
        )


def test_the_logged_norm_is_the_one_before_clipping():
    loud = make_steps(make_model(), clip_norm=1e-6).run(make_batches(1), no_poll)
    free = make_steps(make_model(), clip_norm=1e6).run(make_batches(1), no_poll)
    assert loud.grad_norm == free.grad_norm > 1e-3


def as_on_a_card(steps):
    """Let AdamW be fused, as on a card: the step is then queued before its numbers are read."""
    for optimizer in steps.optimizers.torch_optimizers:
        for group in optimizer.param_groups:
            group["fused"] = True
    assert steps.optimizers.can_hold_back
    return steps


@pytest.mark.parametrize("factor", [math.nan, math.inf, 0.0])
def test_a_step_that_is_held_back_on_the_device_changes_no_bit_of_weights_or_state(factor):
    model = make_model()
    steps = as_on_a_card(make_steps(model))
    assert steps.run(make_batches(1), no_poll).fault is None
    sound = steps.loss
    before = weights(model), {k: v.clone() for k, v in steps.optimizers.state_tensors().items()}

    def broken(*inputs):
        found = sound(*inputs)
        return LossSum(found.sum * factor, found.count)

    steps.loss = broken
    assert steps.run(make_batches(1), no_poll).fault is not None
    assert same(weights(model), before[0])
    assert same(steps.optimizers.state_tensors(), before[1])


def test_a_queued_step_with_an_infinite_gradient_and_a_finite_loss_is_held_back():
    model = make_model()
    steps = as_on_a_card(make_steps(model))
    before = weights(model)
    steps.optimizers.parameters[0].register_hook(lambda grad: torch.full_like(grad, math.inf))
    result = steps.run(make_batches(1), no_poll)
    assert math.isfinite(result.loss)
    assert (result.grad_norm, result.fault) == (math.inf, "the gradient norm is inf")
    assert same(weights(model), before)


def test_a_held_back_step_is_as_if_it_had_not_been():
    plain, faulty = make_model(), make_model()
    first, second = (as_on_a_card(make_steps(model)) for model in (plain, faulty))
    sound = second.loss
    for number in range(3):
        first.run(make_batches(1, seed=number), no_poll)
        second.loss = lambda *inputs: LossSum(sound(*inputs).sum * math.nan, None)
        second.run(make_batches(1), no_poll)
        second.loss = sound
        second.run(make_batches(1, seed=number), no_poll)
    assert same(weights(plain), weights(faulty))


@pytest.mark.parametrize("factor", [math.nan, math.inf, 0.0])
def test_a_step_without_a_usable_loss_leaves_every_weight_alone(factor):
    model = make_model()
    steps = make_steps(model)
    sound = steps.loss

    def broken(*inputs):
        found = sound(*inputs)
        return LossSum(found.sum * factor, found.count)

    steps.loss = broken
    before = weights(model)
    result = steps.run(make_batches(2), no_poll)
    assert result.fault is not None
    assert same(weights(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_stop_between_micro_steps_leaves_every_weight_alone_and_asks_after_each_but_the_last():
    model = make_model()
    before, asked = weights(model), []

    def stop(micro_step):
        asked.append(micro_step)
        if micro_step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_steps(model).run(make_batches(4), stop)
    assert asked == [1, 2]
    assert same(weights(model), before)


def test_gradients_of_an_abandoned_step_do_not_leak_into_the_next():
    model, clean = make_model(), make_model()
    steps = make_steps(model)

    def stop(micro_step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps.run(make_batches(2, seed=9), stop)
    steps.run(make_batches(2), no_poll)
    make_steps(clean).run(make_batches(2), no_poll)
    assert same(weights(model), weights(clean))


def scaled_steps(model, scale):
    steps = make_steps(model)
    steps.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return steps


def test_a_loss_scale_changes_neither_loss_nor_norm():
    plain = make_steps(make_model()).run(make_batches(2), no_poll)
    scaled = scaled_steps(make_model(), 1024.0).run(make_batches(2), no_poll)
    assert scaled.loss == plain.loss
    assert scaled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
    assert scaled.loss_scale == 1024.0


def test_a_gradient_that_overflows_skips_the_step_and_lowers_the_scale():
    model = make_model()
    before = weights(model)
    result = scaled_steps(model, 2.0**127).run(make_batches(1), no_poll)
    assert result.is_overflow
    assert result.loss_scale == 2.0**126
    assert same(weights(model), before)


def test_a_scaler_continues_from_its_state_in_json():
    first = scaled_steps(make_model(), 64.0)
    first.run(make_batches(1), no_poll)
    state = TrainingState(
        step=1, tokens_seen=1, loader={}, loss_scaler=first.scaler.state_dict()
    ).model_dump_json()
    second = scaled_steps(make_model(), 1.0)
    second.scaler.load_state_dict(TrainingState.model_validate_json(state).loss_scaler)
    assert second.run(make_batches(1), no_poll).loss_scale == 64.0
    assert second.scaler.state_dict()["_growth_tracker"] == 2


def test_what_the_ranks_wait_for_between_micro_steps_is_no_work_of_theirs():
    model = make_model()
    alone = make_steps(model)
    assert alone.run(make_batches(2), no_poll).work_s is None
    alone.run(make_batches(2), no_poll)  # warm
    several = replace(alone, group=RankGroup(RankEnvironment(world_size=2, local_size=2)))
    began_s = time.monotonic()
    result = several.run(make_batches(3), lambda _: time.sleep(0.2))
    took_s = time.monotonic() - began_s
    assert took_s > 0.4
    assert 0 < result.work_s < took_s - 0.4


def test_only_the_last_micro_batch_of_a_step_reaches_the_other_ranks():
    entered = []

    @contextmanager
    def hold():
        entered.append("held")
        yield
        entered.append("free")

    steps = replace(make_steps(make_model()), hold=hold)
    sound = steps.loss
    steps.loss = lambda *inputs: (entered.append("loss"), sound(*inputs))[1]
    steps.run(make_batches(3), no_poll)
    assert entered == ["held", "loss", "free", "held", "loss", "free", "loss"]


def test_a_ranks_own_work_is_that_of_its_batches_without_the_wait_for_others(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("nsa_core.train.step.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(RankGroup):
        size = 2

        def sum_in_place(self, tensor):
            now[0] += 100

    model = make_model()
    steps = replace(make_steps(model), group=Slow())

    def loss(*inputs):
        now[0] += 1
        return model.loss(*inputs)

    def poll(micro_step):
        now[0] += 10

    assert replace(steps, loss=loss).run(make_batches(3), poll).work_s == 3
