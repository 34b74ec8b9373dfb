"""Two trainers of one run: refused where a pod can be asked, told and reachable where it cannot."""

from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.manifest import read_manifest
from nsa_ops.pod.processes import read_processes
from tests.integration.local_pod import STEADY, LocalPod
from tests.integration.test_move import RUN, UNCHECKED, Pair, pair
from tests.integration.trainer_runs import wait_for

__all__ = ["pair"]
pytestmark = [pytest.mark.integration, pytest.mark.slow]
LAUNCH = (
    "launch", "--run-id", RUN, "--trainer", STEADY, "--set", "schedule.steps=4000",
    "--set", "checkpoint.save_every=10", *UNCHECKED,
)  # fmt: skip
GONE = ("--override", "old-pod=it burnt down")


def launch_here(pair: Pair) -> None:
    pair.here.must(*LAUNCH, "--pod", "here")
    wait_for(lambda: pair.here.run_dir(RUN).checkpoint(10).exists())
    pair.here.must("backup", "pull", RUN)


def record(pair: Pair) -> str:
    return str(pair.here.must("run", "ls", "--json").data[0]["record"]["pod"])


def test_a_run_is_not_taken_from_the_pod_that_runs_it(pair: Pair) -> None:
    launch_here(pair)
    cli, there = pair.here, pair.there.run_dir(RUN)
    held = read_processes(cli.run_dir(RUN))
    assert held is not None
    manifest = read_manifest(cli.run_dir(RUN))
    assert (held.attempt_id, held.pod_id) == (manifest.attempt_id, manifest.pod_id)
    assert len(held.attempt_id) == 32
    for words in (LAUNCH, ("backup", "restore", RUN)):
        for more in ((), GONE):
            refused = cli(*words, "--pod", "there", *more)
            assert refused.exit_code == 7, refused
            assert "Two trainers of one run" in refused.err
            assert f"nsa-ops halt {RUN}" in refused.err
    assert not there.root.exists()
    assert record(pair) == "here"

    cli.must("halt", RUN)
    cli.must("backup", "pull", RUN)
    cli.must("backup", "restore", RUN, "--pod", "there")
    assert record(pair) == "there"
    cli.must("resume", RUN, "--trainer", STEADY)
    second = read_manifest(there)
    assert second.attempt == 2
    assert second.earlier_attempts == {1: manifest.attempt_id}
    assert second.pod_id == cli.must("pod", "show", "there", "--json").data["pod"]["pod_id"]
    assert cli.must("status", RUN, "--pod", "here", "--json").data["report"]["state"] == "halted"
    wait_for(lambda: list_checkpoints(there)[0].manifest.attempt == 2)
    cli.must("backup", "pull", RUN)  # the chain goes on: one backup
    cli.must("halt", RUN)


def test_a_pod_that_nobody_can_ask_is_left_by_a_reason_and_can_be_halted_when_it_is_back(
    pair: Pair,
) -> None:
    launch_here(pair)
    cli, there = pair.here, pair.there.run_dir(RUN)
    pair.here.proxy.is_refusing = True
    pair.here.proxy.cut()
    for words in (LAUNCH, ("backup", "restore", RUN)):
        refused = cli(*words, "--pod", "there")
        assert refused.exit_code == 7, refused
        assert "Nobody can tell whether" in refused.err
    assert record(pair) == "here"
    assert not there.root.exists()

    cli.must(*LAUNCH, "--pod", "there", *GONE)
    assert read_manifest(there).overrides["old-pod"] == "it burnt down"
    assert record(pair) == "there"
    wait_for(lambda: there.checkpoint(10).exists())
    mixed = cli("backup", "pull", RUN)
    assert mixed.exit_code == 7, mixed
    assert "are two different runs" in mixed.err
    elsewhere = str(cli.folder / "disk")
    cli.must("backup", "pull", RUN, "--dest", elsewhere)

    pair.here.proxy.is_refusing = False
    said = cli.must("status", RUN).err
    assert f"`nsa-ops halt {RUN} --pod here`" in said
    there_now = cli.must("status", RUN, "--pod", "here", "--json")
    assert "of another lineage" in there_now.err
    left = there_now.data["report"]
    assert left["state"] == "running"
    assert left["manifest"]["attempt_id"] != read_manifest(there).attempt_id
    assert cli.must("logs", RUN, "--pod", "here").exit_code == 0
    assert cli.must("halt", RUN, "--pod", "here", "--json").data["state"] == "halted"
    assert cli("status", RUN, "--exit-code").exit_code == 21
    settled = cli.must("reconcile", "-y", "--json").data
    assert [(one["act"], one["way"]) for one in settled] == [("leave pod", "done")]
    assert "--pod here" not in cli.must("status", RUN).err
    cli.must("halt", RUN)


def test_another_laptop_finds_the_run_by_its_manifest_and_its_locks(tmp_path: Path) -> None:
    first = LocalPod(tmp_path / "one")
    second = LocalPod(tmp_path / "two", socket=first.socket)
    for pod in (first, second):
        pod.folder.mkdir()
    try:
        first.add()
        python = str(first.folder / "python")
        words = ("pod", "add", "here", f"local:{first.root}", "--profile", "cpu")
        second.must(*words, "--python", python)
        assert first.launch(RUN, "schedule.steps=4000").exit_code == 0
        other = second.launch(RUN, "schedule.steps=50")
        assert (other.exit_code, "exists with another config" in other.err) == (7, True)
        same = second.launch(RUN, "schedule.steps=4000")
        assert (same.exit_code, same.data["is_new"]) == (0, False)
        again = second("resume", RUN)
        assert (again.exit_code, "is running" in again.err) == (7, True)
        beats = first.run_dir(RUN).heartbeat().read_text().splitlines()
        assert len({line.split('"pid":')[1].split(",")[0] for line in beats}) == 1
        first.must("halt", RUN)
    finally:
        first.stop()
