"""Lessons follow their plan; whether a model learns them is measured elsewhere."""

from dataclasses import replace

import torch

from nsa_core.checks.learning import (
    RecallRecipe,
    Stage,
    as_dense,
    judge_recall,
    learn_recall,
)
from nsa_core.config.model import ModelConfig
from nsa_core.config.nsa import NSAConfig
from nsa_core.evaluate.recall_task import RecallTask

CPU = torch.device("cpu")
NSA = NSAConfig(
    compress_block=4, compress_stride=4, select_block=4, num_selected=8, window=3, phi="avg"
)
LONG = RecallTask(128, 8, 2, 16).beyond(NSA)
RECIPE = RecallRecipe(
    ModelConfig(
        vocab_size=LONG.vocab_size,
        dim=64,
        num_layers=2,
        num_heads=2,
        num_kv_groups=2,
        head_dim_k=32,
        head_dim_v=32,
        mlp_width=64,
        nsa=NSA,
    ),
    stages=(
        Stage(RecallTask(32, 4, 1, 4, margin=4, distance=8), batch=64, steps=1000, enough=0.95),
        Stage(RecallTask(64, 4, 2, 8).beyond(NSA), batch=32, steps=400, enough=0.96),
        Stage(LONG, batch=16, steps=1500, enough=0.98),
    ),
    limit_s=600.0,
)


def short_recipe(**changes):
    task = RecallTask(32, 4, 1, 4, margin=4, distance=8)
    stages = (Stage(task, batch=4, steps=3), Stage(LONG, batch=2, steps=2))
    return replace(RECIPE, stages=stages, **changes)


def test_the_stages_follow_each_other_and_every_end_is_measured():
    seen = []
    lesson = learn_recall(short_recipe(), CPU, on_progress=seen.append)
    assert [(progress.seq_len, progress.step) for progress in seen] == [(32, 3), (128, 5)]
    assert lesson.history == tuple(seen)
    assert lesson.task == LONG


def test_training_ends_when_its_time_is_up():
    lesson = learn_recall(short_recipe(limit_s=0.0), CPU)
    assert [progress.step for progress in lesson.history] == [1, 2]


def test_the_same_seed_learns_the_same():
    losses = [learn_recall(short_recipe(), CPU).history[-1].loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert learn_recall(short_recipe(seed=1), CPU).history[-1].loss != losses[0]


def test_the_dense_control_has_the_same_lessons_and_nothing_to_cut():
    lesson = learn_recall(as_dense(short_recipe()), CPU)
    found = judge_recall(lesson.model, LONG, rows=2)
    assert (found.without_selection, found.without_choice) == (None, None)
    assert found.num_queries == 2 * LONG.num_queries


def test_a_cooling_stage_ends_with_almost_no_learning_rate():
    recipe = short_recipe()
    cooled = replace(recipe.stages[0], steps=4, is_cooling=True)
    full, cooling = (
        learn_recall(replace(recipe, stages=(stage,), warmup_steps=1), CPU).model
        for stage in (replace(cooled, is_cooling=False), cooled)
    )
    start = learn_recall(
        replace(recipe, stages=(cooled,), learning_rate=0.0, warmup_steps=1), CPU
    ).model
    moved = [
        (model.embedding.weight - start.embedding.weight).abs().mean() for model in (full, cooling)
    ]
    assert 0 < moved[1] < 0.8 * moved[0]
