"""Retention: what goes, and that the last verified copy and an unproven one never do."""

import shutil
from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import list_checkpoints, plan_removal
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.retention import (
    RetentionPolicy,
    plan_prune_here,
    plan_prune_there,
    prune_here,
    prune_there,
)
from nsa_ops.errors import PartialError, StateConflictError
from nsa_ops.store import RunRecord
from tests.ops.backup.case import RUN_ID, Case, flip_bit
from tests.ops.cli_case import CommandLine


@pytest.fixture
def case(tmp_path: Path) -> Case:
    case = Case(tmp_path)
    case.build(20, 40, 60, 80)
    return case


def pull(case: Case, which: str = "all") -> None:
    link = case.link()
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, which))


def steps_of(case: Case, *, on_pod: bool = False) -> list[int]:
    run = case.run if on_pod else case.backup.run
    return [one.step for one in list_checkpoints(run)]


def test_the_newest_every_mth_and_the_protected_stay() -> None:
    steps = [10, 20, 30, 40, 50, 60]
    assert plan_removal(steps, keep_last=2, keep_every=30) == [40, 20, 10]
    assert plan_removal(steps, keep_last=1, keep_every=0, protected={10}) == [50, 40, 30, 20]
    assert plan_removal([], keep_last=1, keep_every=5) == []


def test_the_newest_backup_of_the_life_that_goes_on_is_never_pruned(tmp_path: Path) -> None:
    case = Case(tmp_path)
    builder = case.build(40)
    pull(case)
    shutil.rmtree(case.run.checkpoint(40))
    builder.resume().event("resumed", step=0)
    builder.save(20)
    pull(case)
    assert steps_of(case) == [40, 20]
    assert (
        plan_prune_here(case.operator, case.backup, RUN_ID, RetentionPolicy(1)).pruned.removed_steps
        == []
    )


def test_the_last_verified_checkpoint_stays_though_newer_ones_are_there(case: Case) -> None:
    pull(case)
    for step in (60, 80):
        flip_bit(case.backup.run.checkpoint(step) / "checkpoint.json")
    planned = plan_prune_here(case.operator, case.backup, RUN_ID, RetentionPolicy(1))
    assert 40 not in planned.pruned.removed_steps
    assert 20 in planned.pruned.removed_steps


def test_without_a_receipt_nothing_of_a_backup_goes(case: Case) -> None:
    pull(case)
    for one in case.operator.store.receipts(RUN_ID):
        case.operator.store.remove_receipt(RUN_ID, one.step, one.path)
    assert (
        plan_prune_here(case.operator, case.backup, RUN_ID, RetentionPolicy(1)).pruned.removed_steps
        == []
    )


def test_pruning_a_backup_removes_folders_and_receipts(case: Case) -> None:
    pull(case)
    pruned = prune_here(
        case.operator,
        case.backup,
        plan_prune_here(case.operator, case.backup, RUN_ID, RetentionPolicy(1, 40)),
    )
    assert (pruned.removed_steps, pruned.kept_steps) == ([60, 20], [40, 80])
    assert steps_of(case) == [80, 40]
    assert [one.step for one in case.operator.store.receipts(RUN_ID)] == [80, 40]
    assert pruned.freed_bytes > 0


ASIDE = (
    "abandoned_step_000020", "abandoned_step_000020_1", "conflict_step_000040_0123456789ab",
    "damaged_conflict_step_000040_0123456789ab", "damaged_step_000060",
)  # fmt: skip


def keep_aside(case: Case) -> None:
    for name in ASIDE:
        shutil.copytree(case.backup.run.checkpoint(20), case.backup.run.checkpoints / name)


