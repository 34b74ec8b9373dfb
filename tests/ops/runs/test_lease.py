"""One lease per run: another pod gets it with proof, or with a reason that is kept."""

import json
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import RunManifest, read_manifest
from nsa_ops.configure import RunChoice
from nsa_ops.context import RunHandle
from nsa_ops.errors import (
    ConfigurationError,
    NotFoundError,
    PodUnreachableError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.pod.processes import take_lock
from nsa_ops.runs.attempt import AttemptStart, begun
from nsa_ops.runs.choose import find_run
from nsa_ops.runs.launch import LaunchRequest, plan_launch
from nsa_ops.runs.lease import (
    OLD_POD,
    OldPod,
    allow_leaving,
    allow_taking,
    left_pods,
    look_at_old_pod,
    other_lineage_notes,
    plan_takeover,
    record_takeover,
    unsettled_notes,
)
from nsa_ops.runs.reconcile import Truth, decide
from nsa_ops.runs.resume import plan_resume
from nsa_ops.store import Intent, PodRecord, RunRecord, Store
from tests.ops.backup.case import RUN_ID, Case
from tests.ops.cli_case import CommandLine
from tests.ops.fakes import completed
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, Sequence, answer, report

OTHER = PodRecord("b", "pod-b", "local", "/b", "python3", "cpu", 0.0)
REASON = {OLD_POD: "the provider took it away"}
GONE = OldPod("a", None, is_gone=True, problem="a does not answer")


@pytest.mark.parametrize("state", ["running", "staging", "starting", "halting", "resuming"])
def test_a_run_that_runs_is_never_taken(state: str) -> None:
    with pytest.raises(StateConflictError, match="Two trainers of one run") as caught:
        allow_taking(OldPod("a", report(state), is_gone=False), "r1", "b", REASON)
    assert "nsa-ops halt r1" in caught.value.hint


@pytest.mark.parametrize("alive", ["trainer_alive", "runner_alive", "watchdog_alive"])
def test_a_process_that_lives_after_the_end_keeps_the_run(alive: str) -> None:
    old = OldPod("a", report("failed", **{alive: True}), is_gone=False)
    for take in (
        lambda: allow_taking(old, "r1", "b", REASON),
        lambda: allow_leaving(old, "r1", 0, REASON, more_steps=False),
    ):
        with pytest.raises(StateConflictError, match=f"its {alive[:-6]} still lives"):
            take()
    assert not old.is_proven


def test_a_held_lock_keeps_the_run_whatever_the_agent_says() -> None:
    old = OldPod("a", None, is_gone=False, problem="it has no Python", is_held=True)
    for take in (
        lambda: allow_taking(old, "r1", "b", REASON),
        lambda: allow_leaving(old, "r1", 0, REASON, more_steps=False),
    ):
        with pytest.raises(StateConflictError, match="holds its lock on pod `a`"):
            take()


@pytest.mark.parametrize(
    "old",
    [
        OldPod("a", report("halted"), is_gone=False),
        OldPod("a", report("lost"), is_gone=False),
        OldPod("a", None, is_gone=True, problem="it is not there", is_free=True),
    ],
)
def test_a_run_that_is_proven_not_to_run_may_be_taken(old: OldPod) -> None:
    assert old.is_proven
    assert len(allow_taking(old, "r1", "b", {})) == 1


@pytest.mark.parametrize("old", [GONE, replace(GONE, is_gone=False)])
def test_where_nobody_can_tell_a_reason_is_needed_and_kept(old: OldPod) -> None:
    assert not old.is_proven
    with pytest.raises(StateConflictError, match="Nobody can tell whether `r1` runs") as caught:
        allow_taking(old, "r1", "b", {})
    assert caught.value.exit_code == 7
    assert "nsa-ops resume r1 --pod b" in caught.value.hint
    assert "--override old-pod=REASON" in caught.value.hint
    (note,) = allow_taking(old, "r1", "b", REASON)
    assert note.endswith("overridden: the provider took it away")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A run on a pod whose Python cannot answer."""
    case = Case(tmp_path)
    case.build(20)
    case.operator.store.save_run(_record())
    return case


def _record(**fields: Any) -> RunRecord:
    return replace(RunRecord(RUN_ID, "here", "tiny-cpu", "cpu", "code", "c" * 64, 1.0), **fields)


@pytest.mark.parametrize("lock", ["runner_lock", "watchdog_lock"])
def test_locks_prove_without_an_agent_who_holds_a_run(case: Case, lock: str) -> None:
    free = look_at_old_pod(case.operator, _record())
    assert (free.report, free.is_proven, free.is_held) == (None, True, False)
    descriptor = take_lock(getattr(case.run, lock))
    held = look_at_old_pod(case.operator, _record())
    assert (held.is_proven, held.is_held, held.is_gone) == (False, True, False)
    os.close(descriptor)
    assert look_at_old_pod(case.operator, _record()).is_proven


def test_a_run_that_its_pod_does_not_have_is_free(case: Case) -> None:
    assert look_at_old_pod(case.operator, _record(run_id="never-there")).is_proven


def test_another_machine_under_the_pods_name_proves_nothing(case: Case) -> None:
    old = look_at_old_pod(case.operator, _record(pod_id="pod-before"))
    assert (old.is_proven, old.is_gone) == (False, True)
    assert "is another machine" in old.problem


def test_the_watchdog_of_an_ended_run_is_waited_for(desk: Desk) -> None:
    ended = report("halted", watchdog_alive=True)
    desk.transport.answers["nsa_ops.pod.probe"] = Sequence(
        answer(ended), answer(ended), answer(report("halted", watchdog_alive=False))
    )
    assert look_at_old_pod(desk.operator, RUN).is_proven
    assert len(desk.clock.slept) == 2
    desk.transport.answers["nsa_ops.pod.probe"] = answer(ended)
    assert not look_at_old_pod(desk.operator, RUN).is_proven


def launch_on_b(desk: Desk, **overrides: str) -> Any:
    request = LaunchRequest(RunChoice(), pod="b", run_id="r1", overrides=overrides)
    return plan_launch(desk.operator, request)


@pytest.fixture
def two(desk: Desk) -> Desk:
    """`r1` is known on `a100-1`, and there is a pod `b`."""
    desk.store.add_pod(OTHER)
    desk.store.save_run(RUN)
    return desk


@pytest.mark.parametrize(
    "shown", [answer(report("running")), PodUnreachableError("it does not answer")]
)
def test_a_launch_of_a_run_that_another_pod_may_run_is_refused_with_7(
    two: Desk, shown: Any
) -> None:
    two.transport.answers["nsa_ops.pod.probe"] = shown
    with pytest.raises(StateConflictError, match="pod `a100-1`") as refused:
        launch_on_b(two)
    assert refused.value.exit_code == 7
    assert "nsa-ops" in refused.value.hint
    assert two.store.find_run("r1") == RUN


def test_a_launch_on_the_pod_that_has_the_run_asks_nobody_else(two: Desk) -> None:
    link = two.operator.link(POD)
    assert plan_takeover(two.operator, RUN, link, {}).left == ""
    assert two.transport.asked == []


def test_a_pod_that_was_left_unproven_is_kept_in_mind_once(two: Desk) -> None:
    two.transport.answers["nsa_ops.pod.probe"] = PodUnreachableError("it does not answer")
    for _ in range(2):
        taken = plan_takeover(two.operator, RUN, two.operator.link(OTHER), REASON)
        record_takeover(two.operator, taken)
    assert left_pods(two.store, "r1") == [("a100-1", "the provider took it away")]
    (note,) = unsettled_notes(two.store, "r1")
    assert "`nsa-ops status r1 --pod a100-1`" in note
    assert "`nsa-ops halt r1 --pod a100-1`" in note


def test_a_pod_that_was_left_with_proof_is_not_kept_in_mind(two: Desk) -> None:
    two.transport.answers["nsa_ops.pod.probe"] = answer(report("halted"))
    taken = plan_takeover(two.operator, RUN, two.operator.link(OTHER), {})
    record_takeover(two.operator, taken)
    assert taken.left == "a100-1"
    assert left_pods(two.store, "r1") == []


def test_the_intent_of_an_attempt_names_the_pod_that_the_run_left(two: Desk) -> None:
    two.transport.answers["nsa_ops.pod.probe"] = answer(report("halted"))
    taken = plan_takeover(two.operator, RUN, two.operator.link(OTHER), {})
    run = RunHandle(two.operator.link(OTHER), "code-9", "r1")
    start = AttemptStart("resume", (run,), "module", lambda: [taken], begin=lambda: None)
    with begun(two.operator, start):
        (intent,) = two.store.open_intents()
    assert intent.details["moved_from"] == "a100-1"


def manifest_bytes(**fields: Any) -> bytes:
    values = {
        "run_id": "r1", "config": RunConfig(), "config_sha256": "s", "code_id": "code-9",
        "created_unix_s": 5.0,
    }  # fmt: skip
    return RunManifest.model_validate(values | fields).model_dump_json().encode()


def test_a_run_is_found_on_a_pod_that_the_registry_does_not_name(two: Desk) -> None:
    two.transport.files["/b/runs/r1/manifest.json"] = manifest_bytes()
    two.transport.answers["nsa_ops.pod.probe"] = answer(report("running"))
    found = find_run(two.operator, "r1", pod="b")
    assert (found.record.pod, found.record.code_id, found.link.record) == ("b", "code-9", OTHER)
    assert any("/b/code/code-9" in " ".join(words) for words in two.transport.asked)
    assert two.store.find_run("r1") == RUN
    two.transport.files["/b/runs/r1/manifest.json"] = b"{"
    with pytest.raises(VerificationError, match="on pod `b` cannot be used"):
        find_run(two.operator, "r1", pod="b")
    with pytest.raises(NotFoundError):
        find_run(two.operator, "r1", pod="nowhere")


def test_a_run_that_this_laptop_never_knew_is_found_on_a_named_pod(two: Desk) -> None:
    two.transport.files["/b/runs/r7/manifest.json"] = manifest_bytes(run_id="r7", profile="cpu")
    two.transport.answers["nsa_ops.pod.probe"] = answer(report("running", run_id="r7"))
    found = find_run(two.operator, "r7", pod="b")
    assert (found.record.run_id, found.record.profile, found.record.pod) == ("r7", "cpu", "b")
    assert two.store.find_run("r7") is None
    with pytest.raises(ConfigurationError, match="must be 1 to 80 letters"):
        find_run(two.operator, "../r7", pod="b")


def test_a_resume_of_a_restored_run_records_its_pod_and_why_it_was_taken(two: Desk) -> None:
    two.transport.answers |= {
        "nsa_ops.pod.probe": answer(report("preempted")),
        "statvfs": completed('{"unix_s": 1.0, "python_version": "3.11", "tools": {"tmux": "t"}}'),
        "nsa_ops.pod.verify": completed('{"checkpoints": []}'),
    }
    two.transport.files["/pod/runs/r1/manifest.json"] = manifest_bytes(pod_id="the-old-one")
    two.store.end_intent(
        two.store.leave_open("leave pod", "r1", pod="x", reason="it burnt"), "done"
    )
    planned = plan_resume(two.operator, "r1")
    assert (planned.new.pod_id, planned.new.overrides) == (POD.pod_id, {OLD_POD: "it burnt"})
    two.transport.files["/pod/runs/r1/manifest.json"] = manifest_bytes(pod_id=POD.pod_id)
    planned = plan_resume(two.operator, "r1")
    assert planned.new == planned.old


@pytest.mark.parametrize(
    ("begun", "shown", "is_other"),
    [
        ((1, "a" * 32), (1, "a" * 32), False),
        ((1, "a" * 32), (2, "b" * 32), False),
        ((1, "a" * 32), (1, ""), False),
        ((0, ""), (3, "b" * 32), False),
        ((1, ""), (1, "b" * 32), False),
        ((1, "a" * 32), (1, "b" * 32), True),
        ((2, "b" * 32), (1, "a" * 32), True),
    ],
)
def test_a_pod_that_shows_another_lineage_than_was_begun_is_named(
    begun: tuple[int, str], shown: tuple[int, str], is_other: bool
) -> None:
    record = replace(RUN, attempt=begun[0], attempt_id=begun[1])
    summary = report().manifest.model_copy(update={"attempt": shown[0], "attempt_id": shown[1]})
    notes = other_lineage_notes(record, summary)
    assert ["`nsa-ops halt r1 --pod a100-1`" in note for note in notes] == [True] * is_other


@pytest.mark.parametrize("act", ["launch", "resume"])
def test_an_act_on_a_pod_that_the_run_has_left_is_not_finished_there(act: str) -> None:
    detail = json.dumps({"pod": POD.name, "from_attempt": 0})
    begun = Intent(1, 1.0, act, "r1", detail, None, None)
    truth = Truth(pod=POD, run=replace(RUN, pod="b"), report=report("planned"))
    decision = decide(begun, truth)
    assert decision.way == "rolled back"
    assert "`nsa-ops status r1 --pod a100-1`" in decision.found


def test_a_registry_of_an_older_version_gets_the_columns_of_the_lease(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    with sqlite3.connect(path) as old:
        old.execute(
            "CREATE TABLE runs (run_id TEXT PRIMARY KEY, pod TEXT NOT NULL, recipe TEXT NOT NULL, "
            "profile TEXT NOT NULL, code_id TEXT NOT NULL, config_sha256 TEXT NOT NULL, "
            "launched_unix_s REAL NOT NULL)"
        )
        old.execute("INSERT INTO runs VALUES ('r1', 'a', 'tiny', 'cpu', 'c', 's', 1.0)")
    store = Store(path)
    assert store.find_run("r1") == RunRecord("r1", "a", "tiny", "cpu", "c", "s", 1.0)
    store.save_run(replace(RUN, pod_id="p", attempt=2, attempt_id="a" * 32))
    again = store.find_run("r1")
    assert again is not None
    assert (again.pod_id, again.attempt, again.attempt_id) == ("p", 2, "a" * 32)
    store.close()


@pytest.fixture
def backed_up(case: Case, cli: CommandLine) -> Iterator[Case]:
    """The run is backed up; a second pod is there to take it."""
    assert cli("backup", "pull", RUN_ID).exit_code == 0
    assert cli("pod", "add", "other", f"local:{case.root / 'other'}", "-y").exit_code == 0
    yield case
    case.operator.store.close()


def restored(case: Case) -> Path:
    return case.root / "other" / "runs" / RUN_ID


def pod_of(case: Case) -> str:
    found = case.operator.store.find_run(RUN_ID)
    assert found is not None
    return found.pod


def test_a_restore_does_not_take_a_run_from_the_pod_that_runs_it(
    backed_up: Case, cli: CommandLine
) -> None:
    words = ("backup", "restore", RUN_ID, "--pod", "other")
    descriptor = take_lock(backed_up.run.runner_lock)
    for more in ((), ("--override", "old-pod=I know better")):
        refused = cli(*words, *more)
        assert (refused.exit_code, "holds its lock on pod `here`" in refused.err) == (7, True)
        assert not restored(backed_up).exists()
        assert pod_of(backed_up) == "here"
    os.close(descriptor)
    assert cli(*words).exit_code == 0
    assert pod_of(backed_up) == "other"


def test_a_restore_from_a_pod_that_nobody_can_ask_needs_a_reason(
    backed_up: Case, cli: CommandLine
) -> None:
    backed_up.operator.store.remove_pod("here")
    words = ("backup", "restore", RUN_ID, "--pod", "other")
    refused = cli(*words)
    assert (refused.exit_code, "Pod `here` was forgotten" in refused.err) == (7, True)
    assert not restored(backed_up).exists()
    assert pod_of(backed_up) == "here"
    done = cli(*words, "--override", "old-pod=it burnt down")
    assert (done.exit_code, "overridden: it burnt down" in done.err) == (0, True)
    assert pod_of(backed_up) == "other"
    (left,) = backed_up.operator.store.intents("leave pod", RUN_ID)
    assert left.details["reason"] == "it burnt down"
    assert read_manifest(backed_up.run).run_id == RUN_ID


def test_a_backup_of_a_run_that_is_not_known_here_names_the_pod_it_came_from(
    backed_up: Case, cli: CommandLine
) -> None:
    """Another laptop's backup: its manifest names a pod that nobody here can ask."""
    folder = str(backed_up.root / "state" / "backups" / RUN_ID)
    with sqlite3.connect(backed_up.operator.store.path) as registry:
        registry.execute("DELETE FROM runs")
    refused = cli("backup", "restore", folder, "--pod", "other")
    assert (refused.exit_code, "runs on pod `this-machine`" in refused.err) == (7, True)
    done = cli("backup", "restore", folder, "--pod", "other", "--override", "old-pod=it is off")
    assert done.exit_code == 0
    assert pod_of(backed_up) == "other"
