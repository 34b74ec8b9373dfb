"""A tiny model, and batches for it, made without files."""

import numpy as np
import torch

from nsa_core.config.model import ModelConfig, NSAConfig
from nsa_core.config.training import OptimizerConfig
from nsa_core.data.batch import BatchShape, TokenBatch, make_batch
from nsa_core.model.transformer import LanguageModel
from nsa_core.train.optimizer import OptimizerSet
from nsa_core.train.step import StepRunner

CPU = torch.device("cpu")
VOCABULARY = 32
END = 31


def make_model(seed: int = 0, **changes) -> LanguageModel:
    sizes = {
        "vocab_size": VOCABULARY, "dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_groups": 1,
        "head_dim_k": 8, "head_dim_v": 8, "mlp_width": 32,
        "nsa": NSAConfig(
            compress_block=4, compress_stride=2, select_block=4, num_selected=3, window=8
        ),
    }  # fmt: skip
    return LanguageModel(ModelConfig(**{**sizes, **changes}), seed=seed)


def make_batches(count: int, seed: int = 0, rows: int = 2, length: int = 16) -> list[TokenBatch]:
    shape = BatchShape(
        seq_len=length,
        pack_documents=True,
        end_id=END,
        token_num_bytes=np.array([1] * END + [0], dtype=np.int32),
    )
    numbers = np.random.default_rng(seed)
    return [
        make_batch([numbers.integers(0, VOCABULARY, length + 1) for _ in range(rows)], shape)
        for _ in range(count)
    ]


def make_steps(model: LanguageModel, **changes) -> StepRunner:
    config = OptimizerConfig(**changes)
    return StepRunner(
        loss=model.loss,
        optimizers=OptimizerSet(model.parameter_infos(), config, CPU),
        clip_norm=config.clip_norm,
        precision="fp32",
        device=CPU,
    )


def no_poll(micro_step: int) -> None:
    pass


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )
