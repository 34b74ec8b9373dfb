"""A small NSA model on a card recalls pairs from 4,096 tokens (spec: what must be shown, 9).

The window of 64 tokens and the always selected blocks cannot see a pair; compressed blocks of 32
tokens do not overlap and hold 16 pairs, so the compressed branch alone cannot tell them apart.
"""

import pytest
import torch

from nsa_core.checks.learning import (
    RecallRecipe,
    Stage,
    as_dense,
    autocast_to,
    judge_recall,
    learn_recall,
)
from nsa_core.config.model import ModelConfig
from nsa_core.config.nsa import NSAConfig
from nsa_core.config.training import RuntimeConfig
from nsa_core.evaluate.recall_task import RecallTask
from nsa_core.kernels.dispatch import choose_backends, device_facts
from nsa_core.kernels.geometry import BlockGeometry

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

NSA = NSAConfig(
    compress_block=32, compress_stride=32, select_block=64, num_selected=16, window=64, phi="avg"
)
IDS = {"num_keys": 128, "num_values": 64, "num_fillers": 16}
SHORT = RecallTask(64, 2, 4, 8, **IDS)
MIDDLE = RecallTask(512, 4, 8, 32, **IDS).beyond(NSA)
LONG = RecallTask(4096, 6, 16, 64, **IDS).beyond(NSA)
LONGEST = RecallTask(16384, 6, 16, 64, **IDS).beyond(NSA)
RECIPE = RecallRecipe(
    ModelConfig(
        vocab_size=SHORT.vocab_size,
        dim=128,
        num_layers=2,
        num_heads=4,
        num_kv_groups=2,
        head_dim_k=64,
        head_dim_v=64,
        mlp_width=256,
        nsa=NSA,
    ),
    stages=(
        Stage(SHORT, batch=128, steps=4000),
        Stage(MIDDLE, batch=32, steps=2000),
        Stage(LONG, batch=8, steps=2000, enough=0.99),
        Stage(LONGEST, batch=2, steps=500, enough=0.99),
    ),
    limit_s=300.0,
)


@pytest.fixture(scope="module")
def learned():
    """The model with the kernels that a run on this card would use, and its compute dtype."""
    device = torch.device("cuda")
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    backends = choose_backends(RuntimeConfig(), device_facts(device, dtype))
    return learn_recall(RECIPE, device, backends=backends, autocast=dtype), dtype


@pytest.mark.parametrize("task", [LONG, LONGEST], ids=["4k", "16k"])
def test_far_pairs_are_recalled_and_not_without_the_selected_branch(learned, task):
    lesson, dtype = learned
    assert task.is_beyond(BlockGeometry.from_config(NSA))
    with autocast_to(torch.device("cuda"), dtype):
        found = judge_recall(lesson.model, task, rows=16, batch=2)
    print(found)  # noqa: T201 - the numbers are the result
    assert found.accuracy >= 0.95
    assert found.without_selection <= 0.5
    assert found.without_choice <= 0.5


def test_the_dense_control_is_shown_beside_it():
    """No bar: it says what the same lessons give without the sparse branches."""
    device = torch.device("cuda")
    lesson = learn_recall(as_dense(RECIPE), device, autocast=torch.bfloat16)
    with autocast_to(device, torch.bfloat16):
        found = judge_recall(lesson.model, LONG, rows=16, batch=2)
    print(found)  # noqa: T201 - the numbers are the result
    assert found.without_selection is None
    assert found.num_queries == 16 * LONG.num_queries
