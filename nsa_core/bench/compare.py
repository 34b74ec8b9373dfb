"""Train NSA and the dense control through the trainer, on the same data, and set them side by side.

Both runs have the same tokens, seed, steps and everything else but the attention; each is a process
of its own, as `nsa-ops launch` would start it, and everything is read from its run directory.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nsa_core.bench.command import Bench, tell
from nsa_core.bench.run_row import RunRow, read_data_facts, read_run_row
from nsa_core.config.base import ConfigError
from nsa_core.config.recipe import ResolvedConfig, parse_set, resolve
from nsa_core.config.run import RunConfig
from nsa_core.data.reporting import DataError
from nsa_core.data.staging import stage
from nsa_core.env import trainer_environment
from nsa_core.rundir.bench_result import Machine
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest

ATTENTIONS = ("nsa", "dense")
#: NSA may be so much worse on held-out text before the comparison counts as failed.
MAX_EXCESS_BITS_PER_BYTE = 0.02
_LOG_TAIL_LINES = 20


class RunFailedError(ValueError):
    """A run of the comparison did not finish; the message holds the end of its log."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this bench."""
    add = parser.add_argument
    add("--recipe", default="tiny-cpu", help="recipe of both runs")
    add(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a value; repeatable"
    )
    add(
        "--root", type=Path, default=Path("compare"), metavar="DIR", help="folder for runs and data"
    )


def measure(options: argparse.Namespace, machine: Machine) -> Iterator[RunRow]:
    """Stage the text once, train one after the other, and yield what each run says.

    Raises:
        ConfigError: If the configuration cannot be used, or the folder holds runs already.
        ValueError: If the text cannot be staged.
        RunFailedError: If a run does not finish.
    """
    del machine
    root = options.root.resolve()
    chosen = {
        attention: (_free_run(root, attention), _resolve(options, attention))
        for attention in ATTENTIONS
    }
    config = chosen["nsa"][1].config
    check_curve(config)
    tell(f"staging the text below {root / config.data.cache_dir}")
    try:
        data = read_data_facts(stage(config.data, root, config.seed))
    except DataError as error:
        message = f"{error.message}; {error.hint}"
        raise ValueError(message) from error
    for run, resolved in chosen.values():
        write_run(run, resolved)
        tell(f"training {run.run_id} to step {config.schedule.steps}; its log is {run.log}")
        train(run, resolved.config.runtime.allocator)
        yield read_run_row(run, data, tuple(options.set))


def check_curve(config: RunConfig) -> None:
    """Refuse runs that would log no step: they would have no losses to compare.

    Raises:
        ConfigError: If so.
    """
    steps, every = config.schedule.steps, config.telemetry.log_every
    if steps < every:
        message = (
            f"schedule.steps {steps} is below telemetry.log_every {every}: no step would be "
            "logged, and none compared; add --set telemetry.log_every=1"
        )
        raise ConfigError(message)


def _resolve(options: argparse.Namespace, attention: str) -> ResolvedConfig:
    if any(parse_set(flag)[0] == "model.attention" for flag in options.set):
        message = "--set model.attention: this bench trains both kinds of attention"
        raise ConfigError(message)
    return resolve(options.recipe, sets=[*options.set, f"model.attention={attention}"])


def _free_run(root: Path, attention: str) -> RunDir:
    run = RunDir(root / "runs" / f"compare-{attention}")
    if run.root.exists():
        message = f"{run.root} exists already; name another folder with --root, or remove it"
        raise ConfigError(message)
    return run


def write_run(run: RunDir, resolved: ResolvedConfig) -> None:
    """The run directory that the trainer is given."""
    run.root.mkdir(parents=True)
    write_manifest(
        run,
        RunManifest(
            run_id=run.run_id,
            config=resolved.config,
            origins=resolved.origins,
            config_sha256=resolved.sha256,
            created_unix_s=time.time(),
        ),
    )


def train(run: RunDir, allocator: str) -> None:
    """Run the trainer to its end.

    Raises:
        RunFailedError: If it ends with another code than that of a finished schedule.
    """
    done = subprocess.run(
        [sys.executable, "-m", "nsa_core.train", "--run-dir", str(run.root)],
        env=trainer_environment(allocator),
        stdout=subprocess.DEVNULL,  # the run's own log has it
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != TrainerExit.FINISHED:
        tail = (
            run.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            if run.log.exists()
            else []
        )
        message = f"{run.run_id} ended with code {done.returncode}:\n" + "\n".join(tail)
        raise RunFailedError(message)


HEADER = (
    f"{'run':>6} {'steps':>6} {'tokens':>11} {'parameters':>11} {'tokens/s':>9} {'MFU':>6} "
    f"{'peak MiB':>8} {'wall s':>7} {'goodput':>7} {'loss':>7} {'bits/byte':>9}"
)


def format_row(row: RunRow) -> str:
    """One line of the table; loss and bits per byte are those of the last validation."""
    rate = "n/a" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
    mfu = "n/a" if row.mfu is None else f"{row.mfu:.1%}"
    peak = "n/a" if row.peak_mib is None else str(row.peak_mib)
    return (
        f"{row.attention:>6} {row.steps:>6} {row.tokens:>11,} {row.num_parameters:>11,} {rate:>9} "
        f"{mfu:>6} {peak:>8} {row.wall_s:>7.1f} {row.goodput:>7.1%} {row.validation[-1][1]:>7.4f} "
        f"{row.bits_per_byte:>9.4f}"
    )


def find_excess(rows: Sequence[Any]) -> str | None:
    """Why the comparison failed: NSA is clearly worse, or the held-out text was not held out."""
    found = {row.attention: row for row in rows}
    if any(row.data.shared_documents for row in rows):
        return "documents of the validation split are in the training split as well"
    if set(found) != set(ATTENTIONS):
        return None
    excess = found["nsa"].bits_per_byte - found["dense"].bits_per_byte
    if excess <= MAX_EXCESS_BITS_PER_BYTE:
        return None
    return (
        f"NSA has {excess:+.4f} bits per byte against dense on held-out documents, and at most "
        f"{MAX_EXCESS_BITS_PER_BYTE:+.2f} is allowed"
    )


BENCH = Bench(
    summary="NSA and the dense control trained on the same text, to the same step",
    needs_card=False,
    add_flags=add_flags,
    measure=measure,
    header=HEADER,
    format_row=format_row,
    failure=find_excess,
)
