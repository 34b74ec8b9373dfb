"""Two lineages of one run id never meet in one backup; a foreign checkpoint is never brought."""

import hashlib
import json
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from nsa_core.rundir.lineage import lineage_of
from nsa_core.rundir.manifest import read_manifest, write_manifest
from nsa_ops.backup.folder import read_backup_record
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.receipts import receipts_of
from nsa_ops.backup.restore import plan_restore
from nsa_ops.backup.transfer import Pulled
from nsa_ops.backup.verification import verify_backup
from nsa_ops.errors import PartialError, StateConflictError, VerificationError
from tests.ops.backup.case import RUN_ID, Case
from tests.ops.report.builder import RunBuilder

A, B = "a" * 32, "b" * 32


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def build(case: Case, *steps: int, attempt_id: str = A) -> RunBuilder:
    builder = RunBuilder(case.run, steps=max(steps)).launch(attempt_id=attempt_id)
    for step in steps:
        builder.train(step - 20, step, every=5).save(step)
    return builder


def pull(case: Case, which: str = "all", folder: str = RUN_ID) -> Pulled:
    link = case.link()
    planned = plan_pull(link, RUN_ID, case.backup_of(folder), which)
    return execute_pull(case.operator, link, planned)


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def change_checkpoint(case: Case, step: int, **fields: Any) -> None:
    path = case.run.checkpoint(step) / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))


def test_a_backup_says_which_attempts_it_holds(case: Case) -> None:
    build(case, 20)
    pull(case)
    record = read_backup_record(case.backup)
    assert record is not None
    assert record.lineage == lineage_of(read_manifest(case.run))


def test_a_chain_that_goes_on_is_pulled_into_the_same_backup(case: Case) -> None:
    builder = build(case, 20)
    pull(case)
    builder.resume().save(40)
    assert pull(case).pulled_steps == [40]
    record = read_backup_record(case.backup)
    assert record is not None
    assert record.lineage is not None
    assert sorted(record.lineage.ids) == [1, 2]
    assert verify_backup(case.backup.root).differences == []


def other_first(case: Case) -> None:
    shutil.rmtree(case.run.root)
    build(case, 20, 40, 60, attempt_id=B)


def forked(case: Case) -> None:
    """The pod's run goes on from attempt 1 otherwise than the one that was pulled."""
    manifest = read_manifest(case.run)
    earlier = {1: A}
    write_manifest(
        case.run, manifest.model_copy(update={"attempt_id": B, "earlier_attempts": earlier})
    )


def gone_back(case: Case) -> None:
    """The pod that the run left: it is still at attempt 1, and has trained on."""
    shutil.rmtree(case.run.root)
    build(case, 20, 40, 60)


@pytest.mark.parametrize("other", [other_first, forked, gone_back])
def test_another_lineage_is_a_conflict_that_changes_nothing(case: Case, other: Any) -> None:
    build(case, 20).resume().save(40)
    pull(case)
    before, receipts = tree(case.backup.root), case.operator.store.receipts()
    other(case)
    with pytest.raises(StateConflictError, match="are two different runs: ") as refused:
        pull(case)
    assert refused.value.exit_code == 7
    assert str(case.backup.root) in refused.value.message
    assert f"nsa-ops backup pull {RUN_ID} --dest" in refused.value.hint
    assert tree(case.backup.root) == before
    assert case.operator.store.receipts() == receipts


def test_another_folder_takes_the_other_lineage_and_saves_nothing_of_the_first(case: Case) -> None:
    build(case, 20)
    pull(case)
    other_first(case)
    assert pull(case, folder=f"elsewhere/{RUN_ID}").pulled_steps == [60, 40, 20]
    receipts = case.operator.store.receipts(RUN_ID)
    first = receipts_of(receipts, 1, A)
    assert [(one.step, Path(one.path).parents[1]) for one in first] == [(20, case.backup.root)]
    assert {one.step for one in receipts_of(receipts, 1, B)} == {20, 40, 60}
    assert len(receipts_of(receipts, 1, "")) == 4


def test_a_backup_that_another_lineage_reached_after_the_plan_is_refused(case: Case) -> None:
    build(case, 20)
    planned = plan_pull(case.link(), RUN_ID, case.backup, "all")
    other_first(case)
    pull(case)
    before = tree(case.backup.root)
    with pytest.raises(StateConflictError, match="two different runs"):
        execute_pull(case.operator, case.link(), planned)
    assert tree(case.backup.root) == before


