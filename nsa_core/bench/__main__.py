"""`python -m nsa_core.bench WHAT`: measure on the device that is here, as a table and as JSON.

Exit code 0, 2 for flags that cannot be used, 9 where the rows prove something wrong, 11 without the
card that a bench needs, or the disk.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nsa_core.bench.command import Bench, without_folders
from nsa_core.config.base import ConfigError, disk_advice, one_line
from nsa_core.env import set_before_torch
from nsa_core.rundir.atomic import check_place, write_text
from nsa_core.rundir.bench_result import BenchResult, Machine
from nsa_core.rundir.redaction import redact
from nsa_core.terminal import run_to_exit_code, tell
from nsa_core.train.failure import TrainerConfigurationError

#: Where each bench lives; only the one that is asked for is imported.
BENCHES: Mapping[str, str] = {
    "compare": "nsa_core.bench.compare",
    "decode": "nsa_core.bench.decode_speed",
    "kernels": "nsa_core.bench.kernels",
    "model": "nsa_core.bench.step_speed",
    "scale": "nsa_core.bench.scale",
    "validate": "nsa_core.bench.validate",
    "recall": "nsa_core.recall.bench",
}
EXIT_USAGE, EXIT_FAILED, EXIT_LACKING = 2, 9, 11
_PROGRAM = "python -m nsa_core.bench"


def load_bench(name: str) -> Bench:
    """Import a bench by its word."""
    found: Bench = importlib.import_module(BENCHES[name]).BENCH
    return found


def parse_arguments(argv: Sequence[str], name: str, bench: Bench) -> argparse.Namespace:
    """Parse the flags of one bench; unknown ones end with exit code 2."""
    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} {name}", description=bench.summary, allow_abbrev=False
    )
    bench.add_flags(parser)
    add = parser.add_argument
    add("--json", metavar="FILE", default="", help="write the result as JSON; `-` for stdout")
    add("--commit", default="unknown", metavar="SHA", help="commit to record in the JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run a bench; returns the exit code."""
    words = argparse.ArgumentParser(
        prog=_PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("what", choices=sorted(BENCHES))
    name = words.parse_args(argv[:1]).what
    set_before_torch("OMP_WAIT_POLICY", "PASSIVE")
    bench = load_bench(name)
    options = parse_arguments(argv[1:], name, bench)
    import torch  # reads the variable above when it is imported

    if bench.needs_card and not torch.cuda.is_available():
        tell(f"error: `bench {name}` needs a CUDA card, and torch sees none here")
        return EXIT_LACKING
    try:
        if options.json not in {"", "-"}:
            _prepare_place(Path(options.json))
    except OSError as error:
        tell(f"error: --json {one_line(error)}")
        return EXIT_USAGE
    try:
        return _run(bench, name, options, shown_command(argv, options.json))
    except TrainerConfigurationError as error:
        hint = f"; {error.hint[:1].lower()}{error.hint[1:]}" if error.hint else ""
        tell(f"error: {error}{hint}")
        return EXIT_USAGE
    except ValidationError as error:
        tell(f"error: {one_line(error)}")
        return EXIT_USAGE
    except (ConfigError, ValueError) as error:
        tell(f"error: {error}")
        return EXIT_USAGE
    except BrokenPipeError:
        raise  # the reader of the table left, and no disk is to blame
    except OSError as error:
        tell(f"error: {one_line(error)}; {disk_advice(error)}, then repeat it")
        return EXIT_LACKING


def _run(bench: Bench, name: str, options: argparse.Namespace, command: str) -> int:
    """Measure row by row; what was measured before a crash is in the file already.

    No table begins before its first row: flags that cannot be used show when it is asked for.
    """
    from nsa_core.bench.measure import describe_machine

    result = BenchResult(
        **describe_machine().model_dump(),
        bench=name,
        commit=options.commit,
        command=command,
        at_unix_s=round(time.time(), 1),
        rows=[],
    )
    shown_on = sys.stderr if options.json == "-" else sys.stdout
    rows: list[Any] = []
    for row in bench.measure(options, result):
        if not rows:
            print(machine_line(result), bench.header, sep="\n", file=shown_on)  # the table
        rows.append(row)
        print(bench.format_row(row), file=shown_on, flush=True)  # the table
        result = result.model_copy(update={"rows": [*result.rows, asdict(row)]})
        if options.json not in {"", "-"}:
            _keep(Path(options.json), result)
    if options.json == "-":
        print(_as_json(result))  # noqa: T201 - the result
    failure = bench.failure(rows)
    if failure is None:
        return 0
    tell(f"error: {failure}")
    return EXIT_FAILED


def shown_command(argv: Sequence[str], target: str) -> str:
    """The command as it is recorded: paths without the folders of this machine, no secrets."""
    words = [word.replace(target, Path(target).name) if target else word for word in argv]
    return redact(" ".join([_PROGRAM, *map(without_folders, words)]))


def machine_line(machine: Machine) -> str:
    """What is known of the machine, in one line."""
    known = machine.model_dump(include=set(Machine.model_fields), exclude_none=True)
    return "  ".join(f"{name} {value}" for name, value in known.items())


def _prepare_place(path: Path) -> None:
    """Make the folder of the result, and refuse a place where none can be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_place(path)


def _keep(path: Path, result: BenchResult) -> None:
    write_text(path, _as_json(result) + "\n")


def _as_json(result: BenchResult) -> str:
    return json.dumps(result.model_dump(mode="json"), indent=1)


if __name__ == "__main__":
    sys.exit(run_to_exit_code(lambda: main(sys.argv[1:])))
