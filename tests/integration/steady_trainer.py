"""A stand-in for the trainer that counts: steps, heartbeats, checkpoints, HALT, USR1 and USR2.

It behaves as the contract says, in 50 ms steps, and its checkpoint holds one number.
"""

import argparse
import faulthandler
import hashlib
import os
import shutil
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa_core.rundir.atomic import append_line, write_text
from nsa_core.rundir.checkpoint import (
    CheckpointFile,
    CheckpointManifest,
    inspect_checkpoint,
    list_checkpoints,
)
from nsa_core.rundir.exit import ExitRecord, write_exit
from nsa_core.rundir.halt import read_halt
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest

STEP_S = 0.05


class SteadyTrainer:
    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.manifest = read_manifest(run)
        self.sequence = 0
        self.save_asked = False
        self.step = self.load()
        faulthandler.register(signal.SIGUSR1, file=run.stack_dump().open("a"), all_threads=True)
        signal.signal(signal.SIGUSR2, self.on_save)
        signal.signal(signal.SIGTERM, lambda *_: self.stop(75, "stopped by SIGTERM"))

    def on_save(self, *_: object) -> None:
        self.save_asked = True

    def load(self) -> int:
        whole = [
            one for one in list_checkpoints(self.run) if not inspect_checkpoint(one.path).damage
        ]
        return whole[0].step if whole else 0

    def beat(self, message: str, phase: str = "train", **fields: Any) -> None:
        self.sequence += 1
        now = time.time()
        line = Heartbeat(
            run_id=self.manifest.run_id, attempt=self.manifest.attempt, rank=0, pid=os.getpid(),
            ts=now, iso=datetime.fromtimestamp(now, UTC).isoformat(), msg=message, phase=phase,
            alive_seq=self.sequence, progress_seq=self.sequence, step=self.step, **fields,
        )  # fmt: skip
        append_line(self.run.heartbeat(), line.model_dump_json())

    def save(self) -> None:
        folder = self.run.checkpoint(self.step)
        temporary = folder.with_name(f".{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        content = f"{self.step}\n".encode()
        (temporary / "state.txt").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        manifest = CheckpointManifest(
            run_id=self.manifest.run_id, attempt=self.manifest.attempt,
            attempt_id=self.manifest.attempt_id, step=self.step,
            tokens_seen=self.step, created_unix_s=time.time(),
            config_sha256=self.manifest.config_sha256,
            files=[CheckpointFile(name="state.txt", size=len(content), sha256=digest)],
        )  # fmt: skip
        write_text(temporary / "checkpoint.json", manifest.model_dump_json())
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)

    def stop(self, code: int, reason: str) -> None:
        self.save()
        self.beat("halt_ack" if code == 10 else "end", "shutdown")
        record = ExitRecord(
            run_id=self.manifest.run_id, attempt=self.manifest.attempt, code=code, reason=reason,
            step=self.step, checkpoint_step=self.step, at=time.time(), by="trainer",
        )  # fmt: skip
        write_exit(self.run, record)
        sys.exit(code)

    def train(self) -> None:
        self.beat("boot", "init")
        every = self.manifest.config.checkpoint.save_every
        while self.step < self.manifest.config.schedule.steps:
            time.sleep(STEP_S)
            self.step += 1
            loss = 1.0 + 5.0 / (1 + self.step)
            self.beat(
                "progress", loss=loss, lr=1e-3, grad_norm=1.0, tokens_per_s=1000.0 + self.step
            )
            sys.stdout.write(f"step {self.step} loss {loss:.4f}\n")
            sys.stdout.flush()
            if self.save_asked or (every and self.step % every == 0):
                self.save_asked = False
                self.save()
            request = read_halt(
                self.run, run_id=self.manifest.run_id, attempt=self.manifest.attempt
            )
            if request is not None:
                self.stop(10, request.reason)
        self.stop(0, "all steps done")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    SteadyTrainer(RunDir(parser.parse_args().run_dir)).train()
