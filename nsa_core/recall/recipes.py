"""The lessons by which a small model learns recall: for a CPU in minutes, for a card at 16k tokens.

Both teach in the same order; what each part is for is in docs/learned-recall.md.

1. A few pairs side by side and their keys, all within reach: the first layer tells each token what
   stood before it, the second finds the pair.
2. From here on only the last layer learns. Many blocks with one pair each, first repeated until it
   fills its block, then rarer and rarer: the compressed branch learns to score the block. On a card
   the selected branch is cut in every fourth step, at 4,112 tokens and below: where it answers
   alone, nothing teaches the other one to score.
3. Each pair once, while the learning rate falls to 0.
"""

from dataclasses import replace

import torch

from nsa_core.config.model import ModelConfig, NSAConfig, RopeConfig
from nsa_core.config.training import Precision
from nsa_core.recall.learning import RecallRecipe, Stage
from nsa_core.recall.task import RecallTask

#: A query chooses 1 of 14 blocks with a pair.
CPU_NSA = NSAConfig(
    compress_block=8, compress_stride=8, select_block=8, num_selected=4, window=2, phi="avg"
)
CPU_TASK = RecallTask(block=8, num_blocks=14, num_filled=14, num_queries=14).beyond(CPU_NSA)

#: A query chooses 5 of 61 blocks, 16 of which hold a pair; 4,112 and 16,400 tokens.
CARD_NSA = NSAConfig(
    compress_block=8, compress_stride=8, select_block=64, num_selected=8, window=2, phi="avg"
)
CARD_TASK = RecallTask(block=64, num_blocks=61, num_filled=16, num_queries=16).beyond(CARD_NSA)
LONG_CARD_TASK = replace(CARD_TASK, num_blocks=253)


def on_cpu(seed: int = 0) -> RecallRecipe:
    """150 tokens: about a minute and a half of one core."""
    task = CPU_TASK
    return RecallRecipe(
        _model(CPU_NSA, task, dim=64, rope_base=1e6),
        stages=(
            Stage(_side_by_side(task, pairs=4), batch=128, steps=800, enough=0.99),
            *(_rarer(task, repeats, batch=16) for repeats in (4, 2)),
            _last(task, batch=16, steps=400),
        ),
        judged=(task,),
        seed=seed,
        limit_s=900.0,
    )


def on_card(seed: int = 0) -> RecallRecipe:
    """4,112 tokens, then 16,400: for a card, with its kernels."""
    task, long = CARD_TASK, LONG_CARD_TASK
    return RecallRecipe(
        _model(CARD_NSA, task, dim=64, rope_base=1e10),
        stages=(
            Stage(_side_by_side(task, pairs=4), batch=256, steps=1000, enough=0.99),
            _rarer(replace(task, num_blocks=20), 32, batch=32, cut_every=4),
            *(
                _rarer(task, repeats, batch=16, rate=0.4, cut_every=4)
                for repeats in (32, 8, 4, 2, 1)
            ),
            *(_rarer(long, repeats, batch=8, rate=0.4, steps=100) for repeats in (4, 2)),
            _last(long, batch=16, steps=200, rate=0.4),
        ),
        judged=(task, long),
        seed=seed,
        limit_s=150.0,
    )


def precision_on(device: torch.device) -> Precision:
    """The kernels of a card compute in bfloat16, or float16 where it has none; a CPU in float32."""
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _model(nsa: NSAConfig, task: RecallTask, *, dim: int, rope_base: float) -> ModelConfig:
    return ModelConfig(
        vocab_size=task.vocab_size,
        dim=dim,
        num_layers=2,
        num_heads=2,
        num_kv_groups=1,
        head_dim_k=64,
        head_dim_v=64,
        mlp_width=dim,
        nsa=nsa,
        rope=RopeConfig(base=rope_base),
    )


def _side_by_side(task: RecallTask, *, pairs: int) -> RecallTask:
    """Pairs without fillers, then their keys: too short for more than one compressed block."""
    return replace(
        task,
        block=2 * pairs,
        num_blocks=1,
        num_filled=1,
        pairs=pairs,
        num_queries=pairs,
        margin=0,
        distance=0,
    )


def _rarer(
    task: RecallTask,
    repeats: int,
    *,
    batch: int,
    rate: float = 1.0,
    steps: int = 300,
    cut_every: int = 0,
) -> Stage:
    return Stage(
        replace(task, repeats=repeats),
        batch,
        steps,
        rate=rate,
        trains_last_layer_only=True,
        cut_every=cut_every,
    )


def _last(task: RecallTask, *, batch: int, steps: int, rate: float = 1.0) -> Stage:
    return Stage(
        task,
        batch,
        steps,
        enough=2.0,
        rate=rate,
        is_cooling=True,
        trains_last_layer_only=True,
    )
