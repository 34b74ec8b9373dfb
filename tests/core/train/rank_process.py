"""One rank of several runs, one after another: `python -m … PORT RUN [RUN …]`, as torchrun sets it.

torchrun itself would add seconds to each; tests/integration starts runs through it. A run that is
named `no-data` loses the data of rank 1 before its third step; of one named `killed-in-a-save` rank
1 kills itself in its second save.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from nsa_core.data.loader import Loader
from nsa_core.data.reporting import DataError
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from nsa_core.train import sharded_save
from nsa_core.train.attempt import TrainerAttempt, read_rank


def lose_data() -> None:
    """Let every loader of this process fail after two batches."""
    given = Loader.next_batch

    def next_batch(self: Loader, poll: object = None) -> object:
        if self.statistics().num_batches == 2:
            message = "the disk is gone"
            raise DataError(message, "look at it")
        return given(self)

    Loader.next_batch = next_batch  # type: ignore[assignment, method-assign]


def die_in_second_save() -> None:
    """Let this process kill itself once the tensors of its second save are written."""
    given, calls = sharded_save.write_tensors, []

    def write_tensors(*inputs: Any) -> Any:
        written = given(*inputs)
        calls.append(written)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    sharded_save.write_tensors = write_tensors


def main() -> None:
    """Train them, and print the exit code of this process for each."""
    port, place = int(sys.argv[1]), read_rank()
    for number, folder in enumerate(sys.argv[2:]):
        os.environ["MASTER_PORT"] = str(port + number)
        run = RunDir(Path(folder))
        if run.run_id == "no-data" and place.rank == 1:
            lose_data()
        if run.run_id == "killed-in-a-save" and place.rank == 1:
            die_in_second_save()
        sys.stdout.write(f"{TrainerAttempt(run, read_manifest(run), place).run()}\n")


if __name__ == "__main__":
    main()
