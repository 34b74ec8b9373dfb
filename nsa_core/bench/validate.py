"""Train the same few steps at several lengths on every path of the selected branch.

Every cell begins with the same weights and sees the same batches, so the losses of two paths may
differ by rounding only. Legend: T tokens of a row.
"""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nsa_core.bench.command import Bench, Column, Table, add_count, add_repeatable, check_sizes
from nsa_core.bench.measure import allocated_gib, reset_peak
from nsa_core.checks.__main__ import read_config
from nsa_core.config.run import RunConfig
from nsa_core.config.training import BatchConfig, Precision, ScheduleConfig
from nsa_core.data.loader import Loader, LoaderPlan
from nsa_core.data.staging import StagedData, stage
from nsa_core.evaluate.device import COMPUTE_DTYPE
from nsa_core.kernels.backend import AttentionBackend, BranchBackends, DeviceFacts
from nsa_core.kernels.dispatch import device_facts, refusal
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.rundir.bench_result import Machine
from nsa_core.terminal import tell
from nsa_core.train.failure import TrainerError
from nsa_core.train.learner import choose_device, choose_kernels, make_learner, set_up_torch
from nsa_core.train.optimizer import learning_rate_scale
from nsa_core.train.step import StepRunner

LENGTHS, STEPS = (512, 1024, 2048), 200
_NUM_RUNS = 3
_EVERY_LENGTH, _NO_LENGTH = 1 << 30, 0
#: How far the loss of the first step may be from that of the first path, in nats: the same weights
#: and tokens, so only rounding lies between. A mean over thousands of tokens in bf16 moves by a few
#: units of its eighth bit over the square root of their number.
FIRST_LOSS_LIMIT: dict[Precision, float] = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}
#: How far the mean of the last quarter may be apart at so many tokens a step, in nats; what NSA may
#: lose on dense attention.
LOSS_LIMIT, LIMIT_TOKENS = 0.02, 16_384


@dataclass(frozen=True)
class SelectionPath:
    """One way to compute the selected branch: its backend, and what makes it."""

    backend: str
    make: Callable[[], AttentionBackend]


def _triton(dense_until: int) -> AttentionBackend:
    from nsa_core.kernels.triton.triton_backend import TritonBackend  # needs a card

    return TritonBackend(dense_until)


#: All keys, those that were not chosen masked; the chosen blocks gathered for every token; causal
#: attention with a bit for each block; key block by key block with the queries that chose it.
PATHS: Mapping[str, SelectionPath] = {
    "sdpa-masked": SelectionPath("sdpa", lambda: GatheredBackend(_EVERY_LENGTH)),
    "sdpa-gathered": SelectionPath("sdpa", lambda: GatheredBackend(_NO_LENGTH)),
    "triton-masked": SelectionPath("triton", lambda: _triton(_EVERY_LENGTH)),
    "triton-items": SelectionPath("triton", lambda: _triton(_NO_LENGTH)),
}


def paths_on(facts: DeviceFacts) -> dict[str, str | None]:
    """Every path, with the reason why it does not exist on a device; None where it does."""
    return {name: refusal(path.backend, "selected", facts) for name, path in PATHS.items()}


def final_loss_limit(tokens: int) -> float:
    """What the distance of the final loss may be, in nats.

    Rounding sends two paths along different ways, and how far apart they end is a noise of the
    gradient: it goes with 1 / sqrt(tokens). Measured after 200 steps of 2,048 tokens in bf16 on an
    H200: 0.033, 0.016 and 0.008, which is 0.021 together, and 0.007 at `LIMIT_TOKENS`.

    Args:
        tokens: Of a step.
    """
    return LOSS_LIMIT * max(1.0, math.sqrt(LIMIT_TOKENS / tokens))


@dataclass(frozen=True)
class ValidationRow:
    """One length on one path.

    Attributes:
        path: Name of the path of the selected branch.
        T: Tokens of a row.
        tokens: Tokens of a step.
        steps: Optimizer steps that were taken.
        tokens_per_s: Median over the steps after the first quarter; None where memory ran out.
        spread: (fastest - slowest third of them) / median.
        peak_gib: Most memory allocated; None on a CPU.
        first_loss: Loss of the first step in nats.
        final_loss: Mean loss of the last quarter of the steps.
        first_loss_gap: Distance of the first loss from that of the first path at this length.
        final_loss_gap: The same for the final loss.
        first_loss_limit: What the distance of the first loss may be in this precision.
        outcome: `ok`, or what ended it.
        kernels: Backend of each branch.
    """

    path: str
    T: int
    tokens: int
    steps: int
    tokens_per_s: float | None
    spread: float | None
    peak_gib: float | None
    first_loss: float | None
    final_loss: float | None
    first_loss_gap: float | None
    final_loss_gap: float | None
    first_loss_limit: float
    outcome: str
    kernels: dict[str, str]


