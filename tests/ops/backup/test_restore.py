"""Restore: verified first, replaces nothing, and what stands there afterwards is a run."""

import shutil
from pathlib import Path, PurePosixPath

import pytest

from nsa_core.rundir.checkpoint import inspect_checkpoint, list_checkpoints
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import begin_next_attempt, read_manifest
from nsa_ops.backup import disk
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.restore import plan_restore, restore_here, restore_to_pod
from nsa_ops.errors import (
    LocalResourceError,
    NotFoundError,
    PodUnreachableError,
    StateConflictError,
    VerificationError,
)
from tests.ops.backup.case import RUN_ID, Case, CutLink, flip_bit


@pytest.fixture
def case(tmp_path: Path) -> Case:
    case = Case(tmp_path)
    case.build(20, 40).end(10, "halted", 40)
    link = case.link()
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, "all"))
    return case


def _contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_a_restored_run_equals_the_original_and_can_go_on(case: Case, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    restored = restore_here(plan_restore(case.backup, PurePosixPath(target)))
    run = RunDir(target / RUN_ID)
    assert restored.target == str(run.root)
    assert _contents(run.root) == _contents(case.run.root)
    assert [inspect_checkpoint(one.path).damage for one in list_checkpoints(run)] == ["", ""]
    assert begin_next_attempt(run, at_unix_s=1.0).attempt == 2
    assert read_manifest(run).run_id == RUN_ID


@pytest.fixture
def begun_again(tmp_path: Path) -> Case:
    """A backup that has step 40 of attempt 1, and step 10 of attempt 2, which began afresh."""
    case = Case(tmp_path)
    builder = case.build(20, 40).end(10, "halted", 40)
    link = case.link()
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, "latest"))
    for step in (20, 40):
        shutil.rmtree(case.run.checkpoint(step))
    builder.resume().event("resumed", step=0)
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, "latest"))
    builder.save(10)
    return case


def test_a_restored_run_does_not_go_on_from_what_it_went_back_behind(
    begun_again: Case, tmp_path: Path
) -> None:
    case, link = begun_again, begun_again.link()
    pulled = execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, "latest"))
    assert pulled.newest_step == pulled.at_risk.saved_step == 10
    assert case.backup.run.latest.read_text() == "step_000010\n"
    planned = plan_restore(case.backup, PurePosixPath(tmp_path / "elsewhere"))
    assert "the checkpoint of step 40, which a later attempt abandoned" in planned.plan.notes[-1]
    restored = restore_here(planned)
    assert restored.step == 10
    assert [one.step for one in list_checkpoints(RunDir(Path(restored.target)))] == [10]
    assert case.backup.run.checkpoint(40).is_dir()


def test_all_that_a_run_went_back_behind_is_restored_where_it_saved_nothing_since(
    begun_again: Case, tmp_path: Path
) -> None:
    planned = plan_restore(begun_again.backup, PurePosixPath(tmp_path / "elsewhere"))
    assert restore_here(planned).step == 40


