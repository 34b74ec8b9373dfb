"""One rank of several runs, one after another: `python -m … PORT RUN [RUN …]`, as torchrun sets it.

torchrun itself would add seconds to each; tests/integration starts runs through it. A run that is
named `no-data` loses the data of rank 1 before its third step; of one named `killed-in-a-save` rank
1 kills itself in its second save; of one named `two` each rank writes where its gradients lie.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from nsa_core.data.loader import Loader
from nsa_core.data.reporting import DataError
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from nsa_core.train import sharded_save
from nsa_core.train.attempt import TrainerAttempt, read_rank
from nsa_core.train.step import StepRunner


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


def gradients_file(run: RunDir, rank: int) -> Path:
    """Of each step two lists: the memory of every gradient before the last micro-batch, and after.

    0 stands for no gradient.
    """
    return run.root.with_name(f"{run.run_id}-gradients-rank{rank}.json")


@contextmanager
def noted_gradients(path: Path) -> Iterator[None]:
    """Write `gradients_file` of the steps in the body."""
    given, steps = StepRunner.run, []

    def places(runner: StepRunner) -> list[int]:
        grads = [parameter.grad for parameter in runner.optimizers.parameters]
        return [0 if grad is None else grad.untyped_storage().data_ptr() for grad in grads]

    def run(self: StepRunner, batches: Any, poll: Any, num_valid: Any = None) -> Any:
        seen = []

        def look(number: int) -> None:
            seen[:] = places(self)
            poll(number)

        result = given(self, batches, look, num_valid)
        steps.append((list(seen), places(self)))
        return result

    StepRunner.run = run  # type: ignore[method-assign]
    yield
    StepRunner.run = given  # type: ignore[method-assign]
    path.write_text(json.dumps(steps))


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
        path = gradients_file(run, place.rank)
        with noted_gradients(path) if run.run_id == "two" else nullcontext():
            code = TrainerAttempt(run, read_manifest(run), place).run()
        sys.stdout.write(f"{code}\n")


if __name__ == "__main__":
    main()
