"""A checkpoint in shards of several ranks is pulled, verified, restored and hashed as any other."""

from pathlib import Path, PurePosixPath

import pytest

from nsa_core.rundir.checkpoint import inspect_checkpoint
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import begin_next_attempt
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.restore import plan_restore, restore_here, restore_to_pod
from nsa_ops.backup.verification import verify_backup
from nsa_ops.errors import VerificationError
from nsa_ops.fleet.move import newest_backup
from nsa_ops.pod.verify import verify_newest
from tests.ops.backup.case import RUN_ID, Case, flip_bit
from tests.ops.report.builder import RunBuilder


def built(root: Path, **changes: int) -> Case:
    case = Case(root)
    builder = RunBuilder(case.run, steps=40).launch().train(0, 20, every=5).save(20)
    builder.train(20, 40, every=5).save_shards(40, **changes).validate(40).end(10, "halted", 40)
    return case


def pull(case: Case) -> None:
    link = case.link()
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, "all"))


def test_shards_come_back_from_a_backup_as_they_were(tmp_path: Path) -> None:
    case = built(tmp_path)
    pull(case)
    found = verify_backup(case.backup.root, load=True, receipts=case.operator.store.receipts())
    assert (found.differences, found.steps) == ([], [40, 20])
    assert found.num_tensors == 2 + 2 * 2
    restore_here(plan_restore(case.backup, PurePosixPath(tmp_path / "elsewhere")))
    run = RunDir(tmp_path / "elsewhere" / RUN_ID)
    state = inspect_checkpoint(run.checkpoint(40))
    assert (state.damage, state.manifest.num_shards if state.manifest else 0) == ("", 2)
    assert [(one.step, one.damage) for one in verify_newest(run)] == [(40, "")]


def test_a_move_takes_the_newest_shards_to_the_other_pod(tmp_path: Path) -> None:
    """What `resume --pod` does once the old pod is gone."""
    case = built(tmp_path)
    pull(case)
    runs = tmp_path / "new-pod" / "runs"
    runs.mkdir(parents=True)
    folder, receipts = newest_backup(case.operator, RUN_ID), case.operator.store.receipts()
    planned = plan_restore(
        folder, PurePosixPath(runs), link=case.link(), receipts=receipts, newest_only=True
    )
    assert planned.step == 40
    restore_to_pod(case.link(), planned, case.told.append)
    run = RunDir(runs / RUN_ID)
    assert [(one.step, one.damage) for one in verify_newest(run)] == [(40, "")]
    assert begin_next_attempt(run, at_unix_s=1.0).attempt == 2


@pytest.mark.parametrize("name", ["model_rank1.safetensors", "optimizer_rank0.safetensors",
                                  "shard_rank1.json", "random_rank1.json"])  # fmt: skip
def test_a_damaged_shard_is_named_on_the_pod_and_in_the_backup(tmp_path: Path, name: str) -> None:
    case = built(tmp_path)
    pull(case)
    flip_bit(case.backup.run.checkpoint(40) / name)
    (flaw,) = verify_backup(case.backup.root).differences
    assert flaw.path.name == name
    with pytest.raises(VerificationError, match=name):
        restore_here(plan_restore(case.backup, PurePosixPath(tmp_path / "elsewhere")))
    flip_bit(case.run.checkpoint(40) / name)
    damaged, whole = verify_newest(case.run)
    assert name in damaged.damage
    assert (whole.step, whole.damage) == (20, "")


def test_rows_that_no_shard_holds_are_found_when_the_files_are_opened(tmp_path: Path) -> None:
    case = built(tmp_path, leave_out=3)
    pull(case)
    (flaw,) = verify_backup(case.backup.root, load=True).differences
    assert "rows 17 to 20 of tensor `embedding` are missing" in flaw.sentence


def test_a_shard_of_the_newest_checkpoint_that_is_gone_leaves_the_one_before(
    tmp_path: Path,
) -> None:
    case = built(tmp_path)
    (case.run.checkpoint(40) / "optimizer_rank1.safetensors").unlink()
    damaged, whole = verify_newest(case.run)
    assert "optimizer_rank1.safetensors should be" in damaged.damage
    assert whole.step == 20
