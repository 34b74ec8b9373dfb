"""Time the trainer's own step on one rank and on several of one machine, beside one another.

Legend: T tokens of a row.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nsa_core.bench.command import Bench, Column, Table, add_count, add_repeatable, check_sizes
from nsa_core.bench.scale_processes import read_times, run_ranks
from nsa_core.bench.scale_rank import OUT_OF_MEMORY, RankRequest, RankTimes, rank_file
from nsa_core.config.base import ConfigError
from nsa_core.config.counts import Sharding, count_flops
from nsa_core.config.recipe import parse_set, resolve
from nsa_core.config.run import RunConfig
from nsa_core.config.step_memory import MIB_PER_GIB, estimate_step
from nsa_core.config.training import MAX_RANKS, DataConfig
from nsa_core.rundir.bench_result import Machine
from nsa_core.terminal import tell
from nsa_core.train.card import peak_flops_per_s

SHARDINGS: tuple[Sharding, ...] = ("ddp", "fsdp")


@dataclass(frozen=True)
class ScaleRequest:
    """What to time.

    Attributes:
        config: Model, optimizer and runtime of the recipe; its batch and ranks are replaced.
        ranks: Number that is held against one.
        shardings: How several ranks keep the state, timed one after the other at each length.
        lengths: Tokens of a row.
        tokens: Tokens of one rank and step; a multiple of every length.
        accumulation: Micro-batches of one rank and step.
        warmup_steps: Steps before the first timed one.
        steps: Steps of one repetition.
        runs: Repetitions behind each median.
    """

    config: RunConfig
    ranks: int
    shardings: tuple[Sharding, ...] = ("ddp",)
    lengths: tuple[int, ...] = (2048, 65536)
    tokens: int = 65536
    accumulation: int = 1
    warmup_steps: int = 3
    steps: int = 10
    runs: int = 5

    def __post_init__(self) -> None:
        """Refuse what would time something else (ValueError)."""
        check_sizes(2, {"--ranks": (self.ranks,)})
        if self.ranks > MAX_RANKS:
            message = f"--ranks must be at most {MAX_RANKS}, got {self.ranks}"
            raise ValueError(message)
        check_sizes(
            1,
            {
                "--length": self.lengths,
                "--tokens": (self.tokens,),
                "--accumulation": (self.accumulation,),
                "--steps": (self.steps,),
                "--runs": (self.runs,),
            },
        )
        for length in self.lengths:
            if self.tokens % (length * self.accumulation):
                message = (
                    f"{self.tokens} tokens are not {self.accumulation} equal micro-batches of "
                    f"whole rows of {length}"
                )
                raise ValueError(message)


@dataclass(frozen=True)
class ScaleRow:
    """One number of ranks at one length.

    Attributes:
        recipe: Whose model it is.
        T: Tokens of a row.
        ranks: Processes that share a step, each with a card where there are cards.
        sharding: How they keep the state; `none` for one rank.
        tokens: Tokens of one rank and step.
        tokens_per_s: Of all ranks together: median over the repetitions, by the slowest rank.
        step_ms: One step at that rate.
        efficiency: Rate of one of the ranks over `baseline`'s; None where there is none.
        baseline: What `efficiency` is held against: one rank, or one of several under ddp where one
            rank alone does not hold the model.
        spread: (fastest - slowest repetition) / median.
        mfu: Share of the cards' data-sheet peak; None on an unknown card or a CPU.
        peak_gib: Most memory allocated on a card in the timed steps, the fullest; None on a CPU.
        estimated_gib: What `nsa-ops estimate` says of a card.
        first_step_s: Seconds of the first step, which compiles.
        first_loss: Loss of the first step, in nats.
        last_loss: Loss of the last timed step on the same batches, so it must be lower.
        kernels: Which code computes each branch and the loss.
        outcome: `ok`, or why there is no rate.
    """

    recipe: str
    T: int
    ranks: int
    sharding: str
    tokens: int
    tokens_per_s: float | None = None
    step_ms: float | None = None
    efficiency: float | None = None
    baseline: str = ""
    spread: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    estimated_gib: float | None = None
    num_parameters: int | None = None
    first_step_s: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    kernels: dict[str, str] | None = None
    outcome: str = "ok"


def rank_config(request: ScaleRequest, length: int, ranks: int, sharding: Sharding) -> RunConfig:
    """The configuration of a run of so many ranks, each with the same tokens a step."""
    config, is_card = request.config, request.config.runtime.device == "cuda"
    runtime = {
        "num_gpus": ranks if is_card else 0,
        "cpu_ranks": 1 if is_card else ranks,
        "num_pods": 1,
        "sharding": sharding,
    }
    batch = {
        "seq_len": length,
        "micro_batch": request.tokens // (length * request.accumulation),
        "accumulation": request.accumulation * ranks,
    }
    values = config.model_dump()
    values["batch"] |= batch
    values["runtime"] |= runtime
    values["data"] = DataConfig(source="synthetic", tokenizer="byte", pack_documents=False)
    return RunConfig.model_validate(values)


def measure_scale(request: ScaleRequest) -> Iterator[ScaleRow]:
    """Time one rank, then several, at every length."""
    for length in request.lengths:
        alone = measure_row(request, length, 1, "ddp")
        yield alone
        found = [alone]
        for sharding in request.shardings:
            row = measure_row(request, length, request.ranks, sharding)
            row = with_efficiency(row, found)
            found.append(row)
            yield row


def with_efficiency(row: ScaleRow, before: Sequence[ScaleRow]) -> ScaleRow:
    """The row beside one rank of the same length, or ddp where one rank has no rate; pure."""
    for other in before:
        if row.tokens_per_s is not None and other.tokens_per_s is not None:
            one = other.tokens_per_s / other.ranks
            name = "1 rank" if other.ranks == 1 else f"{other.ranks} ranks, {other.sharding}"
            return replace(row, efficiency=row.tokens_per_s / row.ranks / one, baseline=name)
    return row


def measure_row(request: ScaleRequest, length: int, ranks: int, sharding: Sharding) -> ScaleRow:
    """Start so many processes and read what they measured."""
    config = rank_config(request, length, ranks, sharding)
    steps = 1 + request.warmup_steps + request.runs * request.steps
    how = f"{ranks} ranks, {sharding}" if ranks > 1 else "1 rank"
    tell(f"timing {how} at {length:,} tokens: {steps} steps of {ranks * request.tokens:,}")
    asked = RankRequest(
        config=config, warmup_steps=request.warmup_steps, steps=request.steps, runs=request.runs
    )
    with tempfile.TemporaryDirectory(prefix="nsa-scale-") as name:
        folder = Path(name)
        problem = run_ranks(folder, asked)
        times = [read_times(rank_file(folder, rank)) for rank in range(ranks)]
    device = torch.device(config.runtime.device)
    peak = peak_flops_per_s(device, config.runtime.precision)
    return compose_row(request, config, times, problem, peak)


def compose_row(
    request: ScaleRequest,
    config: RunConfig,
    times: Sequence[RankTimes | None],
    problem: str,
    peak_flops: float | None = None,
) -> ScaleRow:
    """A row of what every rank measured; `peak_flops` a second are one card's; pure."""
    ranks, runtime = len(times), config.runtime
    row = ScaleRow(
        recipe=config.recipe,
        T=config.batch.seq_len,
        ranks=ranks,
        sharding=runtime.sharding if ranks > 1 else "none",
        tokens=request.tokens,
        estimated_gib=estimate_step(config).total / MIB_PER_GIB,
    )
    known = [one for one in times if one is not None and not one.problem]
    if problem or len(known) < ranks:
        return replace(row, outcome=_why(times, problem))
    if ranks > 1 and known[0].is_sharded != (runtime.sharding == "fsdp"):
        return replace(row, outcome=f"the trainer does not keep its state as {runtime.sharding}")
    slowest = [max(one.seconds[run] for one in known) for run in range(request.runs)]
    rates = [ranks * request.tokens * request.steps / seconds for seconds in slowest]
    rate = statistics.median(rates)
    flops = count_flops(config.model, config.batch.seq_len).train
    peaks = [one.peak_gib for one in known if one.peak_gib is not None]
    return replace(
        row,
        tokens_per_s=rate,
        step_ms=1e3 * ranks * request.tokens / rate,
        spread=(max(rates) - min(rates)) / rate,
        mfu=rate * flops / (ranks * peak_flops) if peak_flops is not None else None,
        peak_gib=max(peaks, default=None),
        num_parameters=known[0].num_parameters,
        first_step_s=max(one.first_step_s for one in known),
        first_loss=known[0].losses[0],
        last_loss=known[0].losses[1],
        kernels=known[0].kernels,
    )


