"""Pull: whole or not at all, continued after a cut, nothing good replaced."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import MANIFEST_NAME, inspect_checkpoint, list_checkpoints
from nsa_ops.backup.disk import RESERVE_BYTES
from nsa_ops.backup.folder import read_backup_record
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.transfer import Pulled
from nsa_ops.backup.verification import verify_backup
from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    NotFoundError,
    PartialError,
    PodUnreachableError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.remote.transport import Completed, Transport
from tests.ops.backup.case import RUN_ID, Case, CutLink, flip_bit
from tests.ops.report.builder import RunBuilder


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def _pull(case: Case, which: str = "latest", transport: Transport | None = None) -> Pulled:
    link = case.link(transport)
    return execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, which))


def _is_like_the_pod(case: Case) -> bool:
    there = {
        p.relative_to(case.run.root): p.read_bytes()
        for p in case.run.root.rglob("*")
        if p.is_file()
    }
    return all((case.backup.root / name).read_bytes() == content for name, content in there.items())


def test_a_pull_brings_the_newest_checkpoint_and_every_small_file(case: Case) -> None:
    case.build(20, 40)
    pulled = _pull(case)
    assert pulled.pulled_steps == [40]
    assert pulled.newest_step == 40
    for path in case.run.root.iterdir():
        if path.is_file():
            assert (case.backup.root / path.name).read_bytes() == path.read_bytes()
    assert case.backup.run.latest.read_text() == "step_000040\n"
    (receipt,) = case.operator.store.receipts(RUN_ID)
    assert (receipt.step, receipt.path) == (40, str(case.backup.run.checkpoint(40)))


def test_all_checkpoints_make_the_backup_equal_to_the_pod(case: Case) -> None:
    case.build(20, 40, 60)
    assert _pull(case, "all").pulled_steps == [60, 40, 20]
    assert _is_like_the_pod(case)


def test_a_pull_says_what_a_gone_pod_would_cost(case: Case) -> None:
    builder = case.build(20).train(20, 30, every=5)
    builder.beat(32, step_s=2.0)
    sentence = "you lose at most 12 steps / 24 s: the newest verified backup is step 20, verified"
    assert _pull(case).at_risk.sentence.startswith(sentence)


@pytest.mark.parametrize("begun_at", [0, 10])
def test_a_backup_of_an_abandoned_future_saves_nothing_of_the_run(
    case: Case, begun_at: int
) -> None:
    builder = case.build(20)
    _pull(case)
    shutil.rmtree(case.run.checkpoint(20))
    builder.resume().event("resumed", step=begun_at)
    builder.beat(30)
    sentence = "nothing is backed up: you lose all 30 steps"
    assert _pull(case).at_risk.sentence.startswith(sentence)
    builder.save(30)
    builder.beat(31)
    assert _pull(case).at_risk.sentence.startswith("you lose at most 1 step")
    builder.resume().event("resumed", step=30)
    builder.beat(32)
    assert _pull(case).at_risk.saved_step == 30


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("model.safetensors", Path.unlink),
        ("model.safetensors", _truncate),
        (MANIFEST_NAME, Path.unlink),
        (MANIFEST_NAME, lambda path: path.write_text(path.read_text().replace("tokens", "t0kens"))),
    ],
)
def test_a_backup_that_was_harmed_is_not_called_verified(
    case: Case, name: str, harm: Callable[[Path], None]
) -> None:
    case.build(20, 40)
    _pull(case, "all")
    harm(case.backup.run.checkpoint(40) / name)
    pulled = _pull(case, "none")
    assert (pulled.newest_step, pulled.at_risk.saved_step) == (20, 20)
    assert pulled.at_risk.sentence.startswith("you lose at most 20 steps")


def test_a_pull_without_checkpoints_says_when_the_backup_was_verified(case: Case) -> None:
    case.build(20)
    _pull(case)
    case.operator.clock.sleep(3600)
    assert _pull(case, "none").at_risk.verified_unix_s == 1_800_000_000.0
    assert _pull(case).at_risk.verified_unix_s == 1_800_003_600.0


def test_a_checkpoint_without_a_receipt_is_not_called_verified(case: Case) -> None:
    case.build(20)
    shutil.copytree(case.run.checkpoints, case.backup.run.checkpoints)
    pulled = _pull(case, "none")
    assert pulled.newest_step is None
    assert pulled.at_risk.sentence.startswith("nothing is backed up: you lose all 20 steps")


def test_a_second_pull_moves_nothing_and_verifies_what_is_here(case: Case) -> None:
    case.build(20)
    _pull(case)
    again = _pull(case)
    assert (again.num_files, again.pulled_steps, again.num_bytes) == (0, [], 0)
    assert again.present_steps == [20]


def test_a_grown_log_is_continued_and_not_sent_again(case: Case) -> None:
    builder = case.build(20)
    _pull(case)
    before = case.run.training_csv.stat().st_size
    builder.row(25)
    assert _pull(case).num_bytes == case.run.training_csv.stat().st_size - before
    assert case.backup.run.training_csv.read_bytes() == case.run.training_csv.read_bytes()


def test_a_rewritten_log_is_brought_from_its_beginning(case: Case) -> None:
    case.build(20)
    _pull(case)
    case.run.training_csv.write_text("step,loss\n" + "1,2.5\n" * 400)
    _pull(case)
    assert case.backup.run.training_csv.read_bytes() == case.run.training_csv.read_bytes()


@pytest.mark.parametrize("tenth", range(10))
def test_a_pull_that_is_cut_leaves_nothing_partial_and_then_continues(
    case: Case, tenth: int
) -> None:
    case.build(20, 40)
    link = case.link()
    total = plan_pull(link, RUN_ID, case.backup, "all").pending_bytes
    cut = CutLink(total * tenth // 10)
    with pytest.raises(PodUnreachableError):
        _pull(case, "all", cut)
    for checkpoint in list_checkpoints(case.backup.run):
        assert not inspect_checkpoint(checkpoint.path).damage
    for path in case.run.root.iterdir():
        here = case.backup.root / path.name
        assert not here.is_file() or here.read_bytes() == path.read_bytes()
    done = _pull(case, "all")
    assert _is_like_the_pod(case)
    sent_before = total * tenth // 10 - max(0, cut.budget)
    assert done.num_bytes <= total - sent_before + 2 * 700
    assert verify_backup(case.backup.root, load=True).differences == []


def test_a_kill_between_the_last_byte_and_the_rename_costs_nothing(case: Case) -> None:
    case.build(20)
    _pull(case)
    case.backup.run.checkpoint(20).rename(case.backup.pulling(20))
    again = _pull(case)
    assert again.pulled_steps == [20]
    assert again.num_bytes == 0


def test_leftovers_of_another_checkpoint_of_this_step_are_thrown_away(case: Case) -> None:
    case.build(20)
    pulling = case.backup.pulling(20)
    pulling.mkdir(parents=True)
    (pulling / "model.safetensors").write_bytes(b"x" * 50)
    (pulling / ".model.safetensors.part").write_bytes(b"y" * 30)
    (pulling / "stranger.bin").write_bytes(b"z")
    (pulling / MANIFEST_NAME).write_text("{}")
    _pull(case)
    assert _is_like_the_pod(case)
    assert not (case.backup.run.checkpoint(20) / "stranger.bin").exists()


def test_a_damaged_checkpoint_here_is_kept_aside_and_brought_again(case: Case) -> None:
    case.build(20)
    _pull(case)
    flip_bit(case.backup.run.checkpoint(20) / "model.safetensors")
    assert _pull(case).pulled_steps == [20]
    assert _is_like_the_pod(case)
    assert (case.backup.run.checkpoints / "damaged_step_000020").is_dir()


def _write_another(builder: RunBuilder, step: int) -> None:
    """Another attempt writes the checkpoint of a step again."""
    shutil.rmtree(builder.run.checkpoint(step))
    builder.resume().save(step)


def test_another_checkpoint_of_a_held_step_is_a_conflict_and_both_are_kept(case: Case) -> None:
    builder = case.build(20)
    _pull(case)
    good = _tree(case.backup.run.checkpoint(20))
    (receipt,) = case.operator.store.receipts(RUN_ID)
    _write_another(builder, 20)
    for _again in range(2):
        with pytest.raises(StateConflictError, match="Step 20 is here with") as caught:
            _pull(case)
        (kept,) = case.backup.run.checkpoints.glob("conflict_*")
        assert caught.value.exit_code == 7
        assert str(kept) in caught.value.message
        assert receipt.manifest_sha256 in caught.value.message
        assert _tree(kept) == _tree(case.run.checkpoint(20))
        assert _tree(case.backup.run.checkpoint(20)) == good
        assert case.operator.store.receipts(RUN_ID) == [receipt]
    assert verify_backup(case.backup.root, load=True).differences == []


def test_a_step_that_is_saved_again_after_a_rollback_takes_the_place_of_the_abandoned_one(
    case: Case,
) -> None:
    """Both are kept; the run has recorded that it went back."""
    builder = case.build(10, 20)
    _pull(case)
    old, new = _tree(case.backup.run.checkpoint(20)), case.run.checkpoint(20)
    shutil.rmtree(new)
    builder.resume().event("resumed", step=10)
    builder.save(20)
    assert _pull(case).at_risk.saved_step == 20
    assert _tree(case.backup.run.checkpoint(20)) == _tree(new)
    (kept,) = case.backup.run.checkpoints.glob("abandoned_step_*")
    assert _tree(kept) == old
    assert verify_backup(case.backup.root, load=True).differences == []
    shutil.rmtree(new)
    builder.save(20)  # the same attempt saves another one: no rollback explains that
    with pytest.raises(StateConflictError, match="Step 20 is here with"):
        _pull(case)


def test_a_conflict_blocks_no_other_checkpoint(case: Case) -> None:
    builder = case.build(20)
    _pull(case)
    _write_another(builder, 20)
    builder.train(20, 40, every=5).save(40)
    with pytest.raises(StateConflictError):
        _pull(case, "all")
    assert [one.step for one in list_checkpoints(case.backup.run)] == [40, 20]
    assert [one.step for one in case.operator.store.receipts(RUN_ID)] == [40, 20]


def _tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_a_checkpoint_damaged_on_the_pod_never_replaces_a_good_one(case: Case) -> None:
    case.build(20)
    _pull(case)
    good = (case.backup.run.checkpoint(20) / "model.safetensors").read_bytes()
    flip_bit(case.run.checkpoint(20) / "model.safetensors")
    _pull(case)
    assert (case.backup.run.checkpoint(20) / "model.safetensors").read_bytes() == good


def test_a_checkpoint_damaged_on_the_pod_is_named_with_both_hashes(case: Case) -> None:
    case.build(20)
    expected = json.loads((case.run.checkpoint(20) / MANIFEST_NAME).read_text())["files"][0][
        "sha256"
    ]
    flip_bit(case.run.checkpoint(20) / "model.safetensors")
    _pull(case, "none")
    with pytest.raises(VerificationError, match=rf"model\.safetensors.*{expected}"):
        _pull(case)
    assert list_checkpoints(case.backup.run) == []
    assert case.operator.store.receipts(RUN_ID) == []


def test_a_checkpoint_that_is_being_written_is_left_alone(case: Case) -> None:
    case.build(20)
    writing = case.run.checkpoints / ".writing_step_000040"
    writing.mkdir()
    (writing / "model.safetensors").write_bytes(b"half")
    bare = case.run.checkpoint(60)
    bare.mkdir()
    (bare / "model.safetensors").write_bytes(b"no manifest yet")
    assert _pull(case, "all").pulled_steps == [20]
    assert sorted(p.name for p in case.backup.run.checkpoints.iterdir()) == [
        "latest",
        "step_000020",
    ]


def test_the_exit_record_of_an_earlier_attempt_makes_room(case: Case) -> None:
    builder = case.build(20).end(10, "halted", 20)
    _pull(case)
    assert case.backup.run.exit.exists()
    builder.resume()
    _pull(case)
    assert not case.backup.run.exit.exists()
    assert (case.backup.run.attempt(1) / "exit.json").exists()
    assert verify_backup(case.backup.root).differences == []


def test_space_is_checked_before_the_first_byte(case: Case) -> None:
    case.build(20)
    link = case.link()
    planned = plan_pull(link, RUN_ID, case.backup, "latest")
    with pytest.raises(LocalResourceError, match="1 KiB free"):
        execute_pull(case.operator, link, planned, free_bytes=lambda path: 1024)
    assert not case.backup.root.exists()


def test_a_disk_that_fills_up_in_the_middle_is_one_clear_line(case: Case) -> None:
    case.build(20)

    class FullDisk(CutLink):
        def _spend(self, num_bytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(LocalResourceError, match=r"is full; what arrived before is kept"):
        _pull(case, "latest", FullDisk(0))


class _Meanwhile(CutLink):
    """Something happens on the pod just before a file is read."""

    def __init__(self, name: str, act: Callable[[Path], object]) -> None:
        super().__init__(10**9)
        self._name, self._act = name, act

    def stream(
        self, path: str, offset: int, sink: Callable[[bytes], object],
        *, max_bytes: int, timeout_s: float,
    ) -> None:  # fmt: skip
        if path.endswith(self._name):
            self._act(Path(path))
        super().stream(path, offset, sink, max_bytes=max_bytes, timeout_s=timeout_s)

    def run_into(
        self, argv: Sequence[str], sink: Callable[[bytes], object],
        *, stdin: bytes = b"", timeout_s: float, max_bytes: int,
    ) -> Completed:  # fmt: skip
        for name in stdin.decode().splitlines():
            path = f"{argv[-1]}/{name}"
            if path.endswith(self._name):
                self._act(Path(path))
        return super().run_into(argv, sink, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes)


def test_a_checkpoint_that_retention_removes_meanwhile_costs_only_itself(case: Case) -> None:
    case.build(20, 40)
    link = _Meanwhile("step_000020/model.safetensors", lambda path: path.unlink(missing_ok=True))
    with pytest.raises(PartialError, match=r"step_000020/model\.safetensors") as caught:
        _pull(case, "all", link)
    assert caught.value.exit_code == 10
    assert [one.step for one in list_checkpoints(case.backup.run)] == [40]


def test_a_file_that_is_rewritten_while_it_is_read_is_brought_as_it_is_then(case: Case) -> None:
    case.build(20)
    link = _Meanwhile("val.csv", lambda path: path.write_text("step,val_loss\n7,1.0\n"))
    assert _pull(case, "latest", link).pulled_steps == [20]
    assert case.backup.run.validation_csv.read_text() == "step,val_loss\n7,1.0\n"
    assert _is_like_the_pod(case)


def test_a_file_that_never_holds_still_keeps_its_older_copy(case: Case) -> None:
    case.build(20)
    _pull(case)
    before = case.backup.run.validation_csv.read_bytes()
    case.run.validation_csv.write_text("1" * 100)
    counter = iter(range(100, 200))
    link = _Meanwhile("val.csv", lambda path: path.write_text(str(next(counter)) * 40))
    with pytest.raises(VerificationError, match=r"val\.csv"):
        _pull(case, "latest", link)
    assert case.backup.run.validation_csv.read_bytes() == before
    record = read_backup_record(case.backup)
    assert record is not None
    assert "val.csv" in {file.name for file in record.files}
    assert verify_backup(case.backup.root).differences == []
    _pull(case)
    assert _is_like_the_pod(case)


def test_two_pulls_of_one_backup_do_not_meet(case: Case) -> None:
    case.build(20)
    with case.backup.locked(), pytest.raises(StateConflictError, match="Another command"):
        _pull(case)


def test_unknown_runs_and_steps_are_named(case: Case) -> None:
    with pytest.raises(NotFoundError, match="does not exist on this machine"):
        _pull(case)
    case.build(20, 40)
    with pytest.raises(NotFoundError, match="step 30; it has: 40, 20"):
        _pull(case, "30")
    with pytest.raises(ConfigurationError, match="must be latest, all, none or a step"):
        _pull(case, "newest")


def test_a_plan_changes_nothing_and_names_every_hash(case: Case) -> None:
    case.build(20)
    plan = plan_pull(case.link(), RUN_ID, case.backup, "latest").plan
    assert plan.changes
    assert not case.backup.root.exists()
    assert any("model.safetensors sha256" in file for step in plan.steps for file in step.files)


def test_unusual_file_names_on_the_pod_arrive_as_they_are(case: Case) -> None:
    case.build(20)
    for name in ("a b.txt", " x ", "quote'\".txt", "$(touch x).txt", "-rf", "-", "日本", "n" * 255):
        (case.run.root / name).write_text(name)
    _pull(case)
    assert _is_like_the_pod(case)


def test_a_finished_pull_is_an_ended_intent_and_a_cut_one_says_why(case: Case) -> None:
    case.build(20)
    with pytest.raises(PodUnreachableError):
        _pull(case, "latest", CutLink(100))
    _pull(case)
    assert case.operator.store.open_intents() == []
    assert read_backup_record(case.backup) is not None


def test_what_has_no_room_is_left_alone_and_everything_else_is_brought(case: Case) -> None:
    case.build(20)
    link = case.link()
    planned = plan_pull(link, RUN_ID, case.backup, "latest")
    size = planned.checkpoints[0].manifest.total_bytes
    smaller = [one for one in planned.files if one.size < size]
    planned = replace(planned, files=smaller)
    free = sum(one.size for one in smaller) + size // 2 + RESERVE_BYTES
    with pytest.raises(LocalResourceError, match="the checkpoint of step 20 needs"):
        execute_pull(case.operator, link, planned, free_bytes=lambda path: free)
    assert not case.backup.run.checkpoint(20).exists()
    assert all((case.backup.root / one.name).exists() for one in smaller)


def test_a_file_that_claims_more_than_the_disk_has_costs_only_itself(case: Case) -> None:
    case.build(20)
    link = case.link()
    planned = plan_pull(link, RUN_ID, case.backup, "latest")
    lying = replace(planned.files[0], size=2**50)
    planned = replace(planned, files=[lying, *planned.files[1:]])
    with pytest.raises(PartialError, match=r"the file .* needs 1\.02e"):
        execute_pull(case.operator, link, planned)
    assert case.backup.run.checkpoint(20).exists()
    assert not (case.backup.root / lying.name).exists()


def test_links_on_the_pod_are_refused_by_name_and_never_followed(case: Case) -> None:
    case.build(20)
    (case.run.root / "notes").symlink_to("/etc/passwd")
    os.mkfifo(case.run.root / "pipe")
    with pytest.raises(PartialError, match="not complete, with 2 problems: ") as refused:
        _pull(case)
    assert "link" in refused.value.message
    assert not (case.backup.root / "notes").exists()
    assert case.backup.run.checkpoint(20).exists()


def test_a_pipe_that_the_run_has_set_aside_does_not_make_each_pull_a_part(case: Case) -> None:
    case.build(20)
    os.mkfifo(case.run.root / "training.csv.aside-1")
    assert _pull(case).problems == []
    os.mkfifo(case.run.root / "other")
    with pytest.raises(VerificationError, match="Refused: `other` is a link"):
        _pull(case)
