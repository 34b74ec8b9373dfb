"""Steps of the whole trainer, from a file of text to the checkpoint, against a float64 loop."""

from dataclasses import dataclass, field

import pytest
import torch

from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import read_manifest
from tests.core.train.float64_loop import Float64Loop, StepFigures, documents_of
from tests.core.train.sessions import new_run, run_here, saved
from tests.integration.trainer_runs import rows

#: The third clips nothing; the last goes through its data more than once.
CASES = {
    "adamw": {},
    "muon": {"optimizer": {"kind": "muon"}, "schedule": {"kind": "wsd", "decay_fraction": 0.4}},
    "unpacked": {
        "model": {"tie_embeddings": False}, "data": {"pack_documents": False},
        "optimizer": {"clip_norm": 1e3}, "schedule": {"kind": "constant"},
    },
    "dense": {
        "seed": 4, "model": {"attention": "dense"}, "data": {"max_tokens": 1200},
        "batch": {"micro_batch": 4},
        "optimizer": {"beta1": 0.6, "beta2": 0.9, "eps": 1e-2, "weight_decay": 0.0},
        "schedule": {"warmup_steps": 0, "min_ratio": 0.0},
    },
}  # fmt: skip
#: float32 against float64 over five steps; the measured differences are a tenth of these.
LOSS, NORM, STATE, WEIGHTS = 1e-6, 3e-5, 2e-4, 2e-6


@dataclass
class Compared:
    """The logged rows and the states of both, step by step."""

    config: RunConfig
    rows: list[dict[str, str]]
    saved: list[tuple[dict, dict]]
    expected: list[StepFigures] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    state: list[dict[str, torch.Tensor]] = field(default_factory=list)
    muon: list[dict[str, tuple[torch.Tensor, float]]] = field(default_factory=list)


def copied(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def compare(run, texts):
    """A run and the float64 loop beside it; a limit of tokens is one that makes it begin again."""
    assert run_here(run).code == 0
    config = read_manifest(run).config
    steps = range(1, config.schedule.steps + 1)
    found = Compared(config, rows(run.training_csv), [saved(run, step) for step in steps])
    loop = Float64Loop(config, texts)
    assert config.data.max_tokens < int(found.rows[-1]["tokens"])
    for trained, _ in found.saved:
        found.expected.append(loop.step())
        found.weights.append(copied(loop.weights))
        found.state.append(copied(loop.state))
        found.muon.append(dict(loop.muon))
        if config.optimizer.kind == "muon":  # torch makes its matrices orthogonal in bfloat16
            loop.go_on_from(trained)
    return found


@pytest.fixture(scope="module", params=CASES)
def compared(request, text, texts, tmp_path_factory):
    run = new_run(tmp_path_factory.mktemp(request.param), text, **CASES[request.param])
    return compare(run, texts)


def test_the_logged_loss_is_the_mean_over_the_valid_tokens_of_the_step(compared):
    logged = [float(row["loss"]) for row in compared.rows]
    assert logged == pytest.approx([one.loss for one in compared.expected], rel=LOSS)


def test_the_logged_norm_is_that_of_the_whole_gradient_before_clipping(compared):
    logged = [float(row["grad_norm"]) for row in compared.rows]
    assert logged == pytest.approx([one.norm for one in compared.expected], rel=NORM)


def test_the_logged_rate_follows_the_schedule(compared):
    logged = [float(row["lr"]) for row in compared.rows]
    assert logged == pytest.approx([one.rate for one in compared.expected], rel=1e-12)


def test_each_moment_is_made_of_the_clipped_gradients(compared):
    limit = compared.config.optimizer.clip_norm
    are_clipped = {one.norm > limit for one in compared.expected}
    assert are_clipped == {limit < 1}
    for (_, state), expected in zip(compared.saved, compared.state, strict=True):
        moments = {name for name in state if not name.endswith("/step")}
        assert moments == expected.keys()
        for name in moments:
            error = (state[name] - expected[name]).norm() / expected[name].norm()
            assert error < STATE, (name, error)


def test_each_parameter_moves_as_the_formulas_say(compared):
    for (trained, _), expected, muon in zip(
        compared.saved, compared.weights, compared.muon, strict=True
    ):
        assert trained.keys() == expected.keys()
        for name, weight in expected.items():
            error = trained[name] - weight
            if name in muon:
                share = share_of_update(error, *muon[name])
                assert share < 0.05, (name, share)
            else:
                assert error.abs().max() < WEIGHTS, (name, error)


def share_of_update(error, direction, rate):
    """Largest error of a matrix, as a share of the step that Muon makes in each direction.

    Torch makes the matrix orthogonal in bfloat16, which has eight bits: directions that are
    a tenth of the strongest are left out.
    """
    left, size, right = torch.linalg.svd(direction, full_matrices=False)
    is_clear = size > size[0] / 10
    inside = left[:, is_clear].mT @ error @ right[is_clear].mT
    return float(inside.abs().max() / rate)


def test_every_step_is_counted_in_the_state_of_adamw(compared):
    for number, (_, state) in enumerate(compared.saved, start=1):
        assert {int(value) for name, value in state.items() if name.endswith("/step")} == {number}


@pytest.mark.parametrize("accumulation", [1, 4])
def test_rows_may_be_divided_into_any_micro_batches(tmp_path, text, texts, accumulation):
    batch = {"micro_batch": 4 // accumulation, "accumulation": accumulation}
    found = compare(
        new_run(tmp_path, text, batch=batch, schedule={"steps": 2, "warmup_steps": 0}), texts
    )
    loop = Float64Loop(found.config, texts)
    counts = [
        sum(t is not None for _, targets in documents_of(sample, found.config) for t in targets)
        for sample in loop.samples()
    ]
    assert len(set(counts)) > 2  # a mean over means would not be the mean
    test_the_logged_loss_is_the_mean_over_the_valid_tokens_of_the_step(found)
    test_the_logged_norm_is_that_of_the_whole_gradient_before_clipping(found)
    test_each_moment_is_made_of_the_clipped_gradients(found)
    test_each_parameter_moves_as_the_formulas_say(found)


def test_attention_across_a_border_would_be_seen(tmp_path, text, texts):
    """What the comparison above rests on: another packing changes loss, norm and directions."""
    config = read_manifest(new_run(tmp_path, text)).config
    joined = config.model_copy(
        update={"data": config.data.model_copy(update={"pack_documents": False})}
    )
    apart, together = Float64Loop(config, texts), Float64Loop(joined, texts)
    for _ in range(2):
        first, second = apart.step(), together.step()
        assert abs(first.loss / second.loss - 1) > 20 * LOSS
    key = "blocks.0.attention.q.weight/exp_avg"
    error = (apart.state[key] - together.state[key]).norm() / apart.state[key].norm()
    assert error > 1000 * STATE
    assert torch.equal(torch.tensor(apart.samples()[0]), torch.tensor(together.samples()[0]))
