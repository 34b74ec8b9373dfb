"""A backup that a stranger made, or a target that lies: restore, push and prune spread nothing."""

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.hostile import tree_guard
from tests.integration.hostile.judged import pull, told
from tests.integration.hostile.lying_pod import World
from tests.integration.hostile.names import NAMES, Name

pytestmark = pytest.mark.integration
SOME = {
    "absolute", "parents", "nul", "300", "in-a-good-checkpoint",
}  # fmt: skip
REFUSED = (2, 6, 7, 9, 10)


def received(world: World) -> Path:
    """A backup of the near run that came from somebody else: all of it is theirs."""
    side = world.sides["near"]
    _, problems = pull(world, side, (0,))
    assert problems == []
    folder = world.laptop / "received" / side.run_id
    folder.parent.mkdir()
    side.backup.rename(folder)
    return folder


def name_in_record(world: World, folder: Path, name: str) -> None:
    """Let backup.json name a file with the hash that it really has, where it has one."""
    victim = Path(folder, name) if "\0" not in name else folder
    try:
        content = victim.read_bytes()
    except OSError:
        content = b""
    record = json.loads((folder / "backup.json").read_bytes())
    sha256 = tree_guard.hashlib.sha256(content).hexdigest()
    record["files"].append({"name": name, "size": len(content), "sha256": sha256})
    (folder / "backup.json").write_text(json.dumps(record))


@pytest.mark.parametrize("name", [one for one in NAMES if one.id in SOME], ids=lambda one: one.id)
def test_names_in_a_strangers_record_lead_nowhere(world: World, name: Name) -> None:
    far, folder = world.sides["far"], received(world)
    lie = name.lie.replace(b"<HOME>", bytes(world.home)).decode()
    name_in_record(world, folder, lie)
    to = world.laptop / "out"
    for words in (
        ("backup", "verify", str(folder)),
        ("backup", "restore", str(folder), "--to", str(to), "-y"),
        ("backup", "restore", str(folder), "--pod", "far", "-y"),
        ("backup", "push", str(folder), str(world.laptop / "disk"), "-y"),
    ):
        before = world.before(far)
        there = tree_guard.look(far.root)
        heard = world(*words)
        assert heard.problems(REFUSED) == [], f"{name.why}\n{heard.said}"
        assert world.harm(before, far) == [], heard.said
        assert tree_guard.changed(there, tree_guard.look(far.root)) == [], heard.said


@pytest.mark.parametrize("place", ["state.txt", "model.safetensors", "checkpoint.json"])
def test_links_in_a_strangers_backup_are_not_followed(world: World, place: str) -> None:
    far, folder = world.sides["far"], received(world)
    secret = world.home / ".ssh" / "id_ed25519"
    it = folder / "checkpoints" / "step_000030" / place
    secret.write_bytes(it.read_bytes())
    it.unlink()
    it.symlink_to(secret)
    for words in (
        ("backup", "restore", str(folder), "--to", str(world.laptop / "out"), "-y"),
        ("backup", "restore", str(folder), "--pod", "far", "-y"),
        ("backup", "push", str(folder), str(world.laptop / "disk"), "-y"),
    ):
        before, there = world.before(far), tree_guard.look(far.root)
        heard = world(*words)
        assert heard.problems(REFUSED) == [], heard.said
        assert world.harm(before, far) == [], heard.said
        assert tree_guard.changed(there, tree_guard.look(far.root)) == [], heard.said


def test_a_folder_that_is_a_link_is_neither_pulled_into_nor_pruned(world: World) -> None:
    side = world.sides["near"]
    outside = world.laptop / "elsewhere"
    for step in (20, 30):
        side.held(step).symlink_to(outside, target_is_directory=True)
    before = tree_guard.look(outside)
    for words in (
        ("backup", "prune", side.run_id, "--keep", "1", "-y"),
        ("backup", "pull", side.run_id, "--checkpoint", "all", "-y"),
    ):
        heard = world(*words)
        assert heard.problems((0, 7, 9, 10)) == [], heard.said
        assert tree_guard.look(outside) == before, heard.said


TARGETS = {
    "says-nothing": {"skip": True, "instead": "", "code": 0},
    "fails": {"skip": True, "instead": "", "code": 1},
    "nonsense": {"skip": True, "instead": "\x1b[2J{[[[\xff", "code": 0},
    "deep": {"skip": True, "instead": "[" * 100_000, "code": 0},
    "silent": {"skip": True, "asked": "rsync", "script": "sleep 100"},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("act", ["restore", "push"])
def test_a_target_that_lies_is_never_called_whole(world: World, act: str, target: str) -> None:
    near, far = world.sides["near"], world.sides["far"]
    far.lie(TARGETS[target])
    words = ("--pod", "far") if act == "restore" else (f"far:{far.root}/copies",)
    heard, problems = told(
        world, near, "backup", act, near.run_id, *words, "-y", "--timeout", "5",
        codes=(3, 4, 5, 6, 7, 8, 9, 10, 11), other=("*",),
    )  # fmt: skip
    assert far.num_lies, heard.said
    assert problems == [], heard.said


def test_a_pod_that_lies_about_its_checkpoints_loses_none_that_has_no_copy(world: World) -> None:
    side = world.sides["near"]
    shutil.copytree(side.checkpoint(10), side.checkpoint(40))
    heard, problems = told(
        world, side, "backup", "prune", side.run_id, "--on-pod", "--keep", "1", "-y",
        codes=(0, 7, 9, 10),
    )  # fmt: skip
    assert problems == [], heard.said
    assert side.checkpoint(20).is_dir()
    assert side.checkpoint(30).is_dir()
