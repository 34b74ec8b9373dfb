"""Time whole training steps of a model, NSA beside its dense control, with the trainer's own step.

Legend: B rows of a step, T tokens of a row.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from nsa_core.bench.command import Bench, Column, Table, add_count, add_repeatable, check_sizes
from nsa_core.bench.measure import allocated_gib, reset_peak
from nsa_core.config.base import ConfigError
from nsa_core.config.counts import count_flops
from nsa_core.config.model import ModelConfig
from nsa_core.config.recipe import parse_set, resolve
from nsa_core.config.run import RunConfig
from nsa_core.config.training import BatchConfig, DataConfig, RuntimeConfig
from nsa_core.data.batch import TokenBatch
from nsa_core.rundir.bench_result import Machine
from nsa_core.terminal import tell
from nsa_core.train.card import peak_flops_per_s
from nsa_core.train.learner import Learner, choose_device, make_learner, set_up_torch
from nsa_core.train.step import StepResult

Attention = Literal["nsa", "dense"]
ATTENTIONS: tuple[Attention, ...] = ("nsa", "dense")


@dataclass(frozen=True)
class ModelRequest:
    """What to time.

    Attributes:
        model: Sizes; `attention` is replaced by each of `attentions`.
        attentions: Kinds of attention, timed one after the other at each length.
        lengths: Tokens of a row.
        tokens: Tokens of a step; a multiple of every length.
        warmup_steps: Steps before the first timed one; they compile.
        steps: Steps of one repetition.
        runs: Repetitions behind each median.
        runtime: Device, precision, kernels and compiler, as a run has them.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    attentions: tuple[Attention, ...] = ATTENTIONS
    lengths: tuple[int, ...] = (2048, 32768, 65536)
    tokens: int = 65536
    warmup_steps: int = 3
    steps: int = 5
    runs: int = 3
    runtime: RuntimeConfig = field(default_factory=lambda: RuntimeConfig(compile=True))

    def __post_init__(self) -> None:
        """Refuse what would time something else (ValueError)."""
        check_sizes(
            1,
            {
                "--length": self.lengths,
                "--tokens": (self.tokens,),
                "--steps": (self.steps,),
                "--runs": (self.runs,),
            },
        )
        for length in self.lengths:
            if self.tokens % length:
                message = f"a step of {self.tokens} tokens is no whole number of rows of {length}"
                raise ValueError(message)


@dataclass(frozen=True)
class ModelRow:
    """One kind of attention at one length.

    Attributes:
        attention: `nsa` or `dense`.
        T: Tokens of a row.
        tokens: Tokens of a step.
        num_parameters: Trained numbers.
        train_flops_per_token: Own FLOPs of this attention, forward and backward.
        tokens_per_s: Median over the repetitions.
        step_ms: One step at that rate.
        mfu: Share of the card's data-sheet peak; None on an unknown card or a CPU.
        tflops: Own FLOPs per second / 1e12.
        peak_gib: Most memory allocated in the timed steps; None on a CPU.
        spread: (fastest - slowest repetition) / median.
        first_step_s: Seconds of the first step, which compiles.
        first_loss: Loss of the first step, in nats.
        last_loss: Loss of the last timed step; the batch is always the same, so it must be lower.
        kernels: Which code computes each branch and the loss.
    """

    attention: Attention
    T: int
    tokens: int
    num_parameters: int
    train_flops_per_token: float
    tokens_per_s: float
    step_ms: float
    mfu: float | None
    tflops: float
    peak_gib: float | None
    spread: float
    first_step_s: float
    first_loss: float
    last_loss: float
    kernels: dict[str, str]


def measure_model(request: ModelRequest) -> Iterator[ModelRow]:
    """Time every kind of attention at every length.

    Raises:
        TrainerConfigurationError: If the device or the precision does not exist here.
        NoGoodStepError: If a step gave no usable loss or gradient.
    """
    for length in request.lengths:
        for attention in request.attentions:
            yield _measure_row(request, attention, length)


