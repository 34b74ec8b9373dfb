import pytest
import torch

from nsa_core.config.training import OptimizerConfig
from nsa_core.train.optimizer import OptimizerSet
from tests.core.train.models import (
    CPU,
    make_batches,
    make_model,
    make_steps,
    no_poll,
    same,
    weights,
)


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
