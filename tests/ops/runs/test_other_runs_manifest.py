"""A pod that gives the manifest of another run: the registry never follows it."""

from dataclasses import replace

import pytest

from nsa_core.config.recipe import resolve
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.configure import RunChoice
from nsa_ops.errors import VerificationError
from nsa_ops.pod.messages import Reply, ReplyCode
from nsa_ops.runs.choose import find_run
from nsa_ops.runs.launch import LaunchRequest, execute_launch, plan_launch
from nsa_ops.runs.reconcile import execute_reconcile, plan_reconcile
from nsa_ops.runs.resume import plan_resume
from tests.ops.fakes import completed
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, answer, report
from tests.ops.runs.test_preflight_and_launch import pod

__all__ = ["pod"]
#: Runs on another pod; a record of it that names this one would cut every command off from it.
VICTIM = replace(RUN, run_id="victim", pod="b", pod_id="pod-b")
RESOLVED = resolve("tiny-cpu", "cpu")
LYING = RunManifest(
    run_id="victim", config=RESOLVED.config, config_sha256=RESOLVED.sha256, created_unix_s=2.0
)


@pytest.fixture
def liar(pod: Desk) -> Desk:
    """A pod that says `victim` where it is asked for `r1`."""
    pod.store.save_run(VICTIM)
    pod.transport.files["/pod/runs/r1/manifest.json"] = LYING.model_dump_json().encode()
    pod.transport.answers |= {
        "nsa_ops.pod.probe": answer(report("halted")),
        "nsa_ops.pod.verify": completed('{"checkpoints": []}'),
    }
    return pod


def test_a_launch_does_not_remember_another_run_than_it_began(liar: Desk) -> None:
    said = Reply(action="x", code=ReplyCode.OK, outcome="done", message="done", manifest=LYING)
    liar.transport.answers["nsa_ops.pod.act"] = completed(said.model_dump_json())
    request = LaunchRequest(RunChoice(), run_id="r1", overrides={"preflight": "trial"})
    planned = plan_launch(liar.operator, request)
    with pytest.raises(VerificationError, match="the manifest of run `victim` for `r1`"):
        execute_launch(liar.operator, planned)
    assert liar.store.runs() == [VICTIM]


def test_a_reconcile_does_not_adopt_another_run(liar: Desk) -> None:
    liar.store.leave_open("launch", "r1", pod=POD.name, code_id="code-1")
    (settled,) = execute_reconcile(liar.operator, plan_reconcile(liar.operator))
    assert (settled.way, "of run `victim`" in settled.found) == ("wait", True)
    assert liar.store.runs() == [VICTIM]


def test_a_resume_does_not_continue_with_the_manifest_of_another_run(liar: Desk) -> None:
    liar.store.save_run(RUN)
    with pytest.raises(VerificationError, match="of run `victim`"):
        plan_resume(liar.operator, "r1")


def test_a_run_that_is_sought_on_a_pod_is_the_one_that_was_named(liar: Desk) -> None:
    with pytest.raises(VerificationError, match="of run `victim`"):
        find_run(liar.operator, "r1", pod=POD.name)
