"""`python -m tests.faults`: plant every fault of the list and print which ones the tests notice.

Exit code 0 if every fault is noticed or equivalent, 1 if one is green or could not be judged.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.faults.faults import LISTS, Fault, read_faults
from tests.faults.harness import Job, Ran, run_jobs, warm_up
from tests.faults.judge import (
    Verdict,
    baseline_jobs,
    count_by_kind,
    fault_jobs,
    judge,
    table,
)
from tests.faults.record import page_rows, read_record, write_record

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags; unknown ones end with exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="kinds or ids; all without one")
    parser.add_argument("--ci", action="store_true", help="only the faults marked for CI")
    parser.add_argument("--gpu", action="store_true", help="only the faults that need a card")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults at a time")
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="of one fault")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to a file as well")
    parser.add_argument("--record", action="store_true", help="enter what is noticed in the record")
    parser.add_argument("--rows", action="store_true", help="print the rows of docs/proof.md only")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--lists", type=Path, default=LISTS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def choose(faults: list[Fault], arguments: argparse.Namespace) -> list[Fault]:
    """The faults that the flags ask for; those for a card only with `--gpu`."""
    words = set(arguments.words)
    return [
        fault
        for fault in faults
        if fault.gpu == arguments.gpu
        and (fault.ci or not arguments.ci)
        and (not words or fault.kind in words or fault.id in words)
    ]


def plant(faults: list[Fault], arguments: argparse.Namespace) -> list[Verdict]:
    """Run the tests without a fault and with each of them; progress goes to stderr."""
    jobs, verdicts = fault_jobs(faults, arguments.root)
    planted = [fault for fault in faults if fault.id in {job.name for job in jobs}]
    baseline = baseline_jobs(planted)
    total = len(baseline) + len(jobs)
    done: list[str] = []

    def tell(job: Job, ran: Ran) -> None:
        done.append(job.name)
        sys.stderr.write(f"{len(done)}/{total} {ran.seconds:5.1f} s {job.name}\n")

    with tempfile.TemporaryDirectory(prefix="nsa-faults-") as folder:
        ran = run_jobs(
            [*baseline, *jobs],
            arguments.root,
            Path(folder),
            workers=max(1, arguments.jobs),
            limit_s=arguments.limit,
            tell=tell,
        )
    return verdicts + [judge(fault, ran) for fault in planted]


def main(argv: list[str] | None = None) -> int:
    """Plant the faults that the flags ask for, print the result and return the exit code."""
    arguments = parse_arguments(argv)
    known = read_faults(arguments.lists)
    if arguments.rows:
        sys.stdout.write(f"{page_rows(known, read_record())}\n")
        return 0
    faults = choose(known, arguments)
    if not faults:
        sys.stderr.write("error: no fault of the list is meant by these words\n")
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: report what was judged
    warm_up()
    verdicts = plant(faults, arguments)
    document = json.dumps(
        {
            "kinds": count_by_kind(verdicts),
            "faults": [asdict(verdict) for verdict in verdicts],
        },
        indent=1,
    )
    if arguments.record:
        write_record(known, verdicts)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n")
    sys.stdout.write(f"{document if arguments.json else table(verdicts)}\n")
    return int(any(verdict.status in ("green", "error") for verdict in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
