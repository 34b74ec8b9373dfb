"""What loading a checkpoint puts back beside the weights."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nsa_core.model.weights import model_tensors
from nsa_core.train import checkpoint as content
from nsa_core.train.learner import Learner
from nsa_core.train.restore import restore
from nsa_core.train.resume import find_resume_point
from nsa_core.train.session import read_position
from tests.core.train.models import CPU, make_model, make_steps

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


def save(run, manifest, learner):
    position = read_position(5, 50, {}, (), CPU)
    snapshot = content.Snapshot(
        state=content.TrainingState(step=5, tokens_seen=50, loader={}),
        config=manifest.config,
        model=content.to_host(model_tensors(learner.model)),
        optimizer=content.to_host(learner.steps.optimizers.state_tensors()),
        random_tensors=content.to_host(position.random_tensors),
        random_words=position.random_words,
    )
    content.write_checkpoint(run, snapshot, content.Origin("r1", 1, "c0ffee", "tokens"))


@pytest.mark.parametrize("generator", DRAWS)
def test_a_resume_goes_on_with_the_next_draw_of_each_generator(run, manifest, generator):
    model = make_model()
    learner = Learner(model, make_steps(model))
    seed(5)
    save(run, manifest, learner)
    expected = DRAWS[generator]()
    seed(6)
    point = find_resume_point(run, manifest, lambda folder, damage: None)
    restore(point, learner, TOKENIZER, CPU, rank=0)
    assert DRAWS[generator]() == expected
