"""Settings reach what they are for: recomputation, seeds, packing, rows, validation."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from nsa_core.model.transformer import LanguageModel
from nsa_core.rundir.manifest import read_manifest
from nsa_core.train.loop import train
from tests.core.train.float64_loop import END, Float64Loop, documents_of
from tests.core.train.models import same, weights
from tests.core.train.sessions import new_run, opened, run_here
from tests.integration.trainer_runs import rows

ONE_STEP = {"steps": 1, "warmup_steps": 0}


#: Times that a block and its attention begin in a step of two micro-batches.
RECOMPUTED = {"none": (2, 2), "full": (4, 4), "selective": (2, 4)}


@pytest.mark.parametrize("mode", RECOMPUTED)
def test_activation_checkpointing_recomputes_what_it_names_and_changes_nothing(
    tmp_path, text, mode
):
    counts = Counter()
    with opened(new_run(tmp_path, text, mode, schedule=ONE_STEP,
                        runtime={"activation_checkpointing": mode})) as session:  # fmt: skip
        block = session.model.block_list[1]
        for name, module in (("block", block), ("attention", block.attention)):
            module.register_forward_pre_hook(
                lambda *_, name=name: counts.update([name] * torch.is_grad_enabled())
            )
        gradients = watch_gradients(session)
        train(session)
    with opened(new_run(tmp_path, text, "plain", schedule=ONE_STEP)) as session:
        expected = watch_gradients(session)
        train(session)
    assert (counts["block"], counts["attention"]) == RECOMPUTED[mode]
    assert same(gradients, expected)


def watch_gradients(session):
    """The gradient of every parameter at the last update, clipped."""
    found, update = {}, session.steps.optimizers.step

    def step(*inputs):
        found.update({n: p.grad.clone() for n, p in session.model.named_parameters()})
        update(*inputs)

    session.steps.optimizers.step = step
    return found


def test_clipping_leaves_the_norm_that_was_asked_for(tmp_path, text):
    run = new_run(tmp_path, text, schedule=ONE_STEP, optimizer={"clip_norm": 0.125})
    with opened(run) as session:
        gradients = watch_gradients(session)
        train(session)
    assert torch.nn.utils.get_total_norm(gradients.values()).item() == pytest.approx(
        0.125, rel=1e-5
    )


def test_the_seed_decides_the_initial_weights(tmp_path, text):
    found = []
    for seed in (5, 6):
        run = new_run(tmp_path, text, f"seed{seed}", seed=seed)
        with opened(run) as session:
            found.append(weights(session.model))
            assert same(found[-1], weights(LanguageModel(session.config.model, seed=seed)))
    assert not torch.equal(found[0]["embedding.weight"], found[1]["embedding.weight"])


@pytest.mark.parametrize("seed", [5, 2**32 + 9])
def test_the_seed_decides_every_generator_whatever_was_drawn_before(tmp_path, text, seed):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with opened(new_run(tmp_path, text, seed=seed)):
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
    expected = torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()
    own = np.random.RandomState(seed % 2**32).rand()
    assert drawn == (random.Random(seed).random(), own, expected)


def batches_of(session):
    """What the model is given in each micro-batch of a run: tokens, borders and positions."""
    found, loss = [], session.steps.loss

    def noted(tokens, targets, packing):
        found.append((tokens, targets, packing))
        return loss(tokens, targets, packing)

    session.steps.loss = noted
    train(session)
    return found


@pytest.mark.parametrize("pack", [True, False])
def test_the_documents_of_the_text_are_the_segments_that_the_model_sees(
    tmp_path, text, texts, pack
):
    run = new_run(tmp_path, text, data={"pack_documents": pack}, schedule=ONE_STEP)
    with opened(run) as session:
        found = batches_of(session)
        loop = Float64Loop(session.config, texts)
    samples = loop.samples()
    assert len(found) == 2
    for (tokens, targets, packing), two in zip(found, (samples[:2], samples[2:]), strict=True):
        parts = [part for sample in two for part in documents_of(sample, loop.config)]
        lengths = [len(inputs) for inputs, _ in parts]
        assert len(lengths) == 2 if not pack else len(lengths) > 4
        borders = [0, *np.cumsum(lengths)]
        assert tokens.flatten().tolist() == [t for inputs, _ in parts for t in inputs]
        wanted = [-1 if t is None else t for _, targets in parts for t in targets]
        assert targets.flatten().tolist() == wanted
        assert packing.cu_seqlens.tolist() == borders
        assert packing.max_seqlen == max(lengths)
        assert packing.position_N.tolist() == [i for n in lengths for i in range(n)]
        assert (packing.uniform_length is None) == pack


def test_nothing_is_predicted_from_an_end_token_and_each_end_is_predicted(tmp_path, text):
    with opened(new_run(tmp_path, text, schedule=ONE_STEP)) as session:
        for tokens, targets, _ in batches_of(session):
            assert (targets[tokens == END] == -1).all()
            is_before_end = tokens[:, 1:] == END
            assert is_before_end.any()
            inside = tokens[:, :-1] != END
            assert (targets[:, :-1][is_before_end & inside] == END).all()


def test_a_row_counts_the_tokens_of_all_micro_batches_and_the_steps_before(tmp_path, text):
    run = new_run(tmp_path, text)
    assert run_here(run).code == 0
    batch = read_manifest(run).config.batch
    logged = [(int(row["step"]), int(row["tokens"])) for row in rows(run.training_csv)]
    assert logged == [(step, step * batch.tokens_per_step) for step in range(1, 6)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"eval_every": 2}, [0, 2, 4, 5]), ({"eval_every": 0}, [5]), ({"eval_every": 5}, [0, 5])],
)
def test_a_run_validates_before_its_first_step_when_due_and_at_its_end(
    tmp_path, text, changes, expected
):
    run = new_run(tmp_path, text, evaluation=changes)
    assert run_here(run).code == 0
    assert [int(row["step"]) for row in rows(run.validation_csv)] == expected


@pytest.mark.parametrize(("log_every", "expected"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4])])
def test_steps_are_logged_as_often_as_asked(tmp_path, text, log_every, expected):
    run = new_run(tmp_path, text, telemetry={"log_every": log_every, "gate_every": 1})
    assert run_here(run).code == 0
    assert [int(row["step"]) for row in rows(run.training_csv)] == expected


def test_the_threads_of_the_configuration_are_those_of_torch(tmp_path, text):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            run = new_run(tmp_path, text, f"threads{threads}", runtime={"threads": threads})
            with opened(run):
                assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
