"""What commit efad81d wrote is still loaded, resumed, verified, restored and reported.

`earlier_run.tar.xz` was made by make_earlier_run.py: a run of two attempts with a checkpoint each,
the registry and audit log of its laptop, and its backup.
"""

import json
import sqlite3
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from tests.compatibility.continuation import train_two_steps
from tests.conftest import REPOSITORY
from tests.ops.cli_case import CommandLine

ARCHIVE = Path(__file__).with_name("earlier_run.tar.xz")
#: Where the archive was made; the registry has absolute paths.
MADE_AT = "/srv/nsa"
#: Another processor adds in another order; the two losses differ by 6e-4 of their value.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Earlier:
    """The unpacked archive and the command line of its laptop."""

    root: Path
    nsa_ops: CommandLine

    @property
    def run(self) -> RunDir:
        """The run on its pod."""
        (folder,) = (self.root / "pod" / "runs").iterdir()
        return RunDir(folder)

    @property
    def expected(self) -> dict[str, Any]:
        """Steps of the checkpoints, and the losses of the next two steps."""
        found: dict[str, Any] = json.loads((self.root / "expected.json").read_text())
        return found

    def must(self, *words: str) -> Any:
        """The data that a command prints with `--json`."""
        said = self.nsa_ops(*words, "--json")
        assert said.exit_code == 0, said
        return json.loads(said.out)["data"]


@pytest.fixture
def earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Earlier]:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.setenv("NSA_OPS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    _move_registry(tmp_path)
    return Earlier(tmp_path, CommandLine(capsys))


def _move_registry(root: Path) -> None:
    """Say in the registry where the pod and the backup are now; this code answers for the pod."""
    with closing(sqlite3.connect(root / "state" / "registry.sqlite")) as registry, registry:
        registry.execute(
            "UPDATE pods SET root = ?, python = ?", (str(root / "pod"), sys.executable)
        )
        registry.execute("UPDATE receipts SET path = replace(path, ?, ?)", (MADE_AT, str(root)))
        (code_id,) = registry.execute("SELECT code_id FROM runs").fetchone()
    (root / "pod" / "code").mkdir()
    (root / "pod" / "code" / code_id).symlink_to(REPOSITORY)


def test_the_run_directory_is_read(earlier: Earlier) -> None:
    manifest = read_manifest(earlier.run)
    assert (manifest.run_id, manifest.attempt) == (earlier.run.run_id, 2)
    assert list(manifest.earlier_attempts) == [1]
    first, second = earlier.expected["steps"]
    assert [one.step for one in list_checkpoints(earlier.run)] == [second, first]
    beats = read_records(earlier.run.heartbeat(), Heartbeat)
    assert beats.records[-1].step == second
    assert {beat.attempt for beat in beats.records} == {1, 2}
    assert (beats.torn, beats.problem) == (0, "")
    for folder, step in ((earlier.run.attempt(1), first), (earlier.run.root, second)):
        ended = read_exit(RunDir(folder))
        assert ended is not None
        assert (ended.code, ended.checkpoint_step) == (10, step)


def test_a_resumed_trainer_computes_the_losses_that_the_earlier_one_did(earlier: Earlier) -> None:
    losses = train_two_steps(earlier.run, earlier.expected["steps"][-1])
    assert losses == pytest.approx(earlier.expected["losses"], rel=TOLERANCE)


def test_the_registry_lists_the_run_and_the_agent_tells_its_status(earlier: Earlier) -> None:
    (line,) = earlier.must("run", "ls")
    report = line["report"]
    assert (report["run_id"], report["state"]) == (earlier.run.run_id, "halted")
    assert report["manifest"]["attempt"] == 2
    assert [fact["damage"] for fact in report["checkpoints"]] == ["", ""]
    assert line["at_risk"]["steps"] == 0
    assert earlier.nsa_ops("status", "--exit-code").exit_code == 24
    audited = earlier.must("audit")
    assert (audited["broken_line"], audited["missing"]) == (None, "")


def test_the_backup_is_verified_and_restored(earlier: Earlier) -> None:
    steps = earlier.expected["steps"][::-1]
    (listed,) = earlier.must("backup", "ls")
    assert (listed["steps"], listed["pod"]) == (steps, "here")
    verified = earlier.must("backup", "verify", "--load")
    assert (verified["steps"], verified["differences"]) == (steps, [])
    assert verified["num_tensors"] > 0
    restored = earlier.must("backup", "restore", "--to", str(earlier.root / "again"), "-y")
    assert restored["step"] == steps[0]
    losses = train_two_steps(RunDir(Path(restored["target"])), steps[0])
    assert losses == pytest.approx(earlier.expected["losses"], rel=TOLERANCE)


def test_the_report_shows_both_attempts(earlier: Earlier) -> None:
    written = earlier.must("report", earlier.run.run_id, "--out", str(earlier.root))
    assert written["missing"] == ["samples.json is missing"]
    page = Path(written["markdown"]).read_text()
    assert "enough steps" in page
    assert f"{earlier.expected['steps'][-1]}" in page
