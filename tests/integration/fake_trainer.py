"""A stand-in for the trainer that does what `script.json` in its run directory says.

The file has one list of [word, value] pairs for each attempt; a word is a `do_` method below.
"""

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from nsa_core.rundir.atomic import append_line
from nsa_core.rundir.events import record
from nsa_core.rundir.exit import ExitRecord, write_exit
from nsa_core.rundir.halt import read_halt
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest


class Trainer:
    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.manifest = read_manifest(run)
        self.alive_seq = self.progress_seq = 0
        self.step = 0
        self.loss = 3.0

    def beat(self, message: str, **fields: object) -> None:
        now = time.time()
        self.alive_seq += 1
        append_line(
            self.run.heartbeat(),
            Heartbeat(
                run_id=self.manifest.run_id, attempt=self.manifest.attempt, rank=0, pid=os.getpid(),
                ts=now, iso=datetime.fromtimestamp(now, UTC).isoformat(), msg=message,
                phase="train", alive_seq=self.alive_seq, progress_seq=self.progress_seq,
                step=self.step, **fields,
            ).model_dump_json(),
        )  # fmt: skip

    def progress(self, loss: float | None = 3.0, **fields: object) -> None:
        self.step += 1
        self.progress_seq += 1
        self.beat("progress", loss=loss, lr=1e-3, grad_norm=1.0, step_s=0.05, **fields)

    def end(self, code: int, reason: str) -> None:
        write_exit(
            self.run,
            ExitRecord(
                run_id=self.manifest.run_id, attempt=self.manifest.attempt, code=code,
                reason=reason, step=self.step, checkpoint_step=None, at=time.time(), by="trainer",
            ),
        )  # fmt: skip
        sys.exit(code)

    def do_wait_halt(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.05)):
            self.progress(self.loss)
            request = read_halt(
                self.run, run_id=self.manifest.run_id, attempt=self.manifest.attempt
            )
            if request is not None:
                self.beat("halt_ack")
                self.end(10, request.reason)
            time.sleep(0.05)

    def do_beat(self, count: int) -> None:
        for _ in range(count):
            self.progress()

    def do_losses(self, losses: list[float]) -> None:
        for loss in losses:
            self.loss = loss
            self.progress(loss)

    def do_bad(self, count: int) -> None:
        for _ in range(count):
            self.progress(loss=None, finite=False)

    def do_gates(self, count: int) -> None:
        for _ in range(count):
            self.progress(gate_entropy_mean=0.05, gate_entropy_min=0.01, gate_worst_layer=3)

    def do_sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def do_orphan(self, seconds: float) -> None:
        """Start a child that holds something, such as a card's memory, and outlives us."""
        child = subprocess.Popen(["sleep", str(seconds)])
        (self.run.root / "orphan.pid").write_text(str(child.pid))

    def do_ignore(self, name: str) -> None:
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)

    def do_term_exit(self, code: int) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.end(code, "stopped by SIGTERM"))

    def do_stacks(self, _value: object) -> None:
        faulthandler.register(
            signal.SIGUSR1, file=self.run.stack_dump().open("a"), all_threads=True
        )

    def do_hang(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.05)):
            self.beat("beat")
            time.sleep(0.05)

    def do_say(self, words: str) -> None:
        sys.stdout.write(words + "\n")

    def do_say_environment(self, names: list[str]) -> None:
        for name in names:
            self.do_say(f"{name}={os.environ.get(name)}")

    def do_exit_record(self, code: int) -> None:
        self.end(code, "scripted")

    def do_tell_end(self, reason: str) -> None:
        record(self.run, kind="ended", by="trainer", attempt=self.manifest.attempt, message=reason)

    def do_linger(self, code: int) -> None:
        try:
            self.end(code, "scripted")
        except SystemExit:
            time.sleep(60)

    def do_die(self, name: str) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    def do_exit(self, code: int) -> None:
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    run = RunDir(parser.parse_args().run_dir)
    trainer = Trainer(run)
    trainer.beat("boot")
    scripts = json.loads((run.root / "script.json").read_text())
    script = scripts[min(trainer.manifest.attempt, len(scripts)) - 1]
    for word, value in script:
        getattr(trainer, f"do_{word}")(value)


if __name__ == "__main__":
    main()
