"""What loading a checkpoint puts back beside the weights."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nsa_core.model.weights import model_tensors
from nsa_core.train import checkpoint_files as content
from nsa_core.train.failure import CheckpointError
from nsa_core.train.group import RankGroup
from nsa_core.train.learner import Learner
from nsa_core.train.resume import find_resume_point, restore
from nsa_core.train.resume_point import read_place
from nsa_core.train.session import read_position
from tests.core.train.models import CPU, make_batches, make_model, make_steps, no_poll

TOKENIZER = SimpleNamespace(name="byte", fingerprint="tokens")

#: The next draw of each generator; Python and numpy keep the second of two Gaussians for later.
DRAWS = {
    "python": lambda: (random.gauss(0, 1), random.random()),
    "numpy": lambda: (np.random.randn(), np.random.rand()),
    "torch": lambda: torch.cat([torch.randn(1), torch.rand(2)]).tolist(),
}


def seed(value):
    random.seed(value), np.random.seed(value), torch.manual_seed(value)
    for draw in DRAWS.values():
        draw()


def save(run, manifest, learner, change=lambda snapshot: None):
    position = read_position(5, 50, {}, (), CPU)
    snapshot = content.TrainingSnapshot(
        state=content.TrainingState(step=5, tokens_seen=50, loader={}),
        config=manifest.config,
        model=content.to_host(model_tensors(learner.model)),
        optimizer=content.to_host(learner.steps.optimizers.state_tensors()),
        random={0: position.random},
    )
    change(snapshot)
    content.write_checkpoint(run, snapshot, content.CheckpointOrigin("r1", 1, "c0ffee", "tokens"))


@pytest.mark.parametrize("generator", DRAWS)
def test_a_resume_continues_with_the_next_draw_of_each_generator(run, manifest, generator):
    model = make_model()
    learner = Learner(model, make_steps(model))
    seed(5)
    save(run, manifest, learner)
    expected = DRAWS[generator]()
    seed(6)
    point = find_resume_point(run, manifest, lambda folder, damage: None)
    restore(point, learner, TOKENIZER, CPU, RankGroup())
    assert DRAWS[generator]() == expected


def resume_point(run, manifest):
    return find_resume_point(run, manifest, lambda folder, damage: None)


def with_scaler(model, scale):
    steps = make_steps(model)
    steps.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    steps.scaler.scale(torch.ones(1))
    return Learner(model, steps)


def test_a_resume_continues_with_the_loss_scale(run, manifest):
    save(run, manifest, with_scaler(make_model(), 64.0))
    point = resume_point(run, manifest)
    scale = {**torch.amp.GradScaler("cpu", init_scale=64.0).state_dict(), "_growth_tracker": 7}
    state = point.state.model_copy(update={"loss_scaler": scale})
    learner = with_scaler(make_model(), 1.0)
    restore(point.model_copy(update={"state": state}), learner, TOKENIZER, CPU, RankGroup())
    found = learner.steps.scaler.state_dict()
    assert (found["scale"], found["_growth_tracker"]) == (64.0, 7)


def test_a_checkpoint_of_another_tokenizer_is_refused(run, manifest):
    learner = Learner(make_model(), make_steps(make_model()))
    save(run, manifest, learner)
    other = SimpleNamespace(name="bpe", fingerprint="others")
    with pytest.raises(CheckpointError, match="another tokenizer than bpe"):
        restore(resume_point(run, manifest), learner, other, CPU, RankGroup())


def whole_numbers(snapshot):
    snapshot.model["norm.weight"] = snapshot.model["norm.weight"].long()


def other_shape(snapshot):
    snapshot.optimizer["norm.weight/exp_avg"] = torch.zeros(3)


def no_squares(snapshot):
    del snapshot.optimizer["norm.weight/exp_avg_sq"]


def complex_moment(snapshot):
    moment = snapshot.optimizer["norm.weight/exp_avg"]
    snapshot.optimizer["norm.weight/exp_avg"] = moment.to(torch.complex64)


def short_generator(snapshot):
    snapshot.random[0].tensors["cpu"] = torch.zeros(3, dtype=torch.uint8)


def large_words(snapshot):
    words = snapshot.random[0].words.model_copy(update={"numpy_words": [2**40] * 624})
    snapshot.random[0] = replace(snapshot.random[0], words=words)


def few_words(snapshot):
    words = snapshot.random[0].words.model_copy(update={"numpy_words": [1]})
    snapshot.random[0] = replace(snapshot.random[0], words=words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (whole_numbers, "tensor `norm.weight` is torch.int64"),
        (other_shape, r"`norm.weight/exp_avg` is torch.float32 of shape \[3\]"),
        (no_squares, "state of `norm.weight` has no `exp_avg_sq`"),
        (complex_moment, "`norm.weight/exp_avg` is torch.complex64"),
        (short_generator, "no state of a generator: Expected a CPUGeneratorImplState"),
        (large_words, "no state of a generator"),
        (few_words, "no state of a generator: index 1 is out of bounds"),
    ],
)
def test_content_that_would_fail_in_the_first_step_is_refused_in_one_line(
    run, manifest, change, words
):
    """Hashes say that a file is what was written, not that it fits."""
    model = make_model()
    learner = Learner(model, make_steps(model))
    learner.steps.run(make_batches(1), no_poll)
    save(run, manifest, learner, change)
    point = find_resume_point(run, manifest, lambda folder, damage: None)
    with pytest.raises(CheckpointError, match=words) as refused:
        restore(point, learner, TOKENIZER, CPU, RankGroup())
    assert "\n" not in str(refused.value)


def test_a_checkpoint_without_a_place_in_the_data_is_refused(run, manifest):
    model = make_model()
    save(run, manifest, Learner(model, make_steps(model)))
    point = find_resume_point(run, manifest, lambda folder, damage: None)
    with pytest.raises(CheckpointError, match="step_000005 has no place in the data: epoch"):
        read_place(point)
