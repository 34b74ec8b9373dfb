"""The everyday path on a pod behind a real sshd: the same commands, and a link that may be lost."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_ops.remote.audit import first_broken_line
from tests.integration.local_pod import CANARY
from tests.integration.ssh_pod import SshPod
from tests.integration.ssh_server import make_key, ssh_server

pytestmark = pytest.mark.integration
LONG = "schedule.steps=4000"


@pytest.fixture
def pod(new_pod: SshPod) -> SshPod:
    return new_pod


@pytest.mark.slow
def test_the_everyday_path_runs_on_a_pod_behind_ssh(pod: SshPod, tmp_path: Path) -> None:
    pod.add()
    pod.lose_code()
    assert pod.must("pod", "show", "--json").data["pod"]["kind"] == "ssh"
    report = pod("preflight", "--recipe", "tiny-cpu", "--json").data
    assert [name for name in report["blocking"] if name.startswith("causality")] == []
    assert {check["name"] for check in report["report"]["checks"]} >= {"host.rsync", "host.clock"}

    launched = pod.launch("r1", LONG)
    assert launched.exit_code == 0, launched
    assert pod("status", "--exit-code").exit_code == 21
    audit = pod.folder / "state" / "audit.jsonl"
    asked = audit.read_bytes().count(b"\n")
    pod.must("watch", "r1", "--once")
    assert (
        audit.read_bytes().count(b"\n") == asked + 2
    )  # a poll is one round trip, with a line for its begin and its end
    halted = pod.must("halt", "--json").data
    assert (halted["state"], halted["lost_steps"]) == ("halted", 0)

    pulled = pod.must("backup", "pull", "r1", "--json").data
    assert pulled["newest_step"] == halted["step"]
    kept = list_checkpoints(RunDir(Path(pulled["folder"])))
    assert kept[0].step == halted["step"]
    assert pod.must("backup", "verify", "r1", "--json").exit_code == 0

    resumed = pod.must("resume", "--json").data
    assert (resumed["attempt"], resumed["from_step"]) == (2, halted["step"])
    log = pod.run_dir("r1").log.read_bytes()
    assert pod.must("logs", "--raw").out.startswith(log)
    assert first_broken_line(pod.folder / "state" / "audit.jsonl") is None
    for folder in (pod.folder / "state", pod.root / "runs"):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert pod.proxy.connections == 2  # the look at the host key, and one shared link for all


def test_watch_goes_on_after_an_outage_without_losing_or_repeating_a_line(pod: SshPod) -> None:
    pod.add()
    assert pod.launch("r1", LONG).exit_code == 0
    with pod.start("watch", "--json", "--from-start") as watching:
        assert watching.stdout is not None
        first = watching.stdout.readline()
        said = pod.refuse_until_noticed(watching)
        assert b"trying again; the run is not affected" in said
        pod.must("halt", "r1")
        out = first + watching.stdout.read()
    assert watching.returncode == 0, said
    frames = [json.loads(line) for line in out.splitlines()]
    seen = [beat["alive_seq"] for frame in frames for beat in frame["data"]["beats"]]
    written = read_records(pod.run_dir("r1").heartbeat(), Heartbeat).records
    assert seen == [beat.alive_seq for beat in written]


def test_the_host_key_is_shown_and_nothing_is_trusted_unasked(pod: SshPod) -> None:
    before = len(pod.server.log)
    said = pod.add_as("here")
    assert said.exit_code == 2
    assert pod.server.host_key.fingerprint in said.err
    assert pod("pod", "show").exit_code == 6
    wrong = pod.add_as("here", "--fingerprint", "SHA256:" + "A" * 43)
    assert wrong.exit_code == 4
    assert pod.server.host_key.fingerprint in wrong.err
    assert "Accepted publickey" not in pod.server.log[before:]
    planned = pod("pod", "add", "here", pod.address, "--plan")
    assert planned.exit_code == 0
    assert pod.add_as("here", "-y").exit_code == 0
    assert (
        pod.add_as("here", "-y").data["pod_id"]
        == pod.must("pod", "show", "--json").data["pod"]["pod_id"]
    )


def test_a_recycled_address_is_a_new_pod_until_its_key_is_trusted(
    pod: SshPod, tmp_path: Path
) -> None:
    pod.add()
    old = pod.must("pod", "show", "here", "--json").data
    with ssh_server(tmp_path / "other") as other:
        (other.folder / "user_key.pub").write_bytes(
            (pod.server.folder / "user_key.pub").read_bytes()
        )
        pod.proxy.target_port = other.port
        pod.proxy.cut()
        time.sleep(0.3)
        asked = pod("preflight", "here")
        assert asked.exit_code == 4, asked
        assert "is not the pinned one" in asked.err
        again = pod.add_as("here", "-y")
        assert (again.exit_code, "A recycled address is a new pod" in again.err) == (4, True)
        assert pod("pod", "trust", "here").exit_code == 2
        trusted = pod.must("pod", "trust", "here", "-y", "--json").data
        assert trusted["pod_id"] != old["pod"]["pod_id"]
        new = pod.must("pod", "show", "here", "--json").data
        assert new["fingerprint"] == other.host_key.fingerprint != old["fingerprint"]
        pod.must("pod", "rm", "here", "-y")
    assert not (pod.folder / "state" / "known_hosts" / new["pod"]["pod_id"]).exists()


def test_a_login_that_is_refused_leaves_no_pod(pod: SshPod, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    config = tmp_path / "strange.conf"
    config.write_text(f"IdentityFile {tmp_path}/stranger\nIdentitiesOnly yes\nIdentityAgent none\n")
    env = pod.environment | {"NSA_OPS_SSH_CONFIG": str(config)}
    done = subprocess.run(
        [*pod.command, "pod", "add", "here", pod.address, "-y"],
        env=env, cwd=pod.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "refuses our login" in done.stderr
    assert pod("pod", "show").exit_code == 6
    assert list((pod.folder / "state" / "known_hosts").iterdir()) == []


def test_a_host_of_the_ssh_configuration_is_added_by_its_alias(pod: SshPod) -> None:
    config = pod.server.folder / "client.conf"
    before = config.read_text()
    config.write_text(f"Host gpu\n  HostName 127.0.0.1\n  Port {pod.proxy.port}\n{before}")
    mistyped = pod("pod", "add", "here", "--from-ssh-config", "gppu", "-y")
    said = pod("pod", "add", "here", "--from-ssh-config", "gpu", "-y", "--json")
    config.write_text(before)
    assert said.exit_code == 0, said
    assert (mistyped.exit_code, "did you mean `gpu`?" in mistyped.err) == (6, True), mistyped
    assert (said.data["address"], said.data["kind"]) == ("gpu", "ssh")
    assert Path(said.data["root"]) == pod.server.folder / "nsa-pod"
    assert pod("pod", "add", "there", "gpu").exit_code == 2


def test_a_pod_is_reached_over_fabric_by_the_same_commands(pod: SshPod) -> None:
    pytest.importorskip("fabric")
    pin = ("--fingerprint", pod.server.host_key.fingerprint)
    added = pod.add_as("here", "--transport", "fabric", *pin)
    assert (added.exit_code, added.data["kind"]) == (0, "fabric"), added
    assert pod.launch("r1", LONG).exit_code == 0
    assert pod.must("halt", "--json").data["lost_steps"] == 0
    assert pod.must("backup", "pull", "r1", "--json").data["num_files"] > 0
    wrong = pod.add_as("there", "--transport", "telnet", "-y")
    assert (wrong.exit_code, "must be one of `ssh`, `fabric`" in wrong.err) == (2, True)