def run_config(request: ModelRequest, attention: Attention, length: int) -> RunConfig:
    """The configuration that the trainer would be given."""
    return RunConfig(
        recipe="bench",
        model=request.model.model_copy(update={"attention": attention}),
        data=DataConfig(source="synthetic", tokenizer="byte", pack_documents=False),
        batch=BatchConfig(seq_len=length, micro_batch=request.tokens // length),
        runtime=request.runtime,
    )


def random_batch(config: RunConfig) -> TokenBatch:
    """Uniform random ids, every row one document, every position with a target."""
    batch, generator = config.batch, torch.Generator().manual_seed(config.seed)
    ids = torch.randint(
        config.model.vocab_size, (batch.micro_batch, batch.seq_len + 1), generator=generator
    )
    num_targets = batch.micro_batch * batch.seq_len
    return TokenBatch(
        tokens_BT=ids[:, :-1].contiguous(),
        targets_BT=ids[:, 1:].contiguous(),
        cu_seqlens=batch.seq_len * torch.arange(batch.micro_batch + 1, dtype=torch.int32),
        max_seqlen=batch.seq_len,
        num_targets=num_targets,
        num_text_bytes=num_targets,
    )


class NoGoodStepError(RuntimeError):
    """A timed step updated nothing, so its time means nothing."""


def run_steps(learner: Learner, batch: TokenBatch, count: int) -> StepResult:
    """Take optimizer steps on one batch; returns the last.

    Raises:
        NoGoodStepError: If a step was skipped.
    """
    result = StepResult(float("nan"), float("nan"), "no step was taken")
    for _ in range(count):
        learner.model.train()
        result = learner.steps.run([batch], lambda _: None)
        if result.fault is not None:
            message = f"a step was skipped: {result.fault}"
            raise NoGoodStepError(message)
    return result


def _measure_row(request: ModelRequest, attention: Attention, length: int) -> ModelRow:
    config = run_config(request, attention, length)
    device = choose_device(config)
    set_up_torch(config, device)
    torch.compiler.reset()  # or the next length gets a graph for any length, as no run does
    steps = 1 + request.warmup_steps + request.runs * request.steps
    tell(
        f"timing {attention} at {length:,} tokens: {steps} steps of {request.tokens:,} on {device}"
    )
    learner = make_learner(config, device)
    batch = random_batch(config)
    began = time.perf_counter()
    first = run_steps(learner, batch, 1)
    first_step_s = time.perf_counter() - began
    last = run_steps(learner, batch, request.warmup_steps) if request.warmup_steps else first
    reset_peak(device)
    rates = []
    for _ in range(request.runs):
        began = _now(device)
        last = run_steps(learner, batch, request.steps)
        rates.append(request.steps * request.tokens / (_now(device) - began))
    rate = statistics.median(rates)
    flops = count_flops(config.model, length).train
    peak = peak_flops_per_s(device, request.runtime.precision)
    return ModelRow(
        attention=attention,
        T=length,
        tokens=request.tokens,
        num_parameters=learner.model.num_parameters(),
        train_flops_per_token=flops,
        tokens_per_s=rate,
        step_ms=1e3 * request.tokens / rate,
        mfu=rate * flops / peak if peak is not None else None,
        tflops=rate * flops / 1e12,
        peak_gib=allocated_gib(device),
        spread=(max(rates) - min(rates)) / rate,
        first_step_s=first_step_s,
        first_loss=first.loss,
        last_loss=last.loss,
        kernels=learner.model.kernel_paths,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


TABLE = Table(
    (
        Column("model", 6, "attention"),
        Column("T", 6, "T"),
        Column("tokens/s", 9, "tokens_per_s", ",.0f"),
        Column("step ms", 8, "step_ms", ".1f"),
        Column("TFLOP/s", 8, "tflops", ".1f"),
        Column("MFU", 7, "mfu", ".1%"),
        Column("GiB", 6, "peak_gib", ".1f"),
        Column("spread", 7, "spread", ".1%"),
        Column("first step s", 12, "first_step_s", ".1f"),
        Column("loss first -> last", 0, lambda r: f"{r.first_loss:.3f} -> {r.last_loss:.3f}"),
    )
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this bench."""
    add_repeatable(parser, "--attention", "default: both", choices=ATTENTIONS)
    add_repeatable(parser, "--length", "tokens of a row", type=int, metavar="T")
    add_count(parser, "--tokens", 65536, "tokens of a step")
    add_count(parser, "--runs", 3, "repetitions behind each median")
    add_count(parser, "--steps", 5, "steps of a repetition")
    add_repeatable(parser, "--set", "sizes, as in a run", default=[], metavar="KEY=VALUE")


def read_request(options: argparse.Namespace, *, is_card: bool) -> ModelRequest:
    """What the command line asks for; on a CPU in float32 and as written unless it says otherwise.

    Raises:
        ConfigError: If `--set` names what this bench does not follow.
    """
    for flag in options.set:
        _check_followed(parse_set(flag)[0])
    defaults = [
        f"runtime.compile={str(is_card).lower()}",
        f"runtime.precision={'bf16' if is_card else 'fp32'}",
    ]
    config = resolve("m7c-125m", sets=[*defaults, *options.set]).config
    return ModelRequest(
        model=config.model,
        attentions=tuple(options.attention or ATTENTIONS),
        lengths=tuple(options.length or (2048, 32768, 65536)),
        tokens=options.tokens,
        steps=options.steps,
        runs=options.runs,
        runtime=config.runtime,
    )


#: Read before the process begins, or about more cards than the one that is timed.
_NOT_FOLLOWED = (
    "runtime.allocator", "runtime.num_gpus", "runtime.num_pods", "runtime.cpu_ranks",
    "runtime.sharding", "runtime.collective_timeout_s",
)  # fmt: skip


def _check_followed(key: str) -> None:
    """Refuse a value that would change nothing here.

    Raises:
        ConfigError: If so.
    """
    if key == "model.attention":
        message = "--set model.attention: this bench times the kinds that --attention names"
        raise ConfigError(message)
    if not key.startswith(("model.", "runtime.")) or key in _NOT_FOLLOWED:
        message = (
            f"--set {key}: this bench times steps on one random batch, and follows no such "
            "setting; it follows model.* and runtime.*, and has --length and --tokens"
        )
        raise ConfigError(message)


def measure(options: argparse.Namespace, machine: Machine) -> Iterator[ModelRow]:
    """Rows of the command line.

    Raises:
        ConfigError: If `--set` names what this bench does not follow.
    """
    return measure_model(read_request(options, is_card=machine.card != "cpu"))


def find_untrained(rows: Sequence[Any]) -> str | None:
    """A model that cannot learn one batch by heart did not train: its speed says nothing."""
    for row in rows:
        if not row.last_loss < row.first_loss:
            return (
                f"{row.attention} at {row.T} tokens did not learn: the loss of one batch went from "
                f"{row.first_loss:.4f} to {row.last_loss:.4f}"
            )
    return None


BENCH = Bench(
    summary="whole training steps of the main model, NSA beside its dense control",
    needs_card=False,
    add_flags=add_flags,
    measure=measure,
    header=TABLE.header,
    format_row=TABLE.line,
    failure=find_untrained,
)
