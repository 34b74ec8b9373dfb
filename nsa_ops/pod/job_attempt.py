"""Which attempt a node of an engine's job takes part in, and what its end means for the engine."""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nsa_core.config.recipe import config_sha256
from nsa_core.config.run import RunConfig
from nsa_core.rundir import events
from nsa_core.rundir.exit import ExitRecord, TrainerExit, read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import (
    ManifestError,
    Node,
    RunManifest,
    new_attempt_id,
    read_manifest,
    write_manifest,
)
from nsa_ops.pod.attempts import make_run, next_attempt
from nsa_ops.pod.ending import (
    RESTARTABLE,
    RESTARTED,
    RestartDecision,
    decide_after,
    write_missing_exit,
)
from nsa_ops.pod.join import join_attempt
from nsa_ops.pod.messages import JoinAttemptAction, NextAttemptAction, Reply, ReplyCode
from nsa_ops.pod.processes import LockHeldError, hold_lock, read_processes
from nsa_ops.pod.rank_ending import LOST_ELSEWHERE
from nsa_ops.pod.read_run import list_checkpoint_facts, newest_whole
from nsa_ops.pod.runner import StartRefusedError
from nsa_ops.pod.trainer_group import is_trainer_running

TIMEOUT = 8
_POLL_S = 1.0
_CONNECT_S = 3.0
#: The other nodes have recorded their ends by then.
_OTHERS_S = 30.0


@dataclass(frozen=True)
class JobPlace:
    """Where one node stands in a job.

    Attributes:
        run: Run directory of this node.
        node: Its rank, and where the ranks meet.
        num_nodes: Nodes of the job.
        wait_s: Longest wait for node 0.
    """

    run: RunDir
    node: Node
    num_nodes: int
    wait_s: float = 900.0

    @property
    def rank(self) -> int:
        """Number of this node."""
        return self.node.rank

    def run_of(self, rank: int) -> RunDir:
        """The run directory of another node of the job."""
        if rank == self.rank:
            return self.run
        shared = self.run.root.parent.parent.parent
        return RunDir(shared / f"node_{rank}" / "runs" / self.run.root.name)


def find_fault(run: RunDir, run_id: str, node: Node, num_nodes: int) -> str:
    """Why an engine's variables describe no node of a job; empty if they do; pure."""
    if node.rank >= num_nodes:
        return f"--node-rank is {node.rank} and --num-nodes {num_nodes}: nodes are counted from 0"
    if run.root.name != run_id:
        return f"--run-dir ends in {run.root.name}, and the manifest is of run {run_id}"
    if num_nodes == 1:
        return ""
    if not node.address or not node.port:
        return (
            f"--master-addr is {node.address!r} and --master-port {node.port}: {num_nodes} nodes "
            "need the address of node 0 and a free port there"
        )
    wanted = f"node_{node.rank}/runs/{run_id}"
    if not run.root.as_posix().endswith(f"/{wanted}"):
        return f"--run-dir is {run.root}; of {num_nodes} nodes it has to end in {wanted}"
    return ""


def find_finished(place: JobPlace) -> ExitRecord | None:
    """The end of the run on node 0, if it has finished: nothing is left to do on any node."""
    try:
        ended = read_exit(place.run_of(0))
    except OSError:
        return None
    return ended if ended is not None and ended.code == TrainerExit.FINISHED else None


def begin_attempt(place: JobPlace, manifest: RunManifest) -> RunManifest:
    """Begin attempt 1 from a manifest, or the next attempt of a run that is there; node 0 only.

    Raises:
        StartRefusedError: If something of the run still lives, or the manifest is of another run.
    """
    run = place.run
    if not run.root.exists():
        identity = {"attempt_id": manifest.attempt_id or new_attempt_id()}
        first = _placed(manifest.model_copy(update=identity), place)
        if make_run(run, first):
            return first
    current = read_manifest(run)
    if current.run_id != manifest.run_id:
        message = f"{run.root} holds run {current.run_id}, and the manifest is of {manifest.run_id}"
        raise StartRefusedError(message, ReplyCode.CONFLICT, "Choose another folder")
    ended = _end_of(run, current)
    if ended is None:
        return _begin_unstarted(run, _placed(current, place))
    return _begin_next(place, current, ended)


def _placed(manifest: RunManifest, place: JobPlace) -> RunManifest:
    """The manifest for this node and this number of nodes; the tokens of a step stay the same.

    Raises:
        pydantic.ValidationError: If the batch does not divide among the ranks.
    """
    changed: dict[str, object] = {"node": place.node}
    if manifest.config.runtime.num_pods != place.num_nodes:
        values = manifest.config.model_dump()
        values["runtime"]["num_pods"] = place.num_nodes
        config = RunConfig.model_validate(values)
        changed |= {"config": config, "config_sha256": config_sha256(config)}
    return manifest.model_copy(update=changed)


def _end_of(run: RunDir, current: RunManifest) -> ExitRecord | None:
    """How the current attempt ended, recorded now if its node went down; None if it never began."""
    ended = read_exit(run, current.attempt)
    record = read_processes(run, current.attempt)
    if ended is not None or record is None or record.trainer is None:
        return ended
    if is_trainer_running(run, record):
        message = f"a trainer of {run.run_id} attempt {record.attempt} still runs on this node"
        raise StartRefusedError(message, ReplyCode.CONFLICT, "End that job first")
    with _locked(run):
        return write_missing_exit(run, current)


@contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    try:
        with hold_lock(run.runner_lock):
            yield
    except LockHeldError as error:
        message = f"a runner of {run.run_id} is still alive on one of the nodes"
        raise StartRefusedError(message, ReplyCode.CONFLICT, "End that job first") from error


