"""`python -m nsa_ops.pod.node_job`: one node of a job of an engine, such as Slurm or Kubernetes.

Each node has a run directory of its own, `…/node_1/runs/RUN`, on a volume that all nodes see. Node
0 begins attempt 1 or the next one, and the others join it. The exit code tells the engine what to
do: 0 nothing is left to do, 75 start the job again, anything else is final.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from nsa_core.config.base import one_line
from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, Node, RunManifest
from nsa_ops.pod.job_attempt import (
    JobPlace,
    begin_attempt,
    find_fault,
    find_finished,
    join_first_node,
    judge_end,
)
from nsa_ops.pod.keep_watched import start_watchdog
from nsa_ops.pod.messages import ReplyCode
from nsa_ops.pod.runner import TRAINER_MODULE, StartRefusedError, run_attempt

#: A watchdog that looks at a run every few seconds has seen its end by then.
WATCHDOG_S = 30.0
_STOP_SIGNALS = ("TERM", "INT", "USR1", "USR2")


def run_node(place: JobPlace, manifest: RunManifest, module: str, early: signal.Signals) -> int:
    """Begin or join the attempt, train, and return the code for the engine.

    Raises:
        StartRefusedError: If it cannot be begun or joined; its code is final.
    """
    finished = find_finished(place)
    if finished is not None:
        _say(f"{manifest.run_id} has finished: {finished.reason}")
        return TrainerExit.FINISHED
    own = begin_attempt(place, manifest) if place.rank == 0 else join_first_node(place)
    _say(f"node {place.rank} of {place.num_nodes}: attempt {own.attempt} of {own.run_id}")
    watchdog = start_watchdog(place.run, module)
    try:
        run_attempt(place.run, module, restarted_by="engine", early=[early])
    except (StartRefusedError, OSError):
        watchdog.terminate()
        raise
    _let_end(watchdog)
    code, why = judge_end(place, own)
    _say(f"{why}; code {code} for the engine")
    return code


def _let_end(watchdog: "subprocess.Popen[bytes]") -> None:
    """The watchdog ends by itself soon after the attempt; one that does not is ended."""
    try:
        watchdog.wait(WATCHDOG_S)
    except subprocess.TimeoutExpired:
        watchdog.terminate()


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _end_before_training(number: int, _frame: object) -> NoReturn:
    """Nothing was trained since the last checkpoint: the job may be started again."""
    _say(f"stopped by {signal.Signals(number).name} before the training began")
    sys.exit(TrainerExit.RESUMABLE)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nsa_ops.pod.node_job", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="of this node")
    parser.add_argument("--manifest", type=Path, required=True, help="what attempt 1 trains")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="", help="of node 0, as the others reach it")
    parser.add_argument("--master-port", type=int, default=0)
    parser.add_argument("--stop-signal", choices=_STOP_SIGNALS, default="TERM")
    parser.add_argument("--module", default=TRAINER_MODULE, help="Python module that trains")
    return parser.parse_args(arguments)


def _read(given: argparse.Namespace) -> tuple[JobPlace, RunManifest]:
    try:
        manifest = read_model(RunManifest, given.manifest)
    except (OSError, ValueError) as error:
        message = f"{given.manifest} cannot be used as a manifest: {one_line(error)}"
        raise StartRefusedError(message, ReplyCode.USAGE, "nsa-ops export writes one") from error
    run, num_nodes = RunDir(given.run_dir.resolve()), given.num_nodes
    node = Node(rank=given.node_rank, address=given.master_addr, port=given.master_port)
    if fault := find_fault(run, manifest.run_id, node, num_nodes):
        raise StartRefusedError(
            fault, ReplyCode.USAGE, "Compare with the script that nsa-ops export writes"
        )
    return JobPlace(run, node if num_nodes > 1 else Node(), num_nodes), manifest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one node of a job; see the module for the codes."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    given = _parse(arguments)
    early = signal.Signals[f"SIG{given.stop_signal}"]
    for number in (signal.SIGTERM, signal.SIGINT, early):
        signal.signal(number, _end_before_training)
    try:
        return run_node(*_read(given), given.module, early)
    except StartRefusedError as refusal:
        _say(f"error: {refusal}" + (f"\nhint: {refusal.hint}" if refusal.hint else ""))
        return refusal.code
    except ManifestError as error:
        _say(f"error: {error}")
        return ReplyCode.USAGE
    except ValidationError as error:
        _say(f"error: the manifest and these flags do not go together: {one_line(error)}")
        return ReplyCode.USAGE
    except OSError as error:
        _say(f"error: {error.filename or given.run_dir}: {error.strerror or error}")
        return ReplyCode.LOCAL_RESOURCE


if __name__ == "__main__":
    sys.exit(main())
