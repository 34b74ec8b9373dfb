"""Backups over a real sshd: following a run through an outage, Ctrl-C, a second copy by rsync."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import inspect_checkpoint, list_checkpoints
from nsa_core.rundir.layout import RunDir
from nsa_ops.backup.verification import verify_backup
from tests.integration.ssh_pod import SshPod
from tests.integration.trainer_runs import wait_for

pytestmark = pytest.mark.integration


def backup(pod: SshPod) -> RunDir:
    return RunDir(pod.folder / "state" / "backups" / "r1")


def test_a_followed_run_is_whole_here_when_it_ends_though_the_link_was_lost(pod: SshPod) -> None:
    sets = ("schedule.steps=4000", "checkpoint.save_every=40", "checkpoint.keep_last=100")
    assert pod.launch("r1", *sets).exit_code == 0
    following = pod.start("backup", "pull", "r1", "--follow", "--json", "--checkpoint", "all")
    wait_for(lambda: list_checkpoints(backup(pod)))
    said = pod.refuse_until_noticed(following)
    assert b"trying again; the run is not affected" in said
    pod.must("halt", "r1")
    out, err = following.communicate(timeout=90)
    assert following.returncode == 0, err
    pulls = [json.loads(line)["data"] for line in out.splitlines()]
    brought = [step for pull in pulls for step in pull["pulled_steps"]]
    assert sorted(brought) == sorted(set(brought))
    here, there = list_checkpoints(backup(pod)), list_checkpoints(pod.run_dir("r1"))
    assert {one.step for one in there} <= {one.step for one in here}
    assert [inspect_checkpoint(one.path).damage for one in here] == [""] * len(here)
    assert (backup(pod).root / "exit.json").read_bytes() == pod.run_dir("r1").exit.read_bytes()


def test_ctrl_c_ends_the_following_and_neither_the_run_nor_the_copy(pod: SshPod) -> None:
    assert pod.launch("r1", "schedule.steps=4000", "checkpoint.save_every=20").exit_code == 0
    following = pod.start("backup", "pull", "r1", "--follow")
    wait_for(lambda: list_checkpoints(backup(pod)))
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=30)
    assert following.returncode == 130, err
    assert b"the next pull continues there" in err
    assert b"Traceback" not in err
    assert pod("status", "--exit-code").exit_code == 21
    assert pod.must("backup", "pull", "r1", "--json").data["newest_step"] is not None


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
def test_a_second_copy_goes_to_a_pod_by_rsync_and_is_hashed_there(
    pod: SshPod, tmp_path: Path
) -> None:
    assert pod.launch("r1", "schedule.steps=60", "checkpoint.save_every=20").exit_code == 0
    pod.must("backup", "pull", "r1", "--follow", "--checkpoint", "all")
    far = tmp_path / "far"
    pushed = pod.must("backup", "push", "r1", f"here:{far}", "--json").data
    assert pushed["num_files"] > 5
    assert verify_backup(far / "r1", load=True).differences == []
    audit = (pod.folder / "state" / "audit.jsonl").read_text()
    assert '"call": "rsync"' in audit
    again = pod.must("backup", "push", "r1", f"here:{far}", "--json").data
    assert (again["sent_bytes"], again["steps"]) == (0, [])
