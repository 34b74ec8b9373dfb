"""`python -m nsa_core.evaluate needle --run DIR`: what the model of a run finds in long texts.

Prints a depth x length table, or JSON, and writes a picture where asked. Exit code 2 for flags that
cannot be used, 14 without the run's tokenizer, 15 without whole weights.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from nsa_core.config.base import one_line
from nsa_core.env import set_before_torch
from nsa_core.rundir.atomic import check_place, write_text
from nsa_core.rundir.exit import TrainerExit
from nsa_core.terminal import add_run_flags, run_to_exit_code, tell

if TYPE_CHECKING:
    from nsa_core.evaluate.needle import NeedleCell, NeedleTable

#: Every needle with its question fits into so many bytes, and so into as many tokens of any kind.
LEAST_TOKENS = 96
#: A longer text is a slip of the finger; it would be written in memory before anything is measured.
MOST_TOKENS = 2**20


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags; unknown ones end with exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m nsa_core.evaluate", allow_abbrev=False)
    needle = parser.add_subparsers(dest="what", required=True).add_parser(
        "needle", help="hide a number at several depths of long texts and ask for it at the end"
    )
    add = needle.add_argument
    add_run_flags(needle)
    add("--lengths", type=int, nargs="+", metavar="N", help="tokens of the texts")
    add("--trials", type=int, default=8, metavar="N", help="texts for each cell")
    add("--cut", action="store_true", help="evaluate with the gate of the selected branch at 0")
    add("--picture", type=Path, metavar="FILE", help="write a heat map as SVG")
    add("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, draw, and return the exit code."""
    arguments = parse_arguments(argv)
    set_before_torch("OMP_WAIT_POLICY", "PASSIVE")
    # torch reads the variable when it is imported, so it is imported after it.
    from nsa_core.evaluate.run_model import RunModelError

    try:
        if arguments.picture:
            check_place(arguments.picture)
        table, weights = measure(arguments)
        if arguments.picture:
            write_text(arguments.picture, picture(table, is_cut=arguments.cut))
            tell(f"picture: {arguments.picture}")
    except RunModelError as error:
        tell(f"error: {error}")
        return error.code
    except (ValueError, OSError) as error:
        tell(f"error: {one_line(error)}")
        return TrainerExit.CONFIGURATION
    if arguments.json:
        found = {"weights": weights, "is_cut": arguments.cut, "cells": table.as_json()}
        print(json.dumps(found, indent=2))  # noqa: T201 - the result
    else:
        print(as_text(table))  # noqa: T201 - the result
    return TrainerExit.FINISHED


def measure(arguments: argparse.Namespace) -> "tuple[NeedleTable, str]":
    """The table and the path of the weights it holds for."""
    from contextlib import ExitStack

    from nsa_core.evaluate.ablation import cut_branches
    from nsa_core.evaluate.needle import measure_needles
    from nsa_core.evaluate.run_model import open_by_flags

    check_sizes(arguments)
    opened = open_by_flags(arguments)
    config = opened.weights.config
    lengths = arguments.lengths or default_lengths(config.batch.seq_len)
    with ExitStack() as stack:
        if arguments.cut:
            stack.enter_context(cut_branches(opened.model, "selected"))
        table = measure_needles(
            opened.model,
            opened.tokenizer,
            config.runtime.precision if opened.device.type == "cuda" else "fp32",
            lengths=sorted(set(lengths)),
            num_trials=arguments.trials,
        )
    return table, str(opened.weights.path)


def check_sizes(arguments: argparse.Namespace) -> None:
    """Refuse what could never be measured, before anything is loaded.

    Raises:
        ValueError: If so; the message names the flag and its value.
    """
    shortest = min(arguments.lengths or [LEAST_TOKENS])
    if shortest < LEAST_TOKENS:
        message = (
            f"--lengths must be at least {LEAST_TOKENS}, or a needle may not fit, got {shortest}"
        )
        raise ValueError(message)
    longest = max(arguments.lengths or [LEAST_TOKENS])
    if longest > MOST_TOKENS:
        message = f"--lengths must be at most {MOST_TOKENS:,}, got {longest}"
        raise ValueError(message)
    if arguments.trials < 1:
        message = f"--trials must be at least 1, got {arguments.trials}"
        raise ValueError(message)


def default_lengths(trained: int) -> list[int]:
    """A quarter, a half and all of the trained length, as far as a needle fits."""
    return [length for length in (trained // 4, trained // 2) if length >= LEAST_TOKENS] + [trained]


def as_text(table: "NeedleTable") -> str:
    """Right answers and the nats the needle saves; a star where no chain of windows reaches it."""
    lines = [f"{'depth':>8}" + "".join(f"{length:>18}" for length in table.lengths)]
    for depth in table.depths:
        cells = (table.cell(length, depth) for length in table.lengths)
        lines.append(f"{100 * depth:>6.0f} %" + "".join(_cell_text(cell) for cell in cells))
    lines.append("right answers, and nats per token the needle saves; * beyond all layers' windows")
    return "\n".join(lines)


def _cell_text(cell: "NeedleCell") -> str:
    star = "*" if cell.is_beyond_window else " "
    return f"{100 * cell.accuracy:>7.0f} %{cell.saved_nats:>+7.2f} {star}"


def picture(table: "NeedleTable", *, is_cut: bool) -> str:
    """The table as an SVG heat map."""
    from nsa_core.evaluate.heat_map import HeatMap, draw

    grid = [[table.cell(length, depth) for length in table.lengths] for depth in table.depths]
    cut = ", selected branch cut" if is_cut else ""
    return draw(
        HeatMap(
            title=f"Needle: right answers{cut} (* beyond all layers' windows)",
            row_title="depth",
            column_title="tokens",
            rows=[f"{100 * depth:.0f} %" for depth in table.depths],
            columns=[f"{length:,}" for length in table.lengths],
            shares=[[cell.accuracy for cell in row] for row in grid],
            labels=[
                [
                    f"{100 * cell.accuracy:.0f} %{' *' if cell.is_beyond_window else ''}"
                    for cell in row
                ]
                for row in grid
            ],
        )
    )


if __name__ == "__main__":
    raise SystemExit(run_to_exit_code(main))
