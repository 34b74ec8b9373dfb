"""`python -m nsa_core.bench kernels`: a table on standard output, JSON where asked."""

import argparse
import sys
from pathlib import Path

import torch

from nsa_core.bench.cases import SHAPES
from nsa_core.bench.kernels import (
    HEADER,
    Request,
    Row,
    describe_machine,
    format_row,
    measure_rows,
    write_result,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m nsa_core.bench", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    kernels = commands.add_parser("kernels", help="whole NSA and its branches beside dense SDPA")
    kernels.add_argument("--shape", action="append", choices=sorted(SHAPES), help="repeatable")
    kernels.add_argument("--length", action="append", type=int, help="tokens of a document")
    kernels.add_argument("--tokens", type=int, default=65536, help="tokens of a call")
    kernels.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    kernels.add_argument("--runs", type=int, default=3, help="runs behind each median")
    kernels.add_argument("--json", type=Path, help="file to write")
    kernels.add_argument("--commit", default="unknown", help="commit to record in the JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the bench; returns the exit code."""
    options = parse_arguments(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("error: the kernel bench needs a CUDA device, and there is none\n")
        return 1
    request = Request(
        shapes=tuple(options.shape or sorted(SHAPES)),
        lengths=tuple(options.length or (2048, 8192, 32768, 65536)),
        tokens=options.tokens,
        dtype=DTYPES[options.dtype],
        runs=options.runs,
    )
    machine = describe_machine()
    sys.stdout.write("  ".join(f"{name} {value}" for name, value in machine.items()) + "\n")
    sys.stdout.write(HEADER + "\n")
    rows: list[Row] = []
    for row in measure_rows(request):
        rows.append(row)
        sys.stdout.write(format_row(row) + "\n")
        sys.stdout.flush()
        if options.json is not None:
            command = " ".join(["python -m nsa_core.bench", *arguments])
            write_result(options.json, command, options.commit, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
