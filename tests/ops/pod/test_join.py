"""A pod takes part in an attempt of several pods, or makes room for a restored pod 0."""

import os

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import Node, RunManifest, new_attempt_id, read_manifest
from nsa_core.rundir.process import identify
from nsa_ops.pod.act import act
from nsa_ops.pod.ending import decide_restart
from nsa_ops.pod.messages import JoinAttemptAction, Reply, ReplyCode, SetAsideAction
from nsa_ops.pod.processes import hold_lock
from tests.ops.pod.ends import exit_record, record_process, write_end

FIRST = RunManifest(
    run_id="r1", attempt_id=new_attempt_id(), config=RunConfig(), config_sha256="0" * 64,
    pod_id="pod-b", node=Node(rank=1, address="10.0.0.1", port=29500, interface="eth0"),
    created_unix_s=1.0,
)  # fmt: skip
NEXT = FIRST.model_copy(
    update={
        "attempt": 2, "attempt_id": new_attempt_id(), "earlier_attempts": {1: FIRST.attempt_id},
    }
)  # fmt: skip


@pytest.fixture
def share(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "r1")
    assert join(run, FIRST).outcome == "done"
    return run


def join(run: RunDir, manifest: RunManifest) -> Reply:
    return act(JoinAttemptAction(run_dir=run.root, manifest=manifest).model_dump_json().encode())


def aside(run: RunDir) -> Reply:
    return act(SetAsideAction(run_dir=run.root).model_dump_json().encode())


def start(run: RunDir, *, is_alive: bool = True) -> None:
    here = identify(os.getpid())
    assert here is not None
    it = here if is_alive else here.model_copy(update={"boot_id": "an earlier one"})
    record_process(run, it)


def test_a_pod_joins_once(share: RunDir) -> None:
    assert read_manifest(share) == FIRST
    assert join(share, FIRST).outcome == "already"


def test_the_next_attempt_keeps_the_ended_one(share: RunDir) -> None:
    start(share, is_alive=False)
    write_end(share)
    assert join(share, NEXT).code == ReplyCode.OK
    assert read_manifest(share) == NEXT
    assert read_exit(share) is None
    kept = RunDir(share.attempt(1))
    assert (read_manifest(kept), read_exit(kept) is not None) == (FIRST, True)


def test_another_place_before_the_start_replaces_the_first(share: RunDir) -> None:
    moved = FIRST.model_copy(update={"node": FIRST.node.model_copy(update={"port": 29501})})
    assert join(share, moved).outcome == "done"
    assert read_manifest(share).node.port == 29501
    start(share)
    assert join(share, FIRST).code == ReplyCode.CONFLICT


def test_nothing_is_joined_beside_a_living_trainer(share: RunDir) -> None:
    with hold_lock(share.runner_lock):
        reply = join(share, NEXT)
    assert (reply.code, "still alive" in reply.message) == (ReplyCode.CONFLICT, True)
    assert read_manifest(share) == FIRST


def test_another_lineage_is_not_joined(share: RunDir) -> None:
    other = NEXT.model_copy(update={"earlier_attempts": {1: new_attempt_id()}})
    reply = join(share, other)
    assert (reply.code, "no earlier one" in reply.message) == (ReplyCode.CONFLICT, True)
    assert join(share, FIRST.model_copy(update={"attempt_id": new_attempt_id()})).code == 7


def test_a_folder_that_is_no_run_is_refused(tmp_path) -> None:
    run = RunDir(tmp_path / "r1")
    run.root.mkdir()
    assert "no manifest.json" in join(run, FIRST).message


def test_a_share_is_set_aside_with_everything_in_it(share: RunDir) -> None:
    write_end(share)
    reply = aside(share)
    assert reply.code == ReplyCode.OK, reply
    (kept,) = share.root.parent.iterdir()
    assert kept.name == ".r1.pod1-attempt1"
    assert read_manifest(RunDir(kept)) == FIRST
    assert aside(share).outcome == "already"
    assert join(share, FIRST).outcome == "done"
    assert aside(share).code == ReplyCode.OK
    assert len(list(share.root.parent.iterdir())) == 2


def test_pod_0_and_a_living_share_are_not_set_aside(share: RunDir, tmp_path) -> None:
    with hold_lock(share.runner_lock):
        assert aside(share).code == ReplyCode.CONFLICT
    start(share)  # its ranks outlive their runner
    assert aside(share).code == ReplyCode.CONFLICT
    assert share.root.exists()
    first = RunDir(tmp_path / "other" / "r1")
    join(first, FIRST.model_copy(update={"node": Node()}))
    assert "has its checkpoints" in aside(first).message


def test_a_watchdog_restarts_no_run_of_several_pods() -> None:
    facts = {"stop_asked": "", "steps_done": 9, "without_progress": 0, "budget": 3}
    assert decide_restart(exit_record(75), **facts).restart
    decision = decide_restart(exit_record(75), **facts, num_pods=2)
    assert (decision.restart, "`nsa-ops resume`" in decision.why) == (False, True)
