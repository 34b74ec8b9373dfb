"""A bare Debian user behind a real sshd goes to a finished training step in one command."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.remote.snapshot import take_snapshot
from tests.integration.bare_machine import BarePod, bare_pod

pytestmark = pytest.mark.integration
RUN = ("--recipe", "tiny-cpu", "--set", "schedule.steps=3", "--set", "telemetry.log_every=1",
       "--run-id", "r1")  # fmt: skip


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[BarePod]:
    """With uv in the home, as images of providers have it, where the tests' environment has it."""
    uv = Path(sys.executable).with_name("uv")
    with bare_pod(tmp_path, uv=uv if uv.is_file() else None) as bare:
        yield bare


def asked(pod: BarePod) -> list[dict[str, Any]]:
    """Every call begun on the pod so far, as the audit log has it; its end is another line."""
    text = (pod.folder / "state" / "audit.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if "begun_by" in line]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a package index that is slow, and a machine that others use too
def test_a_bare_user_trains_after_one_command_and_a_second_provision_changes_nothing(
    pod: BarePod,
) -> None:
    pod.add_bare()
    launched = pod("launch", "--provision", *RUN, "-y", "--json", deadline_s=800)
    if "packages could not be installed" in launched.err:
        pytest.skip(f"no package index in reach of a bare user: {launched.err.strip()}")
    assert launched.exit_code == 0, launched
    assert pod("watch", "r1", "--json").exit_code == 0
    ended = read_exit(pod.run_dir("r1"))
    assert ended is not None, pod("logs", "r1")
    assert (ended.code, ended.step) == (0, 3), ended
    beats = read_records(pod.run_dir("r1").heartbeat(), Heartbeat).records
    losses = [beat.loss for beat in beats if beat.step >= 1 and beat.loss is not None]
    assert losses, beats
    assert all(0 < loss < 10 for loss in losses)

    receipt = json.loads((pod.root / "provision.json").read_text())
    assert receipt["code_id"] == take_snapshot().code_id
    assert receipt["installed"]["torch_version"].startswith("2.13.0")
    assert "none: no wheel" in receipt["flash_attention"]
    shown = pod.must("pod", "show", "bare", "--json").data
    assert shown["pod"]["python"] == receipt["python"]

    before, files = len(asked(pod)), (pod.root / "provision.json").stat()
    again = pod.must("provision", "bare", "--json").data
    assert again["done"] == []
    calls = asked(pod)[before:]
    assert [call["call"] for call in calls] == ["run"]
    assert (pod.root / "provision.json").stat().st_mtime_ns == files.st_mtime_ns
    owners = {path.owner() for path in pod.root.glob("*")}
    assert owners == {pod.user}