def _why(times: Sequence[RankTimes | None], problem: str) -> str:
    """Why ranks have no rate: what the first one that says so says; memory before the rest."""
    said = {rank: one.problem for rank, one in enumerate(times) if one is not None and one.problem}
    if OUT_OF_MEMORY in said.values():
        return OUT_OF_MEMORY
    for rank, words in said.items():
        return f"rank {rank}: {words}"
    missing = [str(rank) for rank, one in enumerate(times) if one is None]
    return problem or f"no answer from rank {', '.join(missing)}"


TABLE = Table(
    (
        Column("T", 6, "T"),
        Column("ranks", 5, "ranks"),
        Column("state", 5, "sharding"),
        Column("tokens/s", 10, "tokens_per_s", ",.0f"),
        Column("efficiency", 10, "efficiency", ".3f"),
        Column("step ms", 8, "step_ms", ".1f"),
        Column("MFU", 7, "mfu", ".1%"),
        Column("spread", 7, "spread", ".1%"),
        Column("GiB", 6, "peak_gib", ".1f"),
        Column("estimate", 8, "estimated_gib", ".1f"),
        Column("first step s", 12, "first_step_s", ".1f"),
        Column("outcome", 0, "outcome"),
    )
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this bench."""
    parser.add_argument("--recipe", default="m7c-125m", help="whose model is timed")
    parser.add_argument("--ranks", type=int, metavar="N", help="default: all cards, 2 without one")
    add_repeatable(parser, "--sharding", "default: ddp", choices=SHARDINGS)
    add_repeatable(parser, "--length", "tokens of a row", type=int, metavar="T")
    add_count(parser, "--tokens", 65536, "tokens of one rank and step")
    add_count(parser, "--accumulation", 1, "micro-batches of one rank and step")
    add_count(parser, "--runs", 5, "repetitions behind each median")
    add_count(parser, "--steps", 10, "steps of a repetition")
    add_repeatable(parser, "--set", "sizes, as in a run", default=[], metavar="KEY=VALUE")


def read_request(options: argparse.Namespace, *, num_cards: int) -> ScaleRequest:
    """What the command line asks for; on a CPU in float32 and as written unless it says otherwise.

    Raises:
        ConfigError: If `--set` names what this bench does not follow.
        ValueError: If there are fewer cards than ranks.
    """
    for flag in options.set:
        check_followed(parse_set(flag)[0])
    if options.ranks and num_cards and options.ranks > num_cards:
        message = f"--ranks {options.ranks} needs as many cards, and torch sees {num_cards} here"
        raise ValueError(message)
    if num_cards == 1:
        message = "torch sees one card here, and one alone has nothing to be compared with"
        raise ValueError(message)
    defaults = [
        f"runtime.device={'cuda' if num_cards else 'cpu'}",
        f"runtime.compile={str(bool(num_cards)).lower()}",
        f"runtime.precision={'bf16' if num_cards else 'fp32'}",
        "data.tokenizer=byte",
    ]
    return ScaleRequest(
        config=resolve(options.recipe, sets=[*defaults, *options.set]).config,
        ranks=options.ranks if options.ranks is not None else num_cards or 2,
        shardings=tuple(options.sharding or ("ddp",)),
        lengths=tuple(options.length or (2048, 65536)),
        tokens=options.tokens,
        accumulation=options.accumulation,
        steps=options.steps,
        runs=options.runs,
    )


#: Decided by the flags of this bench, or by the machine.
_NOT_FOLLOWED = (
    "runtime.device", "runtime.num_gpus", "runtime.num_pods", "runtime.cpu_ranks",
    "runtime.sharding",
)  # fmt: skip


def check_followed(key: str) -> None:
    """Refuse a value that would change nothing here.

    Raises:
        ConfigError: If so.
    """
    if not key.startswith(("model.", "runtime.", "optimizer.")) or key in _NOT_FOLLOWED:
        message = (
            f"--set {key}: this bench times steps on random tokens, and follows no such setting; "
            "it follows model.*, optimizer.* and most of runtime.*, and has --ranks, --sharding, "
            "--length, --tokens and --accumulation"
        )
        raise ConfigError(message)


def measure(options: argparse.Namespace, machine: Machine) -> Iterator[ScaleRow]:
    """Rows of the command line.

    Raises:
        ConfigError: If `--set` names what this bench does not follow.
        ValueError: If there are fewer cards than ranks.
    """
    num_cards = 0 if machine.card == "cpu" else torch.cuda.device_count()
    request = read_request(options, num_cards=num_cards)
    if num_cards:
        torch.cuda.empty_cache()  # the clocks of the card were measured here; its ranks need it now
    return measure_scale(request)


def find_failure(rows: Sequence[Any]) -> str | None:
    """Ranks that did not finish for another reason than memory, or that did not train."""
    for row in rows:
        where = f"{row.ranks} ranks ({row.sharding}) at {row.T} tokens"
        if row.outcome not in {"ok", OUT_OF_MEMORY}:
            return f"{where} did not finish: {row.outcome}"
        if row.outcome == "ok" and not row.last_loss < row.first_loss:
            return (
                f"{where} did not learn: the loss of the same batches went from "
                f"{row.first_loss:.4f} to {row.last_loss:.4f}"
            )
    return None


BENCH = Bench(
    summary="the trainer's own step on one rank and on several of this machine",
    needs_card=False,
    add_flags=add_flags,
    measure=measure,
    header=TABLE.header,
    format_row=TABLE.line,
    failure=find_failure,
)
