"""A run directory with real checkpoints of an untrained tiny model, as the trainer writes them."""

import json
import time
from pathlib import Path

import torch

from nsa_core.config.run import RunConfig
from nsa_core.data.staging import stage
from nsa_core.model.transformer import LanguageModel
from nsa_core.model.weights import model_tensors
from nsa_core.rundir.checkpoint import Checkpoint
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest
from nsa_core.train.checkpoint_files import (
    CheckpointOrigin,
    TrainingSnapshot,
    TrainingState,
    to_host,
    write_checkpoint,
)
from nsa_core.train.random_state import read_random_state
from nsa_core.train.sharded_save import SharedSave
from tests.core.train.shards import part, save_together

MODEL = {
    "vocab_size": 340, "dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_groups": 1,
    "head_dim_k": 8, "head_dim_v": 8, "mlp_width": 32,
    "nsa": {"compress_block": 4, "compress_stride": 2, "select_block": 4, "num_selected": 3,
            "window": 8},
}  # fmt: skip
TEXT = "The tide comes in twice a day. Wet sand keeps its shape; dry sand does not.\n"


def make_run(root: Path, *, tokenizer: str = "byte") -> RunDir:
    """A run directory below `root/runs` with a manifest and no checkpoint."""
    run = RunDir(root / "runs" / "r1")
    run.root.mkdir(parents=True)
    text = root / "text.jsonl"
    lines = (json.dumps({"text": f"{number}. {TEXT}"}) for number in range(40))
    text.write_text("\n".join(lines) + "\n")
    data = {
        "source": "fineweb_edu_local",
        "path": str(text),
        "tokenizer": tokenizer,
        "bpe_vocab_size": 320,
        "cache_dir": "staged",
    }
    config = RunConfig.model_validate(
        {"model": MODEL, "data": data, "runtime": {"device": "cpu", "precision": "fp32"}}
    )
    manifest = RunManifest(
        run_id="r1", config=config, config_sha256="0" * 64, created_unix_s=time.time()
    )
    write_manifest(run, manifest)
    return run


def save(
    run: RunDir, config: RunConfig, step: int, *, num_ranks: int = 1
) -> tuple[LanguageModel, Checkpoint]:
    """Write the checkpoint of a step; its weights are drawn with the step as seed."""
    model = LanguageModel(config.model, seed=step)
    staged = stage(config.data, run.pod_root, config.seed)
    snapshot = TrainingSnapshot(
        state=TrainingState(step=step, tokens_seen=0, loader={}),
        config=config,
        model=to_host(model_tensors(model)),
        optimizer={},
        random={0: read_random_state(torch.device("cpu"))},
    )
    origin = CheckpointOrigin("r1", 1, "0" * 64, staged.tokenizer.fingerprint)
    if num_ranks == 1:
        return model, write_checkpoint(run, snapshot, origin)
    parts = [part(snapshot, rank, num_ranks) for rank in range(num_ranks)]
    saved = save_together(run, parts, origin, SharedSave(1, 20.0))[0]
    assert isinstance(saved, Checkpoint)
    return model, saved


def flip_a_bit(path: Path) -> None:
    """Change the last byte of a file and nothing else about it."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
