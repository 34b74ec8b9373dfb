"""Learning rates of each schedule, and what the optimizers do with them."""

import itertools

import pytest
import torch

from nsa_core.config.training import OptimizerConfig, ScheduleConfig
from nsa_core.train.optimizer import OptimizerSet, learning_rate_scale
from tests.core.train.models import (
    CPU,
    make_batches,
    make_model,
    make_steps,
    no_poll,
    same,
    weights,
)


def scales(**fields):
    schedule = ScheduleConfig(**fields)
    return [learning_rate_scale(step, schedule) for step in range(schedule.steps)]


def test_warm_up_rises_in_equal_steps_to_the_peak():
    assert scales(steps=10, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_the_very_first_step_learns():
    assert scales(steps=10, warmup_steps=0)[0] == 1.0


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_the_last_optimizer_step_has_exactly_the_final_rate(kind, ratio):
    assert scales(steps=200, kind=kind, warmup_steps=20, min_ratio=ratio)[-1] == pytest.approx(
        ratio, abs=1e-12
    )


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_after_warm_up_the_rate_never_rises(kind):
    after = scales(steps=100, kind=kind, warmup_steps=10)[10:]
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))


def test_wsd_is_stable_until_its_decay():
    found = scales(steps=100, kind="wsd", warmup_steps=10, decay_fraction=0.2)
    assert found[9:80] == [1.0] * 71
    assert found[81] < 1.0


def test_a_schedule_that_is_all_warm_up_is_no_error():
    assert scales(steps=4, warmup_steps=8) == [0.125, 0.25, 0.375, 0.5]


#: Warm-up of 4 of 20 steps to 1; then each kind as its formula says, worked out by hand or in
#: degrees: the cosine goes through 12 degrees a step, from 0 at step 4 to 180 at step 19.
WARM_UP = [0.25, 0.5, 0.75, 1.0]
BY_FORMULA = {
    "cosine": [
        1.0, 0.990166, 0.961095, 0.914058, 0.851109, 0.775, 0.689058, 0.597038, 0.502962, 0.410942,
        0.325, 0.248891, 0.185942, 0.138905, 0.109834, 0.1,
    ],
    "wsd": [1.0] * 11 + [0.82, 0.64, 0.46, 0.28, 0.1],
    "constant": [1.0] * 16,
}  # fmt: skip


@pytest.mark.parametrize("kind", BY_FORMULA)
def test_twenty_steps_have_the_rates_of_the_formula(kind):
    found = scales(steps=20, kind=kind, warmup_steps=4, decay_fraction=0.25, min_ratio=0.1)
    assert found == pytest.approx(WARM_UP + BY_FORMULA[kind], abs=1e-6)


def test_a_decay_that_would_begin_in_the_warm_up_begins_after_it():
    found = scales(steps=11, kind="wsd", warmup_steps=5, decay_fraction=0.9, min_ratio=0.0)
    assert found[4:] == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0], abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "cosine", "steps": 2, "warmup_steps": 1}, [1.0, 0.1]),
        ({"kind": "cosine", "steps": 4, "warmup_steps": 3}, [1 / 3, 2 / 3, 1.0, 0.1]),
        ({"kind": "wsd", "steps": 3, "decay_fraction": 0.01}, [1.0, 1.0, 0.1]),
        ({"kind": "wsd", "steps": 3, "warmup_steps": 2}, [0.5, 1.0, 0.1]),
        ({"kind": "cosine", "steps": 1}, [1.0]),
        ({"kind": "wsd", "steps": 1}, [1.0]),
        ({"kind": "cosine", "steps": 1, "warmup_steps": 1, "min_ratio": 0.0}, [1.0]),
        ({"kind": "wsd", "steps": 1, "min_ratio": 0.0}, [1.0]),
    ],
)
def test_the_last_step_has_the_final_rate_where_no_other_is_left_to_decay(fields, expected):
    assert scales(**{"warmup_steps": 0, "min_ratio": 0.1} | fields) == pytest.approx(expected)


def test_beyond_its_end_a_schedule_keeps_the_final_rate():
    for kind in ("cosine", "wsd"):
        schedule = ScheduleConfig(steps=10, kind=kind, warmup_steps=2, min_ratio=0.3)
        assert learning_rate_scale(25, schedule) == pytest.approx(0.3)


def test_every_group_of_every_optimizer_has_its_own_peak_times_the_last_scale():
    config = OptimizerConfig(kind="muon", learning_rate=0.1, muon_learning_rate=0.4)
    made = OptimizerSet(make_model().parameter_infos(), config, torch.device("cpu"))
    for scale in (0.5, 0.25):
        assert made.set_scale(scale) == pytest.approx(0.1 * scale)
        rates = [[group["lr"] for group in one.param_groups] for one in made.torch_optimizers]
        assert [len(groups) for groups in rates] == [2, 1]
        assert rates[0] == pytest.approx([0.1 * scale] * 2)
        assert rates[1] == pytest.approx([0.4 * scale])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_by_name_continues_bit_for_bit(kind):
    whole, first, second = make_model(), make_model(), make_model(seed=1)
    batches = make_batches(4)
    whole_steps = make_steps(whole, kind=kind)
    for batch in batches:
        whole_steps.run([batch], no_poll)
    first_steps = make_steps(first, kind=kind)
    for batch in batches[:2]:
        first_steps.run([batch], no_poll)
    second.load_state_dict(first.state_dict())
    second_steps = make_steps(second, kind=kind)
    state = {name: t.clone() for name, t in first_steps.optimizers.state_tensors().items()}
    second_steps.optimizers.load_state_tensors(state)
    for batch in batches[2:]:
        second_steps.run([batch], no_poll)
    assert same(weights(second), weights(whole))


def test_every_parameter_has_an_optimizer_and_only_one():
    model = make_model()
    for kind in ("adamw", "muon"):
        made = OptimizerSet(model.parameter_infos(), OptimizerConfig(kind=kind), CPU)
        held = [
            id(parameter)
            for optimizer in made.torch_optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_kept_gradients_are_filled_with_0_where_they_are_and_others_dropped(kind):
    for keeps in (True, False):
        config = OptimizerConfig(kind=kind)
        infos = make_model().parameter_infos()
        made = OptimizerSet(infos, config, CPU, keeps_gradients=keeps)
        given = [torch.full_like(parameter, torch.nan) for parameter in made.parameters]
        for parameter, grad in zip(made.parameters, given, strict=True):
            parameter.grad = grad
        made.zero_grad()
        left = [parameter.grad for parameter in made.parameters]
        if keeps:
            assert all(a is b and not a.any() for a, b in zip(left, given, strict=True))
        else:
            assert left == [None] * len(given)


def test_vectors_and_embeddings_are_not_decayed():
    model = make_model()
    made = OptimizerSet(model.parameter_infos(), OptimizerConfig(weight_decay=0.5), CPU)
    decays = {
        id(parameter): group["weight_decay"]
        for group in made.torch_optimizers[0].param_groups
        for parameter in group["params"]
    }
    for info in model.parameter_infos():
        assert decays[id(info.parameter)] == (0.5 if info.is_decayed else 0.0)


def test_the_scale_applies_to_every_group_and_returns_the_rate():
    config = OptimizerConfig(kind="muon", learning_rate=0.1, muon_learning_rate=0.4)
    made = OptimizerSet(make_model().parameter_infos(), config, CPU)
    assert made.set_scale(0.5) == pytest.approx(0.05)
    assert made.torch_optimizers[1].param_groups[0]["lr"] == pytest.approx(0.2)


def test_state_of_a_parameter_that_is_not_here_is_refused():
    made = OptimizerSet(make_model().parameter_infos(), OptimizerConfig(), CPU)
    with pytest.raises(ValueError, match=r"blocks\.9"):
        made.load_state_tensors({"blocks.9.weight/exp_avg": torch.zeros(1)})


def groups(**config):
    made = OptimizerSet(make_model().parameter_infos(), OptimizerConfig(**config), CPU)
    return [group for optimizer in made.torch_optimizers for group in optimizer.param_groups]


def test_the_values_of_the_configuration_reach_every_group():
    given = {"learning_rate": 0.3, "beta1": 0.7, "beta2": 0.8, "eps": 1e-5, "weight_decay": 0.2}
    decayed, plain, matrices = groups(kind="muon", muon_learning_rate=0.4, **given)
    for group in (decayed, plain):
        assert (group["lr"], group["betas"], group["eps"]) == (0.3, (0.7, 0.8), 1e-5)
        assert not group["amsgrad"]
        assert not group["maximize"]
        assert group["decoupled_weight_decay"]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert (matrices["lr"], matrices["weight_decay"]) == (0.4, 0.2)
    assert (matrices["momentum"], matrices["nesterov"], matrices["ns_steps"]) == (0.95, True, 5)


def test_muon_takes_the_matrices_of_the_blocks_alone():
    model = make_model()
    made = OptimizerSet(model.parameter_infos(), OptimizerConfig(kind="muon"), CPU)
    taken = {id(p) for p in made.torch_optimizers[1].param_groups[0]["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in taken}
    inside = {"q", "kv", "phi_k.up", "phi_k.down", "phi_v.up", "phi_v.down", "out"}
    assert names == {f"blocks.0.attention.{name}.weight" for name in inside} | {
        "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight",
    }  # fmt: skip


def test_a_plain_run_has_no_muon():
    assert len(groups(kind="adamw")) == 2


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_room_for_moments_is_known_before_the_first_step(kind):
    model = make_model()
    steps = make_steps(model, kind=kind)
    expected = steps.optimizers.expected_moments()
    steps.run(make_batches(1), no_poll)
    held = [one for one in steps.optimizers.state_tensors().values() if one.ndim]
    assert sorted(one.nbytes for one in expected) == sorted(one.nbytes for one in held)
