"""Push: a second copy elsewhere, whole or not at all, hashed where it is."""

from pathlib import Path, PurePosixPath

import pytest

from nsa_core.rundir.checkpoint import inspect_checkpoint, list_checkpoints
from nsa_core.rundir.layout import RunDir
from nsa_ops.backup import disk
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.push import Destination, execute_push, parse_destination, plan_push
from nsa_ops.backup.verification import verify_backup
from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    NotFoundError,
    PodUnreachableError,
    VerificationError,
)
from tests.ops.backup.case import RUN_ID, Case, CutLink, flip_bit
from tests.ops.cli_case import CommandLine


@pytest.fixture
def case(tmp_path: Path) -> Case:
    case = Case(tmp_path)
    case.build(20, 40)
    link = case.link()
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, "all"))
    return case


@pytest.fixture
def copy(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "far" / RUN_ID)


def far(case: Case, link: CutLink | None = None) -> Destination:
    root = PurePosixPath(case.root / "far")
    return Destination(link or CutLink(10**9), root, "nas:/far")


def test_a_copy_can_be_verified_and_restored_like_the_backup(case: Case, copy: RunDir) -> None:
    pushed = execute_push(case.operator, plan_push(case.operator, case.backup, far(case)))
    assert pushed.steps == [20, 40]
    found = verify_backup(copy.root, load=True)
    assert (found.steps, found.differences) == ([40, 20], [])
    again = plan_push(case.operator, case.backup, far(case))
    assert (again.plan.changes, again.pending_bytes) == (False, 0)


def test_a_cut_push_leaves_no_checkpoint_that_is_half_there(case: Case, copy: RunDir) -> None:
    planned = plan_push(case.operator, case.backup, far(case, CutLink(1500)))
    with pytest.raises(PodUnreachableError):
        execute_push(case.operator, planned)
    whole = [one for one in list_checkpoints(copy) if not inspect_checkpoint(one.path).damage]
    assert whole == list_checkpoints(copy)
    execute_push(case.operator, plan_push(case.operator, case.backup, far(case)))
    assert [one.step for one in list_checkpoints(copy)] == [40, 20]
    assert not list(copy.checkpoints.glob(".pushing_*"))


def test_a_damaged_copy_is_kept_aside_and_sent_again(case: Case, copy: RunDir) -> None:
    execute_push(case.operator, plan_push(case.operator, case.backup, far(case)))
    flip_bit(copy.checkpoint(40) / "model.safetensors")
    pushed = execute_push(case.operator, plan_push(case.operator, case.backup, far(case)))
    assert pushed.steps == [40]
    assert verify_backup(copy.root).differences == []
    assert (copy.checkpoints / "replaced_step_000040_0").is_dir()


def test_a_damaged_backup_is_not_pushed(case: Case, copy: RunDir) -> None:
    flip_bit(case.backup.run.checkpoint(40) / "model.safetensors")
    with pytest.raises(VerificationError):
        plan_push(case.operator, case.backup, far(case))
    assert not copy.root.exists()


def test_bytes_that_change_on_the_way_are_found_on_the_far_side(case: Case, copy: RunDir) -> None:
    class FlippingLink(CutLink):
        def put(self, source: Path, target: str, *, timeout_s: float) -> None:
            super().put(source, target, timeout_s=timeout_s)
            if target.endswith("step_000040/model.safetensors"):
                flip_bit(Path(target))

    with pytest.raises(VerificationError, match="was expected"):
        execute_push(
            case.operator,
            plan_push(case.operator, case.backup, far(case, FlippingLink(10**9))),
        )
    assert 40 not in [one.step for one in list_checkpoints(copy)]


def test_a_full_far_disk_is_named_before_anything_is_sent(
    case: Case, copy: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "RESERVE_BYTES", 2**62)
    with pytest.raises(LocalResourceError, match="free, and the backup needs"):
        execute_push(case.operator, plan_push(case.operator, case.backup, far(case)))
    assert not copy.root.exists()


@pytest.mark.parametrize(
    ("df", "free_bytes"),
    [
        (
            "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/a 100 60 40 60% /\n",
            40960,
        ),
        ("Filesystem 1024-blocks Used Available Capacity Mounted on\nmap auto 1 0 1 - /x\n", 1024),
        (
            "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/a 100 105 -5 105% /\n",
            0,
        ),
        ("df: cannot do it\n", None),
        ("", None),
    ],
)
def test_free_space_is_read_from_df(df: str, free_bytes: int | None) -> None:
    assert disk.parse_free_bytes(df) == free_bytes


def test_a_destination_is_a_known_pod_or_a_folder(case: Case, tmp_path: Path) -> None:
    assert parse_destination(case.operator, "here:/b").root == PurePosixPath("/b")
    assert parse_destination(case.operator, str(tmp_path)).root == PurePosixPath(tmp_path)
    with pytest.raises(ConfigurationError, match="is not absolute"):
        parse_destination(case.operator, "here:b")
    with pytest.raises(NotFoundError, match="no pod `me@nas`") as caught:
        parse_destination(case.operator, "me@nas:/b")
    assert "pod add nas" in caught.value.hint


def test_push_and_drill_on_the_command_line(case: Case, cli: CommandLine) -> None:
    target = str(case.root / "disk")
    done = cli("backup", "push", RUN_ID, target)
    assert (done.exit_code, f"agrees at {target}" in done.out) == (0, True)
    assert cli("backup", "push", target).exit_code == 0
    assert cli("backup", "push", "a", "b", "c").exit_code == 2
    assert cli("backup", "verify", f"{target}/{RUN_ID}", "--load").exit_code == 0
    own = str(case.backup.root.parent)
    assert cli("backup", "push", str(case.backup.root), own).exit_code == 2
    drilled = cli("backup", "restore", RUN_ID, "--drill")
    assert (drilled.exit_code, "continue from step 40" in drilled.out) == (0, True)
    assert not list(case.backup.root.parent.glob(".drill_*"))
    assert cli("backup", "restore", RUN_ID, "--drill", "--pod", "here").exit_code == 2


def test_a_push_of_a_run_to_nowhere_is_refused(
    case: Case, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(case.root)
    said = cli("backup", "push", RUN_ID)
    assert (said.exit_code, "no destination was given" in said.err) == (2, True)
    assert not (case.root / RUN_ID).exists()


def test_a_folder_of_the_same_name_does_not_hide_a_backup(
    case: Case, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case.root / "elsewhere" / RUN_ID).mkdir(parents=True)
    monkeypatch.chdir(case.root / "elsewhere")
    assert cli("backup", "verify", RUN_ID).exit_code == 0
    assert cli("backup", "verify", f"./{RUN_ID}").exit_code == 6
    assert cli("backup", "prune", f"./{RUN_ID}", "--keep", "1", "-y").exit_code == 6
