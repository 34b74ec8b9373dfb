"""`python -m nsa_core.train --run-dir D`: train what D/manifest.json says, and nothing else."""

import argparse
import sys
from pathlib import Path

from nsa_core.env import set_before_torch
from nsa_core.train.attempt import run_attempt


def parse_arguments(arguments: list[str] | None = None) -> Path:
    """The run directory; an unknown flag is an error with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_core.train",
        description="Train what manifest.json in the run directory describes.",
        allow_abbrev=False,
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with manifest.json")
    found: Path = parser.parse_args(arguments).run_dir
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the attempt; returns an exit code of `TrainerExit`."""
    run_dir = parse_arguments(arguments)
    # Idle threads that spin take a tenfold speed from each other on a shared machine.
    set_before_torch("OMP_WAIT_POLICY", "PASSIVE")
    set_before_torch("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # needed by deterministic mode
    return run_attempt(run_dir)


if __name__ == "__main__":
    sys.exit(main())
