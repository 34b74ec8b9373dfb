"""Lessons follow their plan; whether a model learns them is in test_learned_recall.py."""

from dataclasses import replace

import pytest
import torch

from nsa_core.config.model import ModelConfig, NSAConfig
from nsa_core.model.transformer import LanguageModel
from nsa_core.recall import learning
from nsa_core.recall import task as recall_task
from nsa_core.recall.learning import RecallRecipe, Stage, as_dense, judge_recall, learn_recall
from nsa_core.recall.task import RecallTask

CPU = torch.device("cpu")
NSA = NSAConfig(
    compress_block=4, compress_stride=4, select_block=4, num_selected=4, window=3, phi="avg"
)
SHORT = RecallTask(block=8, num_blocks=1, num_filled=1, num_queries=4, pairs=4)
LONG = RecallTask(block=4, num_blocks=6, num_filled=4, num_queries=4).beyond(NSA)


@pytest.fixture(autouse=True)
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement asks 16 questions here instead of 512: what it finds is not judged."""
    monkeypatch.setattr(learning, "MEASURED_QUERIES", 16)


def short_recipe(**changes):
    model = ModelConfig(
        vocab_size=LONG.vocab_size,
        dim=16,
        num_layers=2,
        num_heads=2,
        num_kv_groups=1,
        head_dim_k=8,
        head_dim_v=8,
        mlp_width=16,
        nsa=NSA,
    )
    stages = (Stage(SHORT, batch=4, steps=3), Stage(LONG, batch=2, steps=2))
    return replace(RecallRecipe(model, stages, judged=(LONG,)), **changes)


def weights_after(**changes):
    return dict(learn_recall(short_recipe(**changes), CPU).model.named_parameters())


def test_the_stages_follow_each_other_and_every_end_is_measured() -> None:
    seen = []
    lesson = learn_recall(short_recipe(), CPU, on_progress=seen.append)
    ends = [(progress.stage, progress.seq_len, progress.step) for progress in seen]
    assert ends == [(0, SHORT.seq_len, 3), (1, LONG.seq_len, 5)]
    assert lesson.history == tuple(seen)


def test_training_ends_when_its_time_is_up() -> None:
    lesson = learn_recall(short_recipe(limit_s=0.0), CPU)
    assert [progress.step for progress in lesson.history] == [1, 2]


def test_a_stage_ends_at_the_first_measurement_that_is_enough() -> None:
    known, unknown = (Stage(SHORT, batch=4, steps=60, enough=enough) for enough in (0.0, 1.5))
    lesson = learn_recall(short_recipe(stages=(known, unknown)), CPU)
    ends = [(progress.stage, progress.step) for progress in lesson.history]
    assert ends == [(0, 25), (1, 50), (1, 75), (1, 85)]


def test_no_step_is_taken_with_a_gradient_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, step = [], torch.optim.AdamW.step

    def watched(optimizer, *arguments):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        lengths.append(torch.stack([g.norm() for g in gradients if g is not None]).norm().item())
        return step(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    learn_recall(short_recipe(), CPU)
    assert len(lengths) == 5
    assert max(lengths) == pytest.approx(1.0, abs=1e-3)  # they would be longer than that


def test_the_matrices_begin_at_one_over_the_root_of_the_width() -> None:
    model = learn_recall(short_recipe(learning_rate=0.0), CPU).model
    matrices = {i.name: i.parameter for i in model.parameter_infos() if i.parameter.ndim == 2}
    assert len(matrices) > 10
    for name, matrix in matrices.items():
        # What is added to the residual stream is 1 / sqrt(2 num_layers) of the others.
        share = 0.5 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 1.0
        assert matrix.std().item() == pytest.approx(share * model.config.dim**-0.5, rel=0.2), name


def test_the_rows_of_the_judgement_are_never_rows_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = {"learned": [], "judged": []}

    def watch(module, kind: str) -> None:
        draw = recall_task.draw_recall

        def watched(task, batch, generator):
            made = draw(task, batch, generator)
            drawn[kind].extend(map(tuple, made.tokens_BT.tolist()))
            return made

        monkeypatch.setattr(module, "draw_recall", watched)

    watch(learning, "learned")
    watch(recall_task, "judged")
    recipe = short_recipe(stages=(Stage(LONG, batch=4, steps=3),))
    judge_recall(learn_recall(recipe, CPU).model, LONG, rows=12, batch=4)
    assert len(drawn["learned"]) == 12
    assert len(drawn["judged"]) >= 12
    assert set(drawn["learned"]).isdisjoint(drawn["judged"])


@pytest.mark.parametrize("seed", [-1, recall_task.JUDGED_SEED, 2**64])
def test_a_seed_that_could_draw_the_rows_of_the_judgement_is_refused(seed) -> None:
    with pytest.raises(ValueError, match=rf"0 or more and below 1,000,000, not {seed}$"):
        short_recipe(seed=seed)


def test_the_same_seed_learns_the_same() -> None:
    losses = [learn_recall(short_recipe(), CPU).history[-1].loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert learn_recall(short_recipe(seed=1), CPU).history[-1].loss != losses[0]


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_stage_for_the_last_layer_leaves_all_else_as_it_is(attention: str) -> None:
    base = short_recipe()
    model = base.model.model_copy(update={"attention": attention})
    first, second = base.stages
    before = weights_after(model=model, stages=(first,))
    after = weights_after(model=model, stages=(first, replace(second, trains_last_layer_only=True)))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    last = {name for name in before if name.startswith("blocks.1.")}
    assert moved == last
    assert all(parameter.requires_grad for parameter in after.values())


def test_all_layers_learn_in_the_stage_after_it() -> None:
    base = short_recipe()
    first, second = base.stages
    only_last = replace(first, trains_last_layer_only=True)
    before = weights_after(stages=(only_last,))
    after = weights_after(stages=(only_last, second))
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_the_rate_of_a_stage_is_a_share_of_the_learning_rate() -> None:
    first, _ = short_recipe().stages
    halved = weights_after(stages=(replace(first, rate=0.5),))
    same = weights_after(stages=(first,), learning_rate=short_recipe().learning_rate / 2)
    full = weights_after(stages=(first,))
    assert all(torch.equal(halved[name], same[name]) for name in halved)
    assert not any(torch.equal(halved[name], full[name]) for name in halved)


def test_the_selected_branch_is_cut_in_every_so_many_steps_and_never_where_it_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, hidden = [], LanguageModel.hidden

    def watched(model, tokens_BT: torch.Tensor, packing=None):
        gate = model.block_list[-1].attention.gate(torch.zeros(1, model.config.dim))
        seen.append(bool((gate[0, :, 1] > 0).all()))
        return hidden(model, tokens_BT, packing)

    monkeypatch.setattr(LanguageModel, "hidden", watched)
    learn_recall(short_recipe(stages=(Stage(SHORT, batch=128, steps=5, cut_every=2),)), CPU)
    assert seen == [True, False, True, False, True, True]


def test_the_dense_control_has_the_same_lessons_and_nothing_to_cut() -> None:
    stages = tuple(replace(stage, cut_every=1) for stage in short_recipe().stages)
    lesson = learn_recall(as_dense(short_recipe(stages=stages)), CPU)
    found = judge_recall(lesson.model, LONG, rows=2)
    assert (found.without_selection, found.without_choice) == (None, None)
    assert found.num_queries == 2 * LONG.num_queries


def test_a_model_is_judged_whole_and_with_each_part_away() -> None:
    config = short_recipe().model
    found = judge_recall(Tells(config), LONG, rows=4)
    assert (found.accuracy, found.without_selection, found.without_choice) == (1.0, 0.0, 0.0)


class Tells(LanguageModel):
    """Answers rightly while its last layer has its selected gate and its own choice of blocks."""

    def hidden(self, tokens_BT: torch.Tensor, packing=None):
        attention = self.block_list[-1].attention
        gate = attention.gate(torch.zeros(1, self.config.dim))[0, 0, 1]
        is_whole = gate > 0 and attention.backends == self.backends
        following = torch.zeros_like(tokens_BT)
        for row, ids in enumerate(tokens_BT.tolist()):
            for place, token in enumerate(ids):
                following[row, place] = ids[ids.index(token) + 1] if ids.index(token) < place else 0
        answers = following if is_whole else torch.zeros_like(tokens_BT)
        return torch.nn.functional.one_hot(answers, self.config.vocab_size).float().flatten(0, 1)

    @property
    def head_weight(self):
        return torch.eye(self.config.vocab_size)


def test_a_cooling_stage_ends_with_almost_no_learning_rate() -> None:
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
