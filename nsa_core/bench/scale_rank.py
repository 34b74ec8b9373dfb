"""`python -m nsa_core.bench.scale_rank FOLDER`: time the trainer's own step on one rank of several.

It is one process of torchrun, or the only one. It reads request.json and writes rank_R.json there.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nsa_core.bench.measure import allocated_gib, reset_peak
from nsa_core.bench.step_speed import NoGoodStepError, random_batch
from nsa_core.config.base import FrozenModel
from nsa_core.config.run import RunConfig
from nsa_core.data.batch import TokenBatch
from nsa_core.env import read_rank
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import read_model
from nsa_core.terminal import run_to_exit_code, tell
from nsa_core.train.failure import TrainerError
from nsa_core.train.group import RankGroup
from nsa_core.train.joined_group import join_group
from nsa_core.train.learner import Learner, choose_device, make_learner, set_up_torch
from nsa_core.train.step import StepResult

REQUEST = "request.json"
OUT_OF_MEMORY = "out of memory"
_FAILED = 1


class RankRequest(FrozenModel):
    """What every rank does.

    Attributes:
        config: With as many ranks as there are processes.
        warmup_steps: Steps between the first one, which compiles, and the first timed one.
        steps: Steps of one repetition.
        runs: Repetitions.
    """

    config: RunConfig
    warmup_steps: int
    steps: int
    runs: int


class RankTimes(FrozenModel):
    """What one rank measured; only `problem` is set where it could not.

    Attributes:
        seconds: Of each repetition, between two moments at which all ranks are there.
        losses: Mean over the tokens of all ranks, of the first and the last step.
        peak_gib: Most memory allocated in the timed steps; None on a CPU.
        is_sharded: Its parameters are parts of the whole.
    """

    problem: str = ""
    seconds: tuple[float, ...] = ()
    first_step_s: float = 0.0
    losses: tuple[float, float] = (0.0, 0.0)
    peak_gib: float | None = None
    num_parameters: int = 0
    is_sharded: bool = False
    kernels: dict[str, str] = {}


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves what it measured."""
    return folder / f"rank_{rank}.json"


class TimedRank:
    """One rank, its share of a step and the others'."""

    def __init__(self, request: RankRequest, group: RankGroup, device: torch.device) -> None:
        config = request.config
        self._request, self._group, self._device = request, group, device
        self._learner: Learner = make_learner(config, device, group=group)
        self._batches = _own_batches(config, group)
        self._num_valid = group.size * sum(batch.num_targets for batch in self._batches)

    def run(self) -> RankTimes:
        """Take all steps and say how long they took.

        Raises:
            NoGoodStepError: If a step was skipped.
        """
        began = time.perf_counter()
        first = last = self._take(1)
        first_step_s = time.perf_counter() - began
        self._take(self._request.warmup_steps)
        reset_peak(self._device)
        seconds = []
        for _ in range(self._request.runs):
            began = self._meet()
            last = self._take(self._request.steps)
            seconds.append(self._meet() - began)
        model = self._learner.model
        return RankTimes(
            seconds=tuple(seconds),
            first_step_s=first_step_s,
            losses=(first.loss, last.loss),
            peak_gib=allocated_gib(self._device),
            num_parameters=model.num_parameters(),
            is_sharded=any(isinstance(one, DTensor) for one in model.parameters()),
            kernels=model.kernel_paths,
        )

    def _take(self, count: int) -> StepResult:
        result = StepResult(float("nan"), float("nan"), None)
        for _ in range(count):
            self._learner.model.train()
            result = self._learner.steps.run(self._batches, lambda _: None, self._num_valid)
            if result.fault is not None:
                message = f"a step was skipped: {result.fault}"
                raise NoGoodStepError(message)
        return result

    def _meet(self) -> float:
        """The moment at which all ranks have done what they were given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._group.add_up([0])
        return time.perf_counter()


def _own_batches(config: RunConfig, group: RankGroup) -> list[TokenBatch]:
    """Random batches of this rank, the same ones at every step."""
    count = config.batch.accumulation // group.size
    first = config.seed + group.place.rank * count
    return [
        random_batch(config.model_copy(update={"seed": seed}))
        for seed in range(first, first + count)
    ]


def measure_rank(folder: Path) -> RankTimes:
    """Join the other ranks and take the steps; running out of memory is a result."""
    request = read_model(RankRequest, folder / REQUEST)
    config, place = request.config, read_rank()
    try:
        device = choose_device(config, place)
        set_up_torch(config, device, place.rank)
        return TimedRank(request, join_group(config, place), device).run()
    except torch.OutOfMemoryError:
        return RankTimes(problem=OUT_OF_MEMORY)
    except (NoGoodStepError, TrainerError, RuntimeError) as error:
        first_line, _, _ = str(error).partition("\n")
        return RankTimes(problem=f"{type(error).__name__}: {first_line}")


def main(argv: list[str]) -> int:
    """Measure and leave the result; returns the exit code."""
    folder = Path(argv[0])
    found = measure_rank(folder)
    write_text(rank_file(folder, read_rank().rank), found.model_dump_json())
    if found.problem:
        tell(f"error: {found.problem}")
        return _FAILED
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    # A rank that failed must not wait for the others, which wait for it.
    os._exit(run_to_exit_code(lambda: main(sys.argv[1:])))
