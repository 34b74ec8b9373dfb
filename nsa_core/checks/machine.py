"""`python -m nsa_core.checks.machine`: use this machine's cards, disk and data, and print JSON.

A part that fails is a line in `problems`, never the end of the others. Exit code 0, or 2 for flags
that cannot be used; what was measured is judged by who asked.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nsa_core.checks.__main__ import read_config
from nsa_core.config.base import ConfigError
from nsa_core.config.run import RunConfig
from nsa_core.env import set_before_torch
from nsa_core.rundir.report import AllReduceSpeed, CardSpeed, MachineSpeed
from nsa_core.terminal import run_to_exit_code, tell

EXIT_USAGE = 2
_MAX_SAID = 300


class _Measuring:
    """Collects parts, each with its time or its problem."""

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """Measure one part; None if it failed."""
        began_s = time.monotonic()
        try:
            return measure()
        except (RuntimeError, OSError, ValueError) as error:  # CUDA, disk, data: all of theirs
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.problems[name] = lines[0][:_MAX_SAID]
            return None
        finally:
            self.seconds[name] = round(time.monotonic() - began_s, 2)


def measure_machine(config: RunConfig, folder: Path) -> MachineSpeed:
    """Measure everything that this configuration would use."""
    import torch

    from nsa_core.checks.host_speed import measure_disk, read_first_batch, try_debugger

    measuring = _Measuring()
    denied = measuring.part("debugger", try_debugger)
    if denied:
        measuring.problems["debugger"] = denied
    disk = measuring.part("disk", lambda: measure_disk(folder))
    first_batch = measuring.part("first_batch", lambda: read_first_batch(config))
    cards, all_reduce = ([], None) if config.runtime.device == "cpu" else _cards(config, measuring)
    return MachineSpeed(
        torch_version=torch.__version__,
        can_debug=None if denied is None else not denied,
        disk=disk,
        first_batch=first_batch,
        cards=cards,
        all_reduce=all_reduce,
        problems=measuring.problems,
        seconds=measuring.seconds,
    )


def _cards(
    config: RunConfig, measuring: _Measuring
) -> tuple[list[CardSpeed], AllReduceSpeed | None]:
    import torch

    from nsa_core.checks.card_speed import measure_all_reduce, measure_card
    from nsa_core.evaluate.device import COMPUTE_DTYPE

    if not torch.cuda.is_available():
        measuring.problems["cards"] = "torch finds no card"
        return [], None
    dtype, count = COMPUTE_DTYPE[config.runtime.precision], torch.cuda.device_count()
    cards = [
        measuring.part(f"gpu{index}", partial(measure_card, index, dtype)) for index in range(count)
    ]
    summed = None
    if count > 1:
        summed = measuring.part("all_reduce", lambda: measure_all_reduce(count))
    return [card for card in cards if card is not None], summed


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags; unknown ones end with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_core.checks.machine", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--config", metavar="FILE", default="-", help="RunConfig as JSON, `-` for stdin"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    arguments = parse_arguments(argv)
    set_before_torch("OMP_WAIT_POLICY", "PASSIVE")
    try:
        config = read_config(arguments.config, "cpu")
    except ConfigError as error:
        tell(f"error: {error}")
        return EXIT_USAGE
    found = measure_machine(config, arguments.folder)
    print(found.model_dump_json(), flush=True)  # noqa: T201 - the result
    return 0


if __name__ == "__main__":
    # A reader that hangs in the network must not keep the interpreter from ending.
    os._exit(run_to_exit_code(main))
