"""Build run directories as a trainer leaves them, small enough to read and real enough to plot."""

import hashlib
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from nsa_core.config.run import RunConfig
from nsa_core.rundir.checkpoint import CheckpointFile, CheckpointManifest
from nsa_core.rundir.checkpoint_shards import CheckpointShard, TensorRows
from nsa_core.rundir.events import Event
from nsa_core.rundir.exit import ExitRecord, write_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import (
    RunManifest,
    begin_next_attempt,
    read_manifest,
    write_manifest,
)
from tests.ops.report.tensors import safetensors_bytes

START_UNIX_S = 1_795_788_180.0
TRAINING_HEADER = "step,tokens,loss,lr,grad_norm,tokens_per_s,mfu,step_s,data_s,skipped,attempt\n"
VALIDATION_HEADER = "step,val_loss,bits_per_byte,ppl,tokens,bytes,attempt\n"


@dataclass
class RunBuilder:
    """Writes one run directory; every method adds what one part of a run would write."""

    run: RunDir
    steps: int = 400
    seed: int = 7
    step_s: float = 0.5

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.clock = START_UNIX_S
        self.attempt = 1
        self.run.root.mkdir(parents=True)

    @property
    def run_id(self) -> str:
        return self.run.run_id

    def launch(self, **changes: object) -> "RunBuilder":
        config = RunConfig.model_validate(
            {
                "recipe": "tiny-cpu",
                "model": {"dim": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 257,
                          "mlp_width": 256, "head_dim_k": 32, "head_dim_v": 32},
                "data": {"source": "stdlib", "tokenizer": "byte"},
                "batch": {"seq_len": 256, "micro_batch": 8},
                "schedule": {"steps": self.steps, "warmup_steps": self.steps // 20},
                "checkpoint": {"save_every": self.steps // 4},
            }
        )  # fmt: skip
        fields = {
            "run_id": self.run_id,
            "config": config,
            "config_sha256": hashlib.sha256(config.model_dump_json().encode()).hexdigest(),
            "origins": {"schedule.steps": "flag --set", "batch.seq_len": "recipe tiny-cpu"},
            "profile": "cpu",
            "code_commit": "4f1c9a7e0d2b5c6f8a9b0c1d2e3f405162738495",
            "pod_id": "this-machine",
            "pod_facts": {
                "host": {"python_version": "3.11.9", "num_cpus": 2},
                "gpus": {"gpus": []},
            },
            "command": [
                "nsa-ops",
                "launch",
                "--profile",
                "cpu",
                "--set",
                f"schedule.steps={self.steps}",
            ],
            "created_unix_s": self.clock,
            **changes,
        }
        write_manifest(self.run, RunManifest.model_validate(fields))
        environment = {
            "python": "3.11.9",
            "system": "Linux 6.1.0 x86_64",
            "packages": {"torch": "2.13.0+cpu", "triton": None},
            "cards": [],
            "threads": 2,
        }
        self.run.env.write_text(json.dumps(environment))
        return self.event("launched", "operator", "launched with profile cpu")

    def event(
        self, kind: str, by: str = "trainer", message: str = "", **facts: object
    ) -> "RunBuilder":
        event = Event(
            ts=self.clock,
            iso="",
            attempt=self.attempt,
            kind=kind,
            by=by,
            message=message,
            facts=facts,
        )
        self._append(self.run.events, event.model_dump_json() + "\n")
        return self

    def train(self, first: int, last: int, *, every: int = 2) -> "RunBuilder":
        """Rows and heartbeats of the steps after `first` up to `last`."""
        for step in range(first + 1, last + 1):
            self.clock += self.step_s * self.random.uniform(0.9, 1.15)
            if step % every == 0:
                self.row(step)
                self.beat(step)
        return self

    def loss_at(self, step: int) -> float:
        return (
            1.55 + 4.0 * math.exp(-step / (self.steps * 0.16)) + 0.2 * math.exp(-step / self.steps)
        )

    def row(self, step: int, *, loss: float | None = None) -> "RunBuilder":
        if not self.run.training_csv.exists():
            self._append(self.run.training_csv, TRAINING_HEADER)
        value = self.loss_at(step) + self.random.gauss(0, 0.05) if loss is None else loss
        warm = min(1.0, step / (self.steps / 20))
        lr = 6e-4 * warm * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))
        norm = 0.4 + 2.2 * math.exp(-step / (self.steps / 8)) + abs(self.random.gauss(0, 0.12))
        speed = 4100 * self.random.uniform(0.93, 1.05) * (0.55 if step % 97 == 0 else 1)
        cells = (step, step * 2048, value, lr, norm, speed, "", self.step_s, 0.002, 0, self.attempt)
        self._append(self.run.training_csv, ",".join(map(str, cells)) + "\n")
        return self

    def beat(self, step: int, **changes: object) -> "RunBuilder":
        along = step / self.steps
        compressed = 0.34 - 0.1 * along + self.random.gauss(0, 0.006)
        selected = 0.33 + 0.13 * along + self.random.gauss(0, 0.006)
        shares = [compressed, selected, 1 - compressed - selected]
        entropy = -sum(share * math.log(share) for share in shares)
        fields = {
            "run_id": self.run_id, "attempt": self.attempt, "rank": 0, "pid": 4242,
            "ts": self.clock, "iso": "", "msg": "progress", "phase": "train",
            "alive_seq": step, "progress_seq": step, "step": step,
            "loss": self.loss_at(step), "tokens_per_s": 4100.0,
            "host_rss_mib": int(830 + 140 * min(1.0, 3 * along) + self.random.uniform(0, 8)),
            "gate_branch_shares": shares, "gate_entropy_mean": entropy,
            "gate_entropy_min": entropy - 0.1 - 0.15 * along, "gate_worst_layer": 1,
            **changes,
        }  # fmt: skip
        self._append(
            self.run.heartbeat(), Heartbeat.model_validate(fields).model_dump_json() + "\n"
        )
        return self

    def validate(self, step: int) -> "RunBuilder":
        if not self.run.validation_csv.exists():
            self._append(self.run.validation_csv, VALIDATION_HEADER)
        self.clock += 2.0
        loss = self.loss_at(step) + 0.07
        bits = loss / math.log(2)
        cells = (step, loss, bits, math.exp(loss), 32_768, 32_768, self.attempt)
        self._append(self.run.validation_csv, ",".join(map(str, cells)) + "\n")
        return self

    def save(self, step: int) -> "RunBuilder":
        """A whole checkpoint with real tensor files."""
        contents = {
            "model.safetensors": safetensors_bytes({"embedding": [step, 2]}),
            "optimizer.safetensors": safetensors_bytes({"moment": [step, 4]}),
        }
        return self._save(step, contents)

    def save_shards(self, step: int, num_ranks: int = 2, *, leave_out: int = 0) -> "RunBuilder":
        """A whole checkpoint of several ranks; `leave_out` rows that nobody describes damage it."""
        contents: dict[str, bytes] = {}
        for rank in range(num_ranks):
            begin, end = (step * place // num_ranks for place in (rank, rank + 1))
            end -= leave_out if rank == 0 else 0
            tensors = {"model": ("embedding", 2), "optimizer": ("moment", 4)}
            own = {
                f"{kind}_rank{rank}.safetensors": safetensors_bytes({name: [end - begin, width]})
                for kind, (name, width) in tensors.items()
            }
            rows = {
                kind: {name: TensorRows(begin=begin, end=end, shape=(step, width))}
                for kind, (name, width) in tensors.items()
            }
            shard = CheckpointShard(
                rank=rank, num_ranks=num_ranks, step=step, attempt=self.attempt, files=[], **rows
            )
            description = {f"shard_rank{rank}.json": shard.model_dump_json().encode()}
            contents |= own | description | {f"random_rank{rank}.json": b"{}"}
        return self._save(step, contents, num_shards=num_ranks)

    def _save(self, step: int, contents: dict[str, bytes], *, num_shards: int = 0) -> "RunBuilder":
        self.clock += 0.4
        folder = self.run.checkpoint(step)
        folder.mkdir(parents=True)
        contents["state.json"] = json.dumps({"step": step}).encode()
        files = []
        for name, content in contents.items():
            (folder / name).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            files.append(CheckpointFile(name=name, size=len(content), sha256=digest))
        manifest = CheckpointManifest(
            run_id=self.run_id, attempt=self.attempt, step=step, tokens_seen=step * 2048,
            attempt_id=read_manifest(self.run).attempt_id,
            created_unix_s=self.clock, config_sha256="c" * 64,
            tokenizer_fingerprint="byte-257-9f2c", num_shards=num_shards, files=files,
        )  # fmt: skip
        (folder / "checkpoint.json").write_text(manifest.model_dump_json(indent=2))
        self.run.latest.write_text(folder.name + "\n")
        return self.event("saved", message=f"checkpoint of step {step}", step=step)

    def end(self, code: int, reason: str, step: int) -> "RunBuilder":
        self.clock += 1.0
        self.event("ended", message=f"exit code {code}: {reason}")
        record = ExitRecord(
            run_id=self.run_id, attempt=self.attempt, code=code, reason=reason, step=step,
            checkpoint_step=step, at=self.clock, by="trainer",
        )  # fmt: skip
        write_exit(self.run, record)
        return self

    def resume(self, *, down_s: float = 20.0) -> "RunBuilder":
        self.clock += down_s
        self.attempt = begin_next_attempt(self.run, at_unix_s=self.clock).attempt
        return self.event("resumed", "operator", f"attempt {self.attempt} begins")

    def summarise(self) -> "RunBuilder":
        """goodput.json, metrics.json, samples.json as at the end of a run."""
        wall_s = self.clock - START_UNIX_S
        parts = {"step": 0.78, "eval": 0.05, "init": 0.03, "compile": 0.02, "data_wait": 0.01,
                 "checkpoint_stall": 0.01, "rollback_lost": 0.02, "down": 0.08}  # fmt: skip
        buckets = {name: share * wall_s for name, share in parts.items()}
        self.run.goodput.write_text(json.dumps({"buckets": buckets, "wall_s": wall_s}))
        self.run.metrics.write_text(json.dumps({"step": self.steps}))
        sample_text = "str\ndef read(self, path):\n    return open(path).read()\n"
        samples = [
            {"prompt": "The ", "text": sample_text, "temperature": 0.0},
            {"prompt": "The ", "text": "stream = open(name)\n", "temperature": 0.8},
        ]
        self.run.samples.write_text(json.dumps(samples))
        return self

    def _append(self, path: Path, text: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def two_attempts(
    root: Path, *, name: str = "20261127-1403-tiny-cpu-a1b2", steps: int = 400
) -> RunDir:
    """A run that was halted half-way, resumed 20 steps earlier, and finished."""
    half, back = steps // 2 + 20, steps // 2
    builder = RunBuilder(RunDir(root / name), steps=steps).launch()
    builder.event("first_step").validate(0).train(0, steps // 4).save(steps // 4).validate(
        steps // 4
    )
    builder.train(steps // 4, back).save(back).validate(back).train(back, half)
    builder.event("halt_asked", "operator", "asked by the operator").event("halt_ack")
    builder.end(10, "halted by the operator", half).resume()
    builder.train(back, steps * 3 // 4).save(steps * 3 // 4).validate(steps * 3 // 4)
    builder.event("anomaly", "watchdog", "data fetch took 2.4 s").train(steps * 3 // 4, steps)
    return builder.save(steps).validate(steps).end(0, "all steps done", steps).summarise().run
