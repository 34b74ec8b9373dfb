"""One rank of several runs, one after another: `python -m … PORT RUN [RUN …]`, as torchrun sets it.

torchrun itself would add seconds to each; tests/integration starts runs through it. A run that is
named `no-data` loses the data of rank 1 before its third step.
"""

import os
import sys
from pathlib import Path

from nsa_core.data.loader import Loader
from nsa_core.data.reporting import DataError
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
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


def main() -> None:
    """Train them, and print the exit code of this process for each."""
    port, place = int(sys.argv[1]), read_rank()
    for number, folder in enumerate(sys.argv[2:]):
        os.environ["MASTER_PORT"] = str(port + number)
        run = RunDir(Path(folder))
        if run.run_id == "no-data" and place.rank == 1:
            lose_data()
        sys.stdout.write(f"{TrainerAttempt(run, read_manifest(run), place).run()}\n")


if __name__ == "__main__":
    main()