def test_what_is_kept_aside_is_named_with_its_size_and_stays_unless_it_is_asked(
    case: Case,
) -> None:
    pull(case)
    keep_aside(case)
    planned = plan_prune_here(case.operator, case.backup, RUN_ID, RetentionPolicy(1))
    assert [one.name for one in planned.pruned.kept_aside] == list(ASIDE)
    size = sum(path.stat().st_size for path in case.backup.run.checkpoint(20).iterdir())
    assert {one.size_bytes for one in planned.pruned.kept_aside} == {size}
    assert len(planned.plan.notes) == len(ASIDE)
    prune_here(case.operator, case.backup, planned)
    assert all((case.backup.run.checkpoints / name).is_dir() for name in ASIDE)


def test_what_is_kept_aside_goes_alone_when_it_is_asked(case: Case) -> None:
    pull(case)
    keep_aside(case)
    outside = case.backup.root.parent / "precious"
    outside.mkdir()
    (outside / "file").write_text("mine")
    link = case.backup.run.checkpoints / "damaged_step_000080"
    link.symlink_to(outside, target_is_directory=True)
    for name in ("damaged_step_20", "conflict_step_000040_xyz", "my_damaged_step_000020"):
        (case.backup.run.checkpoints / name).mkdir()
    planned = plan_prune_here(case.operator, case.backup, RUN_ID, None, aside=True)
    pruned = prune_here(case.operator, case.backup, planned)
    assert [one.name for one in pruned.removed_aside] == [*ASIDE, link.name]
    assert (pruned.removed_steps, steps_of(case)) == ([], [80, 60, 40, 20])
    assert pruned.freed_bytes == sum(one.size_bytes for one in pruned.removed_aside)
    left = sorted(path.name for path in case.backup.run.checkpoints.iterdir())
    assert left[:3] == ["conflict_step_000040_xyz", "damaged_step_20", "latest"]
    assert left[3] == "my_damaged_step_000020"
    assert (outside / "file").read_text() == "mine"


def test_what_a_prune_that_was_cut_has_renamed_goes_with_the_next_one(case: Case) -> None:
    pull(case)
    folder = case.backup.run.checkpoint(20)
    for name in ("step_000020", "step_000040", *ASIDE):
        shutil.copytree(folder, folder.with_name(f".removing_{name}"))
    (folder.parent / ".removing_mine").mkdir()
    planned = plan_prune_here(case.operator, case.backup, RUN_ID, RetentionPolicy(3))
    prune_here(case.operator, case.backup, planned)
    left = [path.name for path in case.backup.run.checkpoints.glob(".removing_*")]
    assert left == [".removing_mine"]
    assert steps_of(case) == [80, 60, 40]


def test_a_prune_that_another_one_overtook_removes_nothing_and_says_so(case: Case) -> None:
    pull(case)
    keep_aside(case)
    keep_two, keep_three = (
        plan_prune_here(case.operator, case.backup, RUN_ID, RetentionPolicy(number), aside=True)
        for number in (2, 3)
    )
    prune_here(case.operator, case.backup, keep_three)
    (case.backup.run.checkpoints / ASIDE[0]).mkdir()
    with pytest.raises(StateConflictError, match=r"no longer holds step_000020, abandoned_.*_1,"):
        prune_here(case.operator, case.backup, keep_two)
    assert steps_of(case) == [80, 60, 40]
    assert (case.backup.run.checkpoints / ASIDE[0]).is_dir()


def test_prune_ls_and_verify_show_what_is_kept_aside(case: Case, cli: CommandLine) -> None:
    case.operator.store.save_run(RunRecord(RUN_ID, "here", "tiny-cpu", "cpu", "code", "c", 1.0))
    cli("backup", "pull", RUN_ID, "--dest", str(case.backup.root.parent))
    (case.backup.run.checkpoints / ASIDE[0]).mkdir()
    (case.backup.run.checkpoints / ASIDE[0] / "model").write_bytes(bytes(3 * 2**20))
    kept = f"kept aside: {ASIDE[0]} (3 MiB)\n`nsa-ops backup prune --aside` removes what is"
    assert kept in cli("backup", "verify", RUN_ID).out
    assert kept in cli("backup", "prune", RUN_ID, "--keep", "1", "-y").out
    assert "; 3 MiB is kept aside\n" in cli("backup", "ls").out
    assert cli("backup", "prune", RUN_ID, "--aside", "--on-pod", "--keep", "1").exit_code == 2
    unasked = cli("backup", "prune", RUN_ID, "--aside", "--no-input")
    assert (unasked.exit_code, "cannot be undone" in unasked.err) == (2, True)
    done = cli("backup", "prune", RUN_ID, "--aside", "-y")
    assert f"kept aside, removed  {ASIDE[0]}" in done.out
    assert "freed                3 MiB" in done.out
    assert "kept aside" not in cli("backup", "verify", RUN_ID).out


