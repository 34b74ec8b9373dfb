"""A colleague's laptop learns of a run from its pod: no preflight, no launch, nothing changed."""

from dataclasses import replace

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import Node, RunManifest
from nsa_ops.errors import (
    ConfigurationError,
    NotFoundError,
    OpsError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.provision.receipt import ProvisionReceipt
from nsa_ops.runs.adopt import execute_adopt_run, plan_adopt_run
from nsa_ops.runs.choose import choose_record
from nsa_ops.store import MemberPod
from tests.ops.fakes import completed
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import answer, report

PYTHON = "/pod/environments/e1/bin/nsa-python"
RECEIPT = ProvisionReceipt(
    pod_id="another laptop's", at=1.0, profile="cpu", code_id="code-1", code_commit="c",
    lock_sha256="l", environment="e1", python=PYTHON, base_python="/usr/bin/python3",
    torch_build="cpu", flash_attention="none",
)  # fmt: skip


def manifest(run_id: str = "r1", attempt: int = 2, **fields: object) -> RunManifest:
    given = {
        "attempt_id": f"{attempt:032x}", "earlier_attempts": {1: f"{1:032x}"}, "profile": "cpu",
        "code_id": "code-1", "config": RunConfig(), "config_sha256": "sha", "created_unix_s": 5.0,
    }  # fmt: skip
    return RunManifest.model_validate({"run_id": run_id, "attempt": attempt} | given | fields)


@pytest.fixture
def pod(desk: Desk) -> Desk:
    """A pod with one run of somebody else, provisioned from another laptop."""
    desk.transport.answers = {
        "manifest.json": completed("r1\n../evil\n-rf\n"),
        "nsa_ops.pod.probe": answer(report("running")),
    }
    desk.transport.files["/pod/runs/r1/manifest.json"] = manifest().model_dump_json().encode()
    desk.transport.files["/pod/provision.json"] = RECEIPT.model_dump_json().encode()
    return desk


def test_a_running_run_is_adopted_by_its_pod_alone(pod: Desk) -> None:
    planned = plan_adopt_run(pod.operator, None, None)
    assert pod.store.runs() == []
    adopted = execute_adopt_run(pod.operator, planned)
    assert (adopted.run_id, adopted.pod, adopted.state) == ("r1", "a100-1", "running")
    record = choose_record(pod.operator, None)
    assert (record.run_id, record.attempt, record.attempt_id) == ("r1", 2, f"{2:032x}")
    asked = [words for words in pod.transport.asked if "sh" not in words]
    assert [words[words.index("-m") + 1] for words in asked] == ["nsa_ops.pod.probe"]
    assert asked[0][asked[0].index("-m") - 1] == PYTHON
    assert pod.store.find_pod("a100-1") == replace(POD, python=PYTHON)


def test_adopting_twice_changes_nothing_and_a_newer_attempt_is_learned(pod: Desk) -> None:
    execute_adopt_run(pod.operator, plan_adopt_run(pod.operator, "r1", "a100-1"))
    assert not plan_adopt_run(pod.operator, "r1", "a100-1").plan.changes
    ids = {1: f"{1:032x}", 2: f"{2:032x}"}
    newer = manifest(attempt=3, earlier_attempts=ids).model_dump_json().encode()
    pod.transport.files["/pod/runs/r1/manifest.json"] = newer
    execute_adopt_run(pod.operator, plan_adopt_run(pod.operator, "r1", None))
    assert choose_record(pod.operator, "r1").attempt == 3


def test_another_run_of_the_same_id_is_not_taken_for_it(pod: Desk) -> None:
    execute_adopt_run(pod.operator, plan_adopt_run(pod.operator, "r1", None))
    known = choose_record(pod.operator, "r1")
    pod.store.save_run(replace(known, attempt_id=f"{9:032x}"))
    with pytest.raises(StateConflictError, match="another lineage of `r1`"):
        plan_adopt_run(pod.operator, "r1", None)
    pod.store.save_run(replace(known, pod="elsewhere"))
    with pytest.raises(StateConflictError, match="known here on pod `elsewhere`, not on `a100-1`"):
        plan_adopt_run(pod.operator, "r1", None)


def test_a_run_that_became_known_since_is_a_conflict(pod: Desk) -> None:
    planned = plan_adopt_run(pod.operator, "r1", None)
    pod.store.save_run(replace(planned.record, attempt=1))
    with pytest.raises(StateConflictError, match="became known here since"):
        execute_adopt_run(pod.operator, planned)


@pytest.mark.parametrize(
    ("names", "run_id", "kind", "said"),
    [
        ("", None, NotFoundError, "has no run to adopt"),
        ("r1\nr2\n", None, ConfigurationError, "Which run\\? Pod `a100-1` has 2"),
        ("", "../evil", ConfigurationError, "Run id '../evil' must be"),
        ("", "r7", NotFoundError, "Pod `a100-1` has no run `r7` below `/pod/runs`"),
    ],
)
def test_what_cannot_be_adopted_is_named(
    pod: Desk, names: str, run_id: str | None, kind: type[OpsError], said: str
) -> None:
    pod.transport.answers["manifest.json"] = completed(names)
    with pytest.raises(kind, match=said):
        plan_adopt_run(pod.operator, run_id, None)
    assert pod.store.runs() == []


@pytest.mark.parametrize("python", ["", "python3", "/pod/a\0b", "/pod/\x1b[2J"])
def test_a_receipt_that_names_no_interpreter_is_refused(pod: Desk, python: str) -> None:
    receipt = RECEIPT.model_copy(update={"python": python})
    pod.transport.files["/pod/provision.json"] = receipt.model_dump_json().encode()
    with pytest.raises(VerificationError, match="names no interpreter"):
        plan_adopt_run(pod.operator, "r1", None)


def test_an_agent_that_does_not_answer_leaves_nothing_behind(pod: Desk) -> None:
    pod.transport.answers["nsa_ops.pod.probe"] = completed(exit_code=1, stderr="no pydantic")
    planned = plan_adopt_run(pod.operator, "r1", None)
    with pytest.raises(OpsError, match="no pydantic"):
        execute_adopt_run(pod.operator, planned)
    assert (pod.store.runs(), pod.store.find_pod("a100-1")) == ([], POD)


def test_a_run_on_several_pods_is_adopted_from_its_pod_0(pod: Desk) -> None:
    several = RunConfig.model_validate({"batch": {"accumulation": 2}, "runtime": {"num_pods": 2}})
    node = Node(rank=1, address="10.0.0.1", port=29500)
    path = "/pod/runs/r1/manifest.json"
    pod.transport.files[path] = manifest(config=several, node=node).model_dump_json().encode()
    with pytest.raises(StateConflictError, match="is pod 1 of run `r1`") as caught:
        plan_adopt_run(pod.operator, "r1", None)
    assert "10.0.0.1" in caught.value.hint
    pod.transport.files[path] = manifest(config=several).model_dump_json().encode()
    planned = plan_adopt_run(pod.operator, "r1", None)
    assert "it trains on 2 pods" in planned.plan.notes[0]
    execute_adopt_run(pod.operator, planned)
    both = choose_record(pod.operator, "r1").with_others([MemberPod("b", "id-b")])
    pod.store.save_run(both)
    assert not plan_adopt_run(pod.operator, "r1", None).plan.changes