def without_lineage(case: Case) -> None:
    """The record as an older version wrote it."""
    record = json.loads(case.backup.record.read_bytes())
    del record["lineage"]
    case.backup.record.write_text(json.dumps(record))


def test_a_backup_of_an_older_version_is_adopted_where_it_fits(case: Case) -> None:
    builder = build(case, 20, attempt_id="")
    pull(case)
    without_lineage(case)
    builder.resume().save(40)
    assert pull(case).pulled_steps == [40]
    record = read_backup_record(case.backup)
    assert record is not None
    assert record.lineage is not None
    assert sorted(record.lineage.ids) == [2]


def test_a_backup_of_an_older_version_is_no_place_for_a_new_launch_of_its_run(case: Case) -> None:
    build(case, 20, attempt_id="")
    pull(case)
    without_lineage(case)
    other_first(case)
    with pytest.raises(StateConflictError, match="attempt 1 is unknown in one and bbbbbbbbbbbb"):
        pull(case)


FOREIGN = [{"run_id": "another-run"}, {"attempt": 2}, {"attempt_id": B}]


@pytest.mark.parametrize("fields", FOREIGN, ids=str)
def test_a_foreign_checkpoint_is_refused_and_the_good_ones_are_brought(
    case: Case, fields: dict[str, Any]
) -> None:
    build(case, 20, 40)
    change_checkpoint(case, 40, **fields)
    with pytest.raises(
        PartialError, match=r"checkpoint `step_000040` is (not brought: it|of the run) "
    ) as part:
        pull(case)
    assert part.value.exit_code == 10
    assert case.backup.run.checkpoint(20).is_dir()
    assert not case.backup.run.checkpoint(40).exists()
    assert {one.step for one in case.operator.store.receipts(RUN_ID)} == {20}


def test_where_only_the_foreign_checkpoint_is_new_the_pull_ends_with_9(case: Case) -> None:
    build(case, 20, 40)
    change_checkpoint(case, 40, run_id="another-run")
    with pytest.raises(PartialError):
        pull(case, "latest")
    with pytest.raises(VerificationError, match="is of the run `another-run`"):
        pull(case, "latest")


def test_a_run_directory_whose_manifest_is_of_another_run_is_not_pulled(case: Case) -> None:
    build(case, 20)
    write_manifest(case.run, read_manifest(case.run).model_copy(update={"run_id": "another-run"}))
    with pytest.raises(VerificationError, match="is of run `another-run`"):
        pull(case)
    assert not case.backup.root.exists()


@pytest.mark.parametrize("content", [None, "{", '{"run_id": "x"}'])
def test_a_pod_that_does_not_say_its_lineage_adds_nothing_to_a_backup(
    case: Case, content: str | None
) -> None:
    build(case, 20).save(40)
    pull(case, "20")
    before = tree(case.backup.root)
    case.run.manifest.unlink()
    if content is not None:
        case.run.manifest.write_text(content)
    with pytest.raises(VerificationError) as refused:
        pull(case)
    assert refused.value.exit_code == 9
    assert tree(case.backup.root) == before


@pytest.mark.parametrize("fields", FOREIGN, ids=str)
def test_a_foreign_checkpoint_in_a_backup_fails_its_verification_and_restore(
    case: Case, fields: dict[str, Any]
) -> None:
    build(case, 20, 40)
    pull(case)
    path = case.backup.run.checkpoint(40) / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))
    found = verify_backup(case.backup.root)
    assert found.steps == [20]
    owners = (f"should be a checkpoint of run {RUN_ID}", f"should be of the run `{RUN_ID}`")
    assert any(owner in found.differences[0].sentence for owner in owners)
    with pytest.raises(VerificationError):
        plan_restore(case.backup, PurePosixPath(case.root / "new"))
    newest = plan_restore(case.backup, PurePosixPath(case.root / "new"), newest_only=True)
    assert newest.step == 20


def test_a_manifest_that_was_exchanged_in_a_backup_fails_its_verification(case: Case) -> None:
    build(case, 20)
    pull(case)
    case.backup.run.manifest.unlink()
    other = read_manifest(case.run).model_copy(update={"attempt_id": B})
    write_manifest(case.backup.run, other)
    sentences = [one.sentence for one in verify_backup(case.backup.root).differences]
    assert any("of the lineage that was pulled" in one for one in sentences)