def _begin_unstarted(run: RunDir, wanted: RunManifest) -> RunManifest:
    """An attempt that no process was started for: only its place may be another one."""
    if wanted != read_manifest(run):
        with _locked(run):
            write_manifest(run, wanted)
    return wanted


def _begin_next(place: JobPlace, current: RunManifest, ended: ExitRecord) -> RunManifest:
    run = place.run
    decision = decide_after(run, current, ended, by="engine")
    wanted = _placed(current, place)
    changes = {
        "resume": "auto", "config": wanted.config, "config_sha256": wanted.config_sha256,
        "node": wanted.node,
    }  # fmt: skip
    by = "engine" if decision.restart else "operator"  # who starts a job again that had stopped
    asked = NextAttemptAction(
        run_dir=run.root, from_attempt=current.attempt, changes=changes, by=by
    )
    new = _taken(next_attempt(asked))
    if decision.restart:
        events.record(
            run, kind=RESTARTED, by="engine", attempt=new.attempt,
            message=f"attempt {new.attempt} begins because {decision.why}",
            facts={"checkpoint_step": newest_whole(list_checkpoint_facts(run))},
        )  # fmt: skip
    return new


def _taken(reply: Reply) -> RunManifest:
    if reply.code != ReplyCode.OK or reply.manifest is None:
        raise StartRefusedError(reply.message, reply.code, reply.hint or "See the run directory")
    return reply.manifest


def join_first_node(place: JobPlace, sleep: Callable[[float], None] = time.sleep) -> RunManifest:
    """Wait until node 0 trains an attempt that this node has not been in, and join it.

    Raises:
        StartRefusedError: If that does not happen in time.
    """
    end = time.monotonic() + place.wait_s
    while time.monotonic() < end:
        found = _find_begun(place)
        if found is not None:
            manifest = found.model_copy(update={"node": place.node})
            return _taken(
                join_attempt(JoinAttemptAction(run_dir=place.run.root, manifest=manifest))
            )
        sleep(_POLL_S)
    message = (
        f"node 0 has begun no attempt within {place.wait_s:.0f} s: looked for "
        f"{place.run_of(0).process}, and for {place.node.address} port {place.node.port}"
    )
    raise StartRefusedError(
        message, TIMEOUT, "See the output of node 0; all nodes have to see one volume"
    )


def _find_begun(place: JobPlace) -> RunManifest | None:
    """The attempt that node 0 trains now, if this node has not been in it.

    That torchrun of node 0 listens tells it from one that a lost job has left behind.
    """
    first = place.run_of(0)
    try:
        manifest = read_manifest(first)
    except (ManifestError, OSError):
        return None
    record = read_processes(first, manifest.attempt)
    if record is None or record.trainer is None or read_exit(first, manifest.attempt) is not None:
        return None
    own = read_processes(place.run, manifest.attempt)
    has_been_in = own is not None and own.attempt_id == manifest.attempt_id
    return manifest if not has_been_in and _listens(place.node) else None


def _listens(node: Node) -> bool:
    try:
        with socket.create_connection((node.address, node.port), timeout=_CONNECT_S):
            return True
    except OSError:
        return False


def judge_end(place: JobPlace, own: RunManifest) -> tuple[int, str]:
    """The code for the engine after an attempt, and why; the same on every node."""
    ends = _read_ends(place, own.attempt)
    first = ends[0]
    if first is None:
        return TrainerExit.RESUMABLE, "node 0 has not recorded how the attempt ended"
    run = place.run_of(0)
    decision = decide_after(run, read_manifest(run), first, by="engine")
    return code_for_engine(first, decision, [end for end in ends[1:] if end is not None])


def code_for_engine(
    first: ExitRecord, decision: RestartDecision, others: Sequence[ExitRecord]
) -> tuple[int, str]:
    """0: nothing is left to do. 75: start it again. Anything else is final; pure.

    Args:
        first: How the attempt ended on node 0.
        decision: Whether that end may be restarted.
        others: How it ended on the other nodes: node 0 only follows where one of them failed.
    """
    where = f"code {first.code} at step {first.step}: {first.reason}"
    if first.code in {TrainerExit.FINISHED, TrainerExit.HALTED}:
        return TrainerExit.FINISHED, where
    final = [end for end in others if end.code > 0 and end.code not in RESTARTABLE]
    if decision.restart and final:
        return final[0].code, f"code {final[0].code} on another node: {final[0].reason}"
    if decision.restart:
        return TrainerExit.RESUMABLE, where + _name_cause(first, others)
    is_final = first.code > 0 and first.code != TrainerExit.RESUMABLE
    code = first.code if is_final else TrainerExit.CRASHED
    return code, f"{where}; not started again: {decision.why}"


def _name_cause(first: ExitRecord, others: Sequence[ExitRecord]) -> str:
    """What happened on another node, where node 0 only lost a rank there; empty if it did not."""
    causes = [end.reason for end in others if not end.reason.startswith(LOST_ELSEWHERE)]
    is_elsewhere = first.reason.startswith(LOST_ELSEWHERE)
    return f"; on another node: {causes[0]}" if is_elsewhere and causes else ""


def _read_ends(place: JobPlace, attempt: int) -> list[ExitRecord | None]:
    """By node, how the attempt ended there; those that are late are waited for."""
    runs = [place.run_of(rank) for rank in range(place.num_nodes)]
    end = time.monotonic() + _OTHERS_S
    while True:
        ends = [read_exit(run, attempt) for run in runs]
        if all(ends) or time.monotonic() >= end:
            return ends
        time.sleep(_POLL_S)
