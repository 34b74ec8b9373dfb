"""A stand-in for a trainer of several ranks, without torch: each rank does what its script says.

`script.json`, in the run directory or beside it, holds one list of [word, value] pairs for each
rank; a word is a `do_` method.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from nsa_core.env import read_rank
from nsa_core.rundir.atomic import append_line
from nsa_core.rundir.exit import ExitRecord, write_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from nsa_core.rundir.process import identify
from nsa_core.rundir.ranks import RankEnd, RankProcess, write_rank_end, write_rank_process


class RankTrainer:
    def __init__(self, run: RunDir) -> None:
        self.run, self.place, self.manifest = run, read_rank(), read_manifest(run)
        self.rank, self.step = self.place.rank, 0
        identity = identify(os.getpid())
        assert identity is not None
        faulthandler.register(signal.SIGUSR1, file=run.stack_dump(self.rank).open("a"))
        record = RankProcess(
            run_id=run.run_id, attempt=self.manifest.attempt, rank=self.rank,
            local_rank=self.place.local_rank, num_ranks=self.place.world_size, process=identity,
            started_unix_s=time.time(),
        )  # fmt: skip
        write_rank_process(run, record)

    def do_beat(self, count: int) -> None:
        for _ in range(count):
            self.step += 1
            now = time.time()
            line = Heartbeat(
                run_id=self.run.run_id, attempt=self.manifest.attempt, rank=self.rank,
                pid=os.getpid(), ts=now, iso=datetime.fromtimestamp(now, UTC).isoformat(),
                msg="progress", phase="train", alive_seq=self.step, progress_seq=self.step,
                step=self.step, loss=3.0, lr=1e-3, grad_norm=1.0, step_s=0.1,
            )  # fmt: skip
            append_line(self.run.heartbeat(self.rank), line.model_dump_json())

    def do_wait_for(self, name: str) -> None:
        while not (self.run.root / name).exists():
            time.sleep(0.02)

    def do_sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def do_agree_at_term(self, code: int) -> None:
        def end(*_: object) -> None:
            self.do_agree(code)

        signal.signal(signal.SIGTERM, end)

    def do_follow_at_term(self, code: int) -> None:
        def end(*_: object) -> None:
            self.leave(code, "no clean stop: a collective does not end", follows=True)
            os._exit(code)

        signal.signal(signal.SIGTERM, end)

    def do_ignore_term(self, _: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def do_agree(self, code: int) -> None:
        """End as all ranks agreed to; the first one of a pod writes it, and torchrun sees a 0."""
        if self.place.local_rank == 0:
            write_exit(
                self.run,
                ExitRecord(
                    run_id=self.run.run_id, attempt=self.manifest.attempt, code=code,
                    reason="agreed", step=self.step, checkpoint_step=None, at=time.time(),
                    by="trainer",
                ),
            )  # fmt: skip
        self.leave(code, "agreed", follows=False)
        sys.exit(0)

    def leave(self, code: int, reason: str, *, follows: bool) -> None:
        record = RankEnd(
            run_id=self.run.run_id, attempt=self.manifest.attempt, rank=self.rank, code=code,
            reason=reason, step=self.step, at=time.time(), follows=follows,
        )  # fmt: skip
        write_rank_end(self.run, record)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    run = RunDir(parser.parse_args().run_dir)
    trainer = RankTrainer(run)
    found = (folder / "script.json" for folder in (run.root, run.root.parent))
    scripts = json.loads(next(path for path in found if path.exists()).read_text())
    for word, value in scripts[trainer.rank]:
        getattr(trainer, f"do_{word}")(value)


if __name__ == "__main__":
    main()
