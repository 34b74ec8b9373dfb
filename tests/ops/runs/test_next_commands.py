"""A hint names a command that works as printed, for the pod, recipe and run that were meant."""

from dataclasses import replace
from pathlib import Path

import pytest

from nsa_ops.agents import ask
from nsa_ops.configure import RunChoice
from nsa_ops.context import RunHandle
from nsa_ops.errors import (
    AuthenticationError,
    ConfigurationError,
    NotFoundError,
    OpsError,
    PodUnreachableError,
    RefusedError,
)
from nsa_ops.plan import Step, plan_of
from nsa_ops.pod.messages import HaltAction, Reply, ReplyCode
from nsa_ops.pods.known import choose_pod
from nsa_ops.pods.ssh_pods import KeyPlan, execute_add_ssh
from nsa_ops.preflight.proof import require_green
from nsa_ops.remote.ssh.explain import explain_ssh
from nsa_ops.remote.ssh.host_keys import HostKey
from nsa_ops.runs.choose import link_of
from nsa_ops.runs.launch import LaunchRequest, make_ready, plan_launch
from nsa_ops.settings import read_settings
from nsa_ops.store import Store
from tests.ops.fakes import FakeTransport, completed
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN

NAS = replace(POD, name="nas", pod_id="pod-2", kind="ssh", profile="", address="b@192.0.2.9:22")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("b@192.0.2.9: Permission denied (publickey).", AuthenticationError),
        ("Host key verification failed.", AuthenticationError),
        ("ssh: connect to host 192.0.2.9 port 22: Connection refused", PodUnreachableError),
    ],
)
def test_a_refused_pod_add_points_to_no_pod_that_was_not_added(
    desk: Desk, tmp_path: Path, said: str, kind: type[OpsError]
) -> None:
    settings = read_settings({"HOME": "/nowhere", "NSA_OPS_STATE_DIR": str(tmp_path / "state")})
    desk.transport = FakeTransport({"sh": explain_ssh(255, said, NAS.address, NAS.name)})
    key = HostKey("ssh-ed25519", "AAAA")
    planned = KeyPlan(NAS, key, plan_of("Add", [Step("log in", "x")]), is_agreed=True)
    with pytest.raises(kind) as refused:
        execute_add_ssh(replace(desk.operator, settings=settings), planned)
    assert "nsa-ops pod" not in refused.value.hint
    assert refused.value.hint.startswith("The pod was not added")
    assert "b@192.0.2.9:22" in refused.value.hint
    assert desk.store.find_pod("nas") is None


def test_a_host_that_only_keeps_backups_makes_no_other_pod_ambiguous(desk: Desk) -> None:
    desk.store.add_pod(NAS)
    assert choose_pod(desk.store, None) == POD
    desk.store.add_pod(replace(POD, name="second", pod_id="pod-3"))
    with pytest.raises(ConfigurationError, match="Which pod\\? There are 3"):
        choose_pod(desk.store, None)


def test_an_only_pod_needs_no_profile(tmp_path: Path) -> None:
    store = Store(tmp_path / "other.sqlite")
    store.add_pod(NAS)
    assert choose_pod(store, None) == NAS
    store.close()


def test_an_unknown_pod_may_be_one_behind_ssh(tmp_path: Path, desk: Desk) -> None:
    store = Store(tmp_path / "other.sqlite")
    with pytest.raises(NotFoundError) as unknown:
        choose_pod(store, "gpu")
    store.close()
    assert "`nsa-ops pod add gpu user@host[:port]`" in unknown.value.hint
    with pytest.raises(NotFoundError) as forgotten:
        link_of(desk.operator, replace(RUN, pod="gone"))
    assert "`nsa-ops pod add gone user@host[:port]`" in forgotten.value.hint


def test_a_choice_can_be_made_again_from_its_flags() -> None:
    choice = RunChoice("my recipe.yaml", "cpu", ("a.b=1", "c=x y"))
    assert choice.flags == " --recipe 'my recipe.yaml' --set a.b=1 --set 'c=x y'"
    assert RunChoice().flags == ""


def test_a_missing_preflight_names_the_recipe_and_values_that_were_asked_for(desk: Desk) -> None:
    choice = RunChoice("tiny-cpu", "cpu", ("model.dim=8",))
    with pytest.raises(RefusedError) as refused:
        require_green(desk.operator, POD, "code-1", choice)
    wanted = "nsa-ops preflight a100-1 --profile cpu --recipe tiny-cpu --set model.dim=8"
    assert refused.value.hint == f"Run `{wanted}`"


@pytest.mark.parametrize("start", [plan_launch, lambda who, asked: make_ready(who, asked, print)])
def test_a_run_id_that_cannot_be_used_is_refused_before_a_pod_is_asked(desk: Desk, start) -> None:
    with pytest.raises(ConfigurationError, match="Run id `a b/c` cannot be used"):
        start(desk.operator, LaunchRequest(RunChoice(), run_id="a b/c"))
    assert desk.transport.asked == []


def test_the_name_of_a_run_in_front_of_an_agents_words_keeps_its_case(desk: Desk) -> None:
    refused = Reply(
        action="halt", code=ReplyCode.CONFLICT, outcome="conflict", message="demo has ended"
    )
    desk.transport.answers = {"nsa_ops.pod.act": completed(refused.model_dump_json())}
    action = HaltAction(run_dir=Path("/pod/runs/demo"), reason="x")
    with pytest.raises(OpsError, match=r"^demo has ended$"):
        ask(RunHandle(desk.operator.link(POD), "code-1", "demo"), action)
