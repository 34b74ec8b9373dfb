"""`backup` and `report` as a shell sees them: results on stdout, exit codes, next commands."""

import json
from pathlib import Path

import pytest

from nsa_core.rundir.events import Beginning
from nsa_ops.runs.status import status_line
from nsa_ops.store import RunRecord
from tests.ops.backup.case import RUN_ID, Case, flip_bit
from tests.ops.cli_case import CommandLine
from tests.ops.runs.documents import beat, report


@pytest.fixture
def case(tmp_path: Path) -> Case:
    case = Case(tmp_path)
    case.build(20, 40)
    record = RunRecord(RUN_ID, "here", "tiny-cpu", "cpu", "code", "c" * 64, 1.0)
    case.operator.store.save_run(record)
    return case


def test_status_counts_a_backup_only_while_it_is_there(case: Case, cli: CommandLine) -> None:
    cli("backup", "pull", RUN_ID)
    run = case.operator.store.find_run(RUN_ID)
    assert run is not None
    seen = report(run_id=RUN_ID, last_beat=beat(40))

    def sentence() -> str:
        at_risk = status_line(case.operator, run, seen).at_risk
        return at_risk.sentence if at_risk else ""

    assert sentence().startswith(
        "you lose nothing: the newest verified backup is step 40, verified"
    )
    seen = seen.model_copy(update={"beginnings": [Beginning(attempt=2, step=0)]})
    assert sentence() == "nothing is backed up: you lose all 40 steps"
    seen = seen.model_copy(update={"beginnings": [Beginning(attempt=2, step=40)]})
    assert sentence().startswith("you lose nothing")
    _pulled(case).rename(case.root / "elsewhere")
    assert sentence() == "nothing is backed up: you lose all 40 steps"
    (case.root / "elsewhere").rename(_pulled(case))
    assert sentence().startswith("you lose nothing")


def _pulled(case: Case) -> Path:
    return case.root / "state" / "backups" / RUN_ID


def test_the_only_run_is_pulled_without_being_named(case: Case, cli: CommandLine) -> None:
    done = cli("backup", "pull")
    assert done.exit_code == 0
    assert "newest whole              step 40" in done.out
    assert "you lose nothing" in done.out
    assert _pulled(case).is_dir()


def test_a_plan_prints_hashes_and_brings_nothing(case: Case, cli: CommandLine) -> None:
    done = cli("backup", "pull", RUN_ID, "--plan")
    assert "model.safetensors sha256" in done.out
    assert not _pulled(case).exists()


def test_json_is_one_envelope_and_nothing_else(case: Case, cli: CommandLine) -> None:
    document = json.loads(cli("backup", "pull", RUN_ID, "--json").out)
    assert document["schema"] == "nsa-ops/backup-pull/1"
    assert document["data"]["pulled_steps"] == [40]
    (entry,) = json.loads(cli("backup", "ls", "--json").out)["data"]
    assert (entry["run_id"], entry["steps"]) == (RUN_ID, [40])


def test_another_folder_is_remembered_by_its_receipts(case: Case, cli: CommandLine) -> None:
    elsewhere = case.root / "disk"
    assert cli("backup", "pull", RUN_ID, "--dest", str(elsewhere)).exit_code == 0
    assert str(elsewhere / RUN_ID) in cli("backup", "ls").out
    assert cli("backup", "verify", RUN_ID, "--load").exit_code == 0


def test_damage_ends_with_9_and_names_the_file_and_both_hashes(
    case: Case, cli: CommandLine
) -> None:
    cli("backup", "pull", RUN_ID)
    assert "4 tensors" not in cli("backup", "verify").out
    flip_bit(_pulled(case) / "checkpoints" / "step_000040" / "model.safetensors")
    done = cli("backup", "verify", RUN_ID)
    assert (done.exit_code, done.out) == (9, "")
    assert "model.safetensors" in done.err
    assert done.err.count("sha256") == 2


def test_a_restore_goes_where_it_is_told_and_only_once(case: Case, cli: CommandLine) -> None:
    cli("backup", "pull", RUN_ID)
    target = str(case.root / "new")
    done = cli("backup", "restore", RUN_ID, "--to", target)
    assert (done.exit_code, "resume continues from step 40" in done.out) == (0, True)
    again = cli("backup", "restore", RUN_ID, "--to", target)
    assert again.exit_code == 7
    assert "replaces nothing" in again.err
    assert cli("backup", "restore", RUN_ID, "--pod", "here").exit_code == 7
    assert cli("backup", "restore", RUN_ID).exit_code == 2


def test_a_run_restored_to_another_pod_is_looked_for_there(case: Case, cli: CommandLine) -> None:
    cli("backup", "pull", RUN_ID)
    root = case.root / "other"
    assert cli("pod", "add", "other", f"local:{root}", "-y").exit_code == 0
    done = cli("backup", "restore", RUN_ID, "--pod", "other")
    assert done.exit_code == 0
    assert "is looked for on pod `other` from now on, and not on `here`" in done.err
    assert "does not have the code" in done.err
    found = case.operator.store.find_run(RUN_ID)
    assert found is not None
    assert found.pod == "other"
    assert (root / "runs" / RUN_ID / "manifest.json").exists()


def test_a_gone_pod_still_has_its_backup(case: Case, cli: CommandLine) -> None:
    cli("backup", "pull", RUN_ID)
    case.operator.store.remove_pod("here")
    assert cli("backup", "verify", RUN_ID).exit_code == 0
    assert cli("backup", "restore", RUN_ID, "--to", str(case.root / "new")).exit_code == 0
    assert cli("report", str(_pulled(case)), "--out", str(case.root)).exit_code == 0
    pulled = cli("backup", "pull", RUN_ID)
    assert (pulled.exit_code, "hint:" in pulled.err) == (6, True)


def test_a_report_of_a_run_of_this_machine_is_written(case: Case, cli: CommandLine) -> None:
    done = cli("report", RUN_ID, "--out", str(case.root / "r.html"))
    assert done.exit_code == 0
    assert "on held-out text" not in done.out
    assert "one validation" in done.out
    assert (case.root / "r.html").read_text().startswith("<!doctype html>")
    assert (case.root / "r.md").read_text().startswith("# Training run")


@pytest.mark.parametrize(
    "words", [("report", "nope"), ("backup", "verify", "nope"), ("backup", "pull", "nope")]
)
def test_a_name_that_is_nothing_ends_with_6_and_a_next_command(
    case: Case, cli: CommandLine, words: tuple[str, ...]
) -> None:
    done = cli(*words)
    assert done.exit_code == 6
    assert "`nope`" in done.err
    assert "hint: See `nsa-ops" in done.err