def test_a_pod_loses_only_what_has_a_whole_copy_here(case: Case) -> None:
    pull(case)
    flip_bit(case.backup.run.checkpoint(40) / "model.safetensors")
    link = case.link()
    planned = plan_prune_there(case.operator, link, RUN_ID, case.backup, RetentionPolicy(1))
    assert planned.pruned.unproven_steps == [40]
    prune_there(case.operator, link, planned)
    assert steps_of(case, on_pod=True) == [80, 40]
    assert not list(case.run.checkpoints.glob(".writing_removed_*"))


def test_the_known_good_checkpoint_of_a_pod_stays(case: Case) -> None:
    pull(case)
    case.run.known_good.write_text("step_000040\n")
    planned = plan_prune_there(case.operator, case.link(), RUN_ID, case.backup, RetentionPolicy(1))
    assert planned.pruned.removed_steps == [60, 20]


def test_nothing_is_removed_while_the_known_good_checkpoint_cannot_be_read(case: Case) -> None:
    pull(case)
    case.run.known_good.mkdir()
    with pytest.raises(PartialError, match="known_good"):
        plan_prune_there(case.operator, case.link(), RUN_ID, case.backup, RetentionPolicy(1))


def test_a_copy_without_a_receipt_proves_nothing(case: Case) -> None:
    pull(case)
    for one in case.operator.store.receipts(RUN_ID):
        case.operator.store.remove_receipt(RUN_ID, one.step, one.path)
    planned = plan_prune_there(case.operator, case.link(), RUN_ID, case.backup, RetentionPolicy(1))
    assert (planned.pruned.removed_steps, planned.pruned.unproven_steps) == ([], [60, 40, 20])


def test_a_checkpoint_that_changed_after_the_plan_is_not_removed(case: Case) -> None:
    pull(case)
    link = case.link()
    planned = plan_prune_there(case.operator, link, RUN_ID, case.backup, RetentionPolicy(1))
    manifest = case.run.checkpoint(60) / "checkpoint.json"
    manifest.write_text(manifest.read_text() + "\n")
    with pytest.raises(PartialError, match="step_000060 has changed"):
        prune_there(case.operator, link, planned)
    assert steps_of(case, on_pod=True) == [80, 60, 40, 20]


def test_prune_asks_first_and_says_what_went(case: Case, cli: CommandLine) -> None:
    case.operator.store.save_run(RunRecord(RUN_ID, "here", "tiny-cpu", "cpu", "code", "c", 1.0))
    cli("backup", "pull", RUN_ID, "--checkpoint", "all")
    assert cli("backup", "prune", RUN_ID).exit_code == 2
    unasked = cli("backup", "prune", RUN_ID, "--keep", "2", "--no-input")
    assert (unasked.exit_code, "cannot be undone" in unasked.err) == (2, True)
    done = cli("backup", "prune", RUN_ID, "--keep", "2", "-y")
    assert (done.exit_code, "checkpoints removed  40, 20" in done.out) == (0, True)
    pod = cli("backup", "prune", RUN_ID, "--keep", "1", "--on-pod", "-y")
    assert "checkpoints removed  60" in pod.out
    assert "no verified copy here, so it stays: 40, 20" in pod.out
    assert cli("backup", "pull", RUN_ID, "--keep-every", "5").exit_code == 2