@dataclass(frozen=True)
class ValidationRequest:
    """What to run.

    Attributes:
        config: Model, data, precision; `batch` gives the tokens of a step.
        lengths: Tokens of a row, each with every path.
        steps: Optimizer steps of a cell.
        paths: Names of paths; empty for all that exist on the device.
        root: Folder that a relative `data.cache_dir` lies below.
    """

    config: RunConfig
    lengths: tuple[int, ...] = LENGTHS
    steps: int = STEPS
    paths: tuple[str, ...] = ()
    root: Path = Path()

    def __post_init__(self) -> None:
        """Refuse what cannot be run (ValueError)."""
        if self.config.model.attention != "nsa":
            message = f"recipe {self.config.recipe} has dense attention: it selects nothing"
            raise ValueError(message)
        check_sizes(1, {"--steps": (self.steps,)})
        check_sizes(2, {"--length": self.lengths})


def cell_config(request: ValidationRequest, length: int) -> RunConfig:
    """The configuration of a cell: as many tokens a step as the run's micro-batch has."""
    batch = request.config.batch
    micro_batch = max(1, batch.micro_batch * batch.seq_len // length)
    return request.config.model_copy(
        update={
            "batch": BatchConfig(seq_len=length, micro_batch=micro_batch),
            "schedule": ScheduleConfig(
                steps=request.steps, warmup_steps=min(max(1, request.steps // 10), request.steps)
            ),
        }
    )


def measure_cells(request: ValidationRequest) -> Iterator[ValidationRow]:
    """Run every length on every path that is wanted.

    Raises:
        ValueError: If a path is named that does not exist on this device.
    """
    config = request.config
    device = choose_device(config)
    paths = wanted_paths(request, device)
    tell(
        f"training {request.steps} steps on {device} for each of {', '.join(paths)} at "
        f"{', '.join(map(str, request.lengths))} tokens; the text is staged below "
        f"{request.root / config.data.cache_dir}"
    )
    staged = stage(config.data, request.root, config.seed)
    for length in request.lengths:
        first: ValidationRow | None = None
        for path in paths:
            row = run_cell(cell_config(request, length), staged, device, path)
            row = with_gaps(row, first)
            first = first or (row if row.outcome == "ok" else None)
            yield row


def wanted_paths(request: ValidationRequest, device: torch.device) -> list[str]:
    """The paths to run; those that a device lacks are reported, or refused where they are named.

    Raises:
        ValueError: If one is unknown or cannot run here.
    """
    facts = device_facts(device, COMPUTE_DTYPE[request.config.runtime.precision], request.config)
    found = paths_on(facts)
    for name in request.paths:
        why = found.get(name, f"there is no such path; the paths are {', '.join(PATHS)}")
        if why is not None:
            message = f"--path {name}: {why}"
            raise ValueError(message)
    if request.paths:
        return list(request.paths)
    for name, why in found.items():
        if why is not None:
            tell(f"not run: {name}: {why}")
    return [name for name, why in found.items() if why is None]


def run_cell(
    config: RunConfig, staged: StagedData, device: torch.device, path: str
) -> ValidationRow:
    """Train a fresh model for a few steps; running out of memory is a result."""
    empty = ValidationRow(
        path=path, T=config.batch.seq_len, tokens=config.batch.tokens_per_step, steps=0,
        tokens_per_s=None, spread=None, peak_gib=None, first_loss=None, final_loss=None,
        first_loss_gap=None, final_loss_gap=None,
        first_loss_limit=FIRST_LOSS_LIMIT[config.runtime.precision], outcome="out of memory",
        kernels={},
    )  # fmt: skip
    try:
        return _train_cell(config, staged, device, empty)
    except torch.OutOfMemoryError:
        return empty
    finally:
        gc.collect()  # cycles of the model would keep its memory
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _train_cell(
    config: RunConfig, staged: StagedData, device: torch.device, empty: ValidationRow
) -> ValidationRow:
    set_up_torch(config, device)
    chosen = choose_kernels(config, device)
    backends = on_path(chosen, empty.path)
    learner = make_learner(config, device, backends)
    reset_peak(device)
    batch = config.batch
    plan = LoaderPlan(seq_len=batch.seq_len, micro_batch=batch.micro_batch, seed=config.seed)
    with closing(Loader(staged, config.data, plan)) as loader:
        learner.model.train()
        losses, times_s = _take_steps(learner.steps, loader, config.schedule)
    rates = [empty.tokens / seconds for seconds in times_s[len(times_s) // 4 :]]
    rate = statistics.median(rates)
    return replace(
        empty,
        steps=len(losses),
        tokens_per_s=rate,
        spread=spread_of_runs(rates),
        peak_gib=allocated_gib(device),
        first_loss=losses[0],
        final_loss=statistics.fmean(losses[-max(1, len(losses) // 4) :]),
        outcome="ok",
        kernels={str(one.branch): one.name for one in chosen.choices} | {"selected": empty.path},
    )


def on_path(chosen: BranchBackends, name: str) -> BranchBackends:
    """The chosen backends with the selected branch on a path.

    Branches that have the path's backend already share its object: what is computed for all of them
    at once then takes the path too.
    """
    path = PATHS[name]
    backend = path.make()
    names = {choice.branch: choice.name for choice in chosen.choices}
    return replace(
        chosen,
        compressed=backend if names["compressed"] == path.backend else chosen.compressed,
        selected=backend,
        sliding=backend if names["sliding"] == path.backend else chosen.sliding,
    )


def _take_steps(
    steps: StepRunner, loader: Loader, schedule: ScheduleConfig
) -> tuple[list[float], list[float]]:
    """Losses and seconds of every step; fetching is not in them."""
    losses, times_s = [], []
    for step in range(schedule.steps):
        batch = loader.next_batch()
        steps.optimizers.set_scale(learning_rate_scale(step, schedule))
        began = time.perf_counter()
        result = steps.run([batch], lambda _: None)  # reads the loss: it waits for the card
        times_s.append(time.perf_counter() - began)
        losses.append(result.loss)
    return losses, times_s


def spread_of_runs(rates: Sequence[float]) -> float:
    """(Fastest - slowest third) / median, of the thirds' medians."""
    size = max(1, len(rates) // _NUM_RUNS)
    runs = [rates[start : start + size] for start in range(0, size * _NUM_RUNS, size)]
    medians = [statistics.median(run) for run in runs if run]
    return (max(medians) - min(medians)) / statistics.median(rates)


def with_gaps(row: ValidationRow, first: ValidationRow | None) -> ValidationRow:
    """Put the distances from the first path that ran beside the losses."""
    base = first or row
    if row.first_loss is None or row.final_loss is None:
        return row
    if base.first_loss is None or base.final_loss is None:
        return row
    return replace(
        row,
        first_loss_gap=abs(row.first_loss - base.first_loss),
        final_loss_gap=abs(row.final_loss - base.final_loss),
    )


def failure(rows: Sequence[ValidationRow]) -> str | None:
    """The first cell whose losses are not those of the first path; None if all agree."""
    for row in rows:
        for name, gap, limit in (
            ("first", row.first_loss_gap, row.first_loss_limit),
            ("final", row.final_loss_gap, final_loss_limit(row.tokens)),
        ):
            if gap is not None and not gap <= limit:  # NaN is no agreement
                return (
                    f"{row.path} at {row.T} tokens: its {name} loss is {gap:.2g} nats from that of "
                    f"the first path, and {limit:.2g} are allowed"
                )
    return None


TABLE = Table(
    (
        Column("path", 14, "path"),
        Column("T", 6, "T"),
        Column("tokens/s", 9, "tokens_per_s", ",.0f"),
        Column("spread", 7, "spread", ".1%"),
        Column("GiB", 6, "peak_gib", ".2f"),
        Column("loss first", 10, "first_loss", ".4f"),
        Column("final", 8, "final_loss", ".4f"),
        Column("gap first", 9, "first_loss_gap", ".1e"),
        Column("gap final", 9, "final_loss_gap", ".1e"),
        Column("outcome", 0, "outcome"),
    )
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this bench."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="RunConfig as JSON, `-` for stdin; default: a recipe")
    add_repeatable(parser, "--length", "tokens of a row", type=int, metavar="T")
    add_count(parser, "--steps", STEPS, "optimizer steps of a cell")
    add_repeatable(parser, "--path", ", ".join(PATHS), metavar="NAME")
    add("--root", type=Path, default=Path(), metavar="DIR", help="folder of a relative cache")


def measure(options: argparse.Namespace, machine: Machine) -> Iterator[ValidationRow]:
    """Run what the flags ask for.

    Raises:
        ValueError: If they cannot be used.
    """
    del machine
    request = ValidationRequest(
        config=read_config(options.config, "cuda" if torch.cuda.is_available() else "cpu"),
        lengths=tuple(options.length or LENGTHS),
        steps=options.steps,
        paths=tuple(options.path or ()),
        root=options.root.absolute(),
    )
    try:
        yield from measure_cells(request)
    except TrainerError as error:
        message = f"{error}; {error.hint}"
        raise ValueError(message) from error


BENCH = Bench(
    summary="Train a few steps at several lengths on every path of the selected branch.",
    needs_card=False,
    add_flags=add_flags,
    measure=measure,
    header=TABLE.header,
    format_row=TABLE.line,
    failure=failure,
)