def test_an_existing_run_is_never_replaced(case: Case, tmp_path: Path) -> None:
    planned = plan_restore(case.backup, PurePosixPath(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere" / RUN_ID).mkdir(parents=True)
    with pytest.raises(StateConflictError, match="replaces nothing") as caught:
        restore_here(planned)
    assert caught.value.exit_code == 7
    assert list((tmp_path / "elsewhere" / RUN_ID).iterdir()) == []


def test_a_damaged_backup_is_not_restored(case: Case, tmp_path: Path) -> None:
    flip_bit(case.backup.run.checkpoint(20) / "optimizer.safetensors")
    with pytest.raises(VerificationError, match=r"optimizer\.safetensors"):
        plan_restore(case.backup, PurePosixPath(tmp_path / "elsewhere"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_backup_without_a_checkpoint_says_what_it_lacks(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.build(20)
    link = case.link()
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, "none"))
    with pytest.raises(NotFoundError, match="has no checkpoint"):
        plan_restore(case.backup, PurePosixPath(tmp_path / "elsewhere"))


def test_a_restore_that_was_killed_is_begun_again(case: Case, tmp_path: Path) -> None:
    leftover = tmp_path / "elsewhere" / f".restoring_{RUN_ID}"
    leftover.mkdir(parents=True)
    (leftover / "half.bin").write_bytes(b"half")
    restore_here(plan_restore(case.backup, PurePosixPath(tmp_path / "elsewhere")))
    assert not leftover.exists()
    assert not (tmp_path / "elsewhere" / RUN_ID / "half.bin").exists()


def test_a_run_comes_back_to_a_new_pod(case: Case, tmp_path: Path) -> None:
    runs = tmp_path / "new-pod" / "runs"
    runs.mkdir(parents=True)
    link = case.link()
    planned = plan_restore(case.backup, PurePosixPath(runs), link=link)
    restore_to_pod(link, planned, case.told.append)
    assert _contents(runs / RUN_ID) == _contents(case.run.root)
    assert [path.name for path in runs.iterdir()] == [RUN_ID]
    with pytest.raises(StateConflictError):
        plan_restore(case.backup, PurePosixPath(runs), link=link)
    with pytest.raises(StateConflictError):
        restore_to_pod(link, planned, case.told.append)


def test_a_link_lost_in_the_middle_leaves_no_run_on_the_pod(case: Case, tmp_path: Path) -> None:
    runs = tmp_path / "new-pod" / "runs"
    runs.mkdir(parents=True)
    planned = plan_restore(case.backup, PurePosixPath(runs))
    with pytest.raises(PodUnreachableError):
        restore_to_pod(case.link(CutLink(1500)), planned, case.told.append)
    assert not (runs / RUN_ID).exists()
    restore_to_pod(case.link(), planned, case.told.append)
    assert _contents(runs / RUN_ID) == _contents(case.run.root)


def test_a_copy_that_arrives_damaged_gets_no_name(case: Case, tmp_path: Path) -> None:
    runs = tmp_path / "new-pod" / "runs"
    runs.mkdir(parents=True)

    class FlippingLink(CutLink):
        def put(self, source: Path, target: str, *, timeout_s: float) -> None:
            super().put(source, target, timeout_s=timeout_s)
            if target.endswith("step_000040/model.safetensors"):
                flip_bit(Path(target))

    planned = plan_restore(case.backup, PurePosixPath(runs))
    with pytest.raises(VerificationError, match="was expected"):
        restore_to_pod(case.link(FlippingLink(10**9)), planned, case.told.append)
    assert not (runs / RUN_ID).exists()


def test_the_newest_whole_checkpoint_alone_goes_to_another_pod(case: Case, tmp_path: Path) -> None:
    flip_bit(case.backup.run.checkpoint(40) / "model.safetensors")
    runs = PurePosixPath(tmp_path / "new-pod" / "runs")
    with pytest.raises(VerificationError):
        plan_restore(case.backup, runs)
    planned = plan_restore(case.backup, runs, newest_only=True)
    assert planned.step == 20
    assert "passed over" in planned.plan.notes[0]
    restore_to_pod(case.link(), planned, case.told.append)
    there = RunDir(Path(planned.target))
    assert [one.step for one in list_checkpoints(there)] == [20]
    flip_bit(case.backup.run.training_csv)
    with pytest.raises(VerificationError):
        plan_restore(case.backup, PurePosixPath(tmp_path / "x"), newest_only=True)


def test_what_a_cut_restore_left_beside_the_run_does_not_come_into_it(
    case: Case, tmp_path: Path
) -> None:
    runs = tmp_path / "new-pod" / "runs"
    leftover = runs / f".restoring_{RUN_ID}" / "checkpoints" / "step_000099"
    leftover.mkdir(parents=True)
    (leftover / "half.bin").write_bytes(b"half")
    planned = plan_restore(case.backup, PurePosixPath(runs))
    restore_to_pod(case.link(), planned, case.told.append)
    assert not (runs / RUN_ID / "checkpoints" / "step_000099" / "half.bin").exists()


def test_a_full_disk_of_the_pod_is_named_before_anything_is_sent(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "RESERVE_BYTES", 2**62)
    runs = tmp_path / "new-pod" / "runs"
    planned = plan_restore(case.backup, PurePosixPath(runs))
    with pytest.raises(LocalResourceError, match="on this machine has"):
        restore_to_pod(case.link(), planned, case.told.append)
    assert not runs.exists()
