"""A pod is gone for good: the run continues on another one, from its backup, to the same digits."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_core.rundir.events import read_events
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import Parent, read_manifest
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.processes import read_processes
from tests.integration.local_pod import STEADY
from tests.integration.ssh_pod import SshPod
from tests.integration.ssh_server import ssh_server
from tests.integration.tcp_proxy import tcp_proxy
from tests.integration.trainer_runs import TINY, losses, steps_logged, wait_for, write_text_once
from tests.tmux_server import end_server

pytestmark = [pytest.mark.integration, pytest.mark.slow]
RUN = "r1"
UNCHECKED = ("--override", "preflight=a test")


class Pair:
    """Two pods behind sshd, `here` and `there`, and one operator who knows both."""

    def __init__(self, here: SshPod, there: SshPod) -> None:
        self.here, self.there = here, there

    def add(self) -> None:
        for name, pod in (("here", self.here), ("there", self.there)):
            key = ("--fingerprint", pod.server.host_key.fingerprint)
            words = ("pod", "add", name, pod.address, "--root", str(pod.root), *key)
            python = str(self.here.write_python())
            self.here.must(*words, "--python", python, "--profile", "cpu", "--json")

    def lose_the_first(self) -> None:
        """Power off: every process of the run ends at once, and nobody answers any more."""
        self.here.proxy.is_refusing = True
        self.here.proxy.cut()
        run = self.here.run_dir(RUN)
        watchdog, record = read_watchdog(run), read_processes(run)
        assert watchdog is not None
        assert record is not None
        assert record.trainer is not None
        for identity in (watchdog.identity, record.runner, record.trainer):
            os.kill(identity.pid, signal.SIGKILL)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with (
        ssh_server(tmp_path / "a") as first,
        tempfile.TemporaryDirectory(prefix="nsa-") as other_tmux,
        ssh_server(tmp_path / "b", environment={"TMUX_TMPDIR": other_tmux}) as second,
        tcp_proxy(first.port) as way,
        tcp_proxy(second.port) as other_way,
    ):
        key = (first.folder / "user_key.pub").read_bytes()
        (second.folder / "user_key.pub").write_bytes(key)
        here = SshPod(tmp_path / "1", server=first, proxy=way)
        there = SshPod(tmp_path / "2", socket=here.socket, server=second, proxy=other_way)
        for pod in (here, there):
            pod.folder.mkdir()
        both = Pair(here, there)
        both.add()
        yield both
        here.proxy.is_refusing = False
        there.stop()
        end_server(here.socket, other_tmux)
        here.stop()


def sets(folder: Path) -> list[str]:
    """The tiny model, with steps enough to outlive a pull."""
    changes = {
        "data.path": str(write_text_once(folder / "text.jsonl")),
        "data.cache_dir": str(folder / "shards"), "schedule.steps": 4000,
        "checkpoint.save_every": 20, "runtime.deterministic": True, "evaluation.eval_every": 0,
    }  # fmt: skip
    values = {
        f"{section}.{key}": value for section, of in TINY.items() for key, value in of.items()
    }
    nsa = values.pop("model.nsa")
    values |= {f"model.nsa.{key}": value for key, value in nsa.items()} | changes
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def test_a_run_goes_on_on_another_pod_to_the_same_digits(pair: Pair, tmp_path: Path) -> None:
    cli, old, new = pair.here, pair.here.run_dir(RUN), pair.there.run_dir(RUN)
    launched = cli(
        "launch", "--pod", "here", "--run-id", RUN, "--recipe", "tiny-cpu", *sets(tmp_path),
        *UNCHECKED, "--json",
    )  # fmt: skip
    assert launched.exit_code == 0, launched
    wait_for(lambda: old.checkpoint(20).exists())
    backup = cli.must("backup", "pull", RUN, "--json").data
    step = backup["newest_step"]
    wait_for(lambda: steps_logged(old) > step + 10)

    words = ("resume", RUN, "--pod", "there", *UNCHECKED)
    refused = cli(*words)
    assert refused.exit_code == 7, refused
    assert "Two trainers of one run" in refused.err

    pair.lose_the_first()
    lost_rows = losses(old)
    unproven = cli("resume", RUN, "--pod", "there")
    assert unproven.exit_code == 3, unproven
    assert "has no preflight" in unproven.err
    planned = cli.must(*words, "--plan")
    assert f"from step {step}, not on here" in planned.out.decode()
    assert not new.root.exists()

    moved = cli.must(*words, "--json").data
    assert (moved["attempt"], moved["from_step"]) == (2, step)
    assert (moved["pod"], moved["moved_from"]) == ("there", "here")
    assert {one["key"] for one in moved["differences"]} >= {"pod_id"}
    manifest = read_manifest(new)
    assert manifest.parent == Parent(run_id=RUN, step=step)
    assert manifest.pod_id == cli.must("pod", "show", "there", "--json").data["pod"]["pod_id"]
    assert "resumed" in [event.kind for event in read_events(new)]

    wait_for(lambda: steps_logged(new) > len(lost_rows))
    assert losses(new)[: len(lost_rows)] == lost_rows
    again = cli(*words)
    assert (again.exit_code, "is running" in again.err) == (7, True), again
    assert cli.must("halt", RUN, "--json").data["lost_steps"] == 0
    assert cli.must("status", RUN, "--json").data["record"]["pod"] == "there"


def test_a_move_that_was_cut_goes_on_and_starts_nothing_twice(pair: Pair, tmp_path: Path) -> None:
    cli, old, new = pair.here, pair.here.run_dir(RUN), pair.there.run_dir(RUN)
    cli.must("pod", "show", "here")
    launched = cli(
        "launch", "--pod", "here", "--run-id", RUN, "--trainer",
        STEADY, "--set", "schedule.steps=4000",
        "--set", "checkpoint.save_every=10", *UNCHECKED, "--json",
    )  # fmt: skip
    assert launched.exit_code == 0, launched
    wait_for(lambda: old.checkpoint(10).exists())
    cli.must("backup", "pull", RUN)
    pair.lose_the_first()
    words = (
        "resume", RUN, "--pod", "there", "--trainer", STEADY,
        *UNCHECKED,
    )  # fmt: skip
    moving = cli.start(*words)
    wait_for(new.root.exists)
    moving.kill()
    moving.communicate()
    said = cli(*words, "--json")
    if said.exit_code == 7:  # it had been started already; the registry learns of it
        assert "nsa-ops reconcile" in said.err, said
        settled = cli("reconcile", "-y", "--json").data
        assert ("resume", "adopt") in [(one["act"], one["way"]) for one in settled]
    else:
        assert said.exit_code == 0, said
    assert cli.must("status", RUN, "--json").data["record"]["pod"] == "there"
    assert read_manifest(new).attempt == 2
    pids = {beat.pid for beat in _beats(new) if beat.attempt == 2}
    assert len(pids) == 1


def test_a_pod_that_comes_back_with_the_run_on_it_is_found_and_halted(pair: Pair) -> None:
    cli, old = pair.here, pair.here.run_dir(RUN)
    launched = cli(
        "launch", "--pod", "here", "--run-id", RUN, "--trainer", STEADY, "--set",
        "schedule.steps=4000", "--set", "checkpoint.save_every=10", *UNCHECKED, "--json",
    )  # fmt: skip
    assert launched.exit_code == 0, launched
    wait_for(lambda: old.checkpoint(10).exists())
    cli.must("backup", "pull", RUN)
    pair.here.proxy.is_refusing = True
    pair.here.proxy.cut()
    cli.must("resume", RUN, "--pod", "there", "--trainer", STEADY, *UNCHECKED)
    waiting = cli("reconcile", "-y", "--json")
    assert (waiting.exit_code, [one["way"] for one in waiting.data]) == (10, ["wait"])
    assert "interrupted commands: 1" in cli.must("status", RUN).err
    pair.here.proxy.is_refusing = False
    settled = cli.must("reconcile", "-y", "--json").data
    assert [(one["act"], one["way"]) for one in settled] == [("leave pod", "halt")]
    wait_for(old.exit.exists)
    assert "continues on another pod" in old.exit.read_text()
    assert cli("status", RUN, "--exit-code").exit_code == 21
    assert cli.must("reconcile", "-y", "--json").data == []


def _beats(run: RunDir) -> list:
    from nsa_core.rundir.bounded_json import read_records
    from nsa_core.rundir.heartbeat import Heartbeat

    wait_for(lambda: any(b.attempt == 2 for b in read_records(run.heartbeat(), Heartbeat).records))
    return read_records(run.heartbeat(), Heartbeat).records
