"""What stands under a good name is no plain file, or another one by the time it is read."""

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.hostile.ended_run import MARKER, TOKEN
from tests.integration.hostile.judged import lacks, pull, told
from tests.integration.hostile.lying_pod import World

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Kind:
    """A thing that stands where a file of the run should be."""

    id: str
    make: Callable[[Path], None]
    why: str


def link_to_a_key(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def link_upward(path: Path) -> None:
    path.symlink_to("../..", target_is_directory=True)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o020644, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root may make a device node")


def unix_socket(path: Path) -> None:
    back = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(back)


def hard_link(path: Path) -> None:
    path.hardlink_to(path.parent / "checkpoint.json")


KINDS = (
    Kind("link-to-a-file", link_to_a_key, "a link leads out of the run"),
    Kind("link-to-itself", link_to_itself, "a link that never ends"),
    Kind("link-upward", link_upward, "a folder that holds itself"),
    Kind("fifo", os.mkfifo, "a pipe that nobody writes blocks its reader for ever"),
    Kind("device", device, "/dev/zero has no end"),
    Kind("socket", unix_socket, "a socket cannot be read"),
    Kind("folder", Path.mkdir, "a folder has no bytes"),
)


@pytest.mark.parametrize(
    ("side_name", "kind"),
    [("near", kind) for kind in KINDS]
    + [("far", kind) for kind in KINDS if kind.id in {"fifo", "device", "link-to-a-file"}],
    ids=lambda one: one if isinstance(one, str) else one.id,
)
def test_no_plain_file_in_a_checkpoint_is_refused_alone(
    world: World, side_name: str, kind: Kind
) -> None:
    side = world.sides[side_name]
    place = side.checkpoint(20) / "state.txt"
    place.unlink()
    kind.make(place)
    heard, problems = pull(world, side, (9, 10))
    assert problems + lacks(side, 30) == [], f"{kind.why}\n{heard.said}"
    assert not side.held(20).exists()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_no_plain_file_in_the_run_directory_hinders_no_good_one(world: World, kind: Kind) -> None:
    side = world.sides["near"]
    (side.run_dir / "extra").mkdir()
    kind.make(side.run_dir / "extra" / "odd")
    (side.run_dir / MARKER).unlink()
    kind.make(side.run_dir / MARKER)
    heard, problems = pull(world, side, (0, 9, 10))
    assert problems + lacks(side, 20, 30) == [], f"{kind.why}\n{heard.said}"
    assert not (side.backup / "extra" / "odd").exists()


@pytest.mark.parametrize(
    "name", ["checkpoints/step_000020/checkpoint.json", "checkpoints/step_000020", "checkpoints"]
)
def test_a_link_in_the_place_of_a_manifest_or_a_folder_leads_nowhere(
    world: World, name: str
) -> None:
    side = world.sides["near"]
    aside = side.folder / "aside"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    (side.run_dir / name).rename(aside / "moved")
    (side.run_dir / name).symlink_to(aside / "moved")
    heard, problems = pull(world, side, (0, 6, 9, 10))
    assert problems == [], heard.said


SWAPS = {
    "link": ("rm -f {it}; ln -s /etc/passwd {it}", "a link in the place of what was listed"),
    "fifo": ("rm -f {it}; mkfifo {it}", "a pipe in the place of what was listed"),
    "folder": ("rm -f {it}; mkdir {it}", "a folder in the place of what was listed"),
    "gone": ("rm -f {it}", "nothing is there any more"),
    "other": ("printf other > {it}", "other bytes, and fewer"),
    "grown": ("truncate -s 3M {it}", "three MB of zeros after it"),
    "same-size": (
        "printf X | dd of={it} conv=notrunc bs=1 seek=20 2>/dev/null",
        "one byte differs",
    ),
}


@pytest.mark.parametrize(
    ("side_name", "swap"),
    [("far", swap) for swap in SWAPS] + [("near", "link"), ("near", "fifo"), ("near", "gone")],
)
def test_a_file_that_is_swapped_between_listing_and_reading_brings_nothing_else(
    world: World, side_name: str, swap: str
) -> None:
    side = world.sides[side_name]
    script, why = SWAPS[swap]
    it, kept = side.run_dir / MARKER, side.folder / "kept"
    shutil.copy(it, kept)
    # Each listing sees the true file, and what reads it then sees another.
    back = f"rm -rf {it}; cp {kept} {it}"
    rule = {"asked": "find ", "answer": MARKER, "prepare": back, "script": script.format(it=it)}
    side.lie(rule)
    heard, problems = pull(world, side, (0, 9, 10))
    assert side.num_lies, heard.said
    assert problems + lacks(side, 20, 30) == [], f"{why}\n{heard.said}"
    here = side.backup / MARKER
    assert not here.exists() or here.read_bytes().startswith(TOKEN) or swap == "other"
    assert not (here.exists() and b"root:" in here.read_bytes())


def test_a_checkpoint_that_is_swapped_while_it_is_pulled_is_not_held(world: World) -> None:
    side = world.sides["far"]
    weights = side.checkpoint(20) / "model.safetensors"
    script = f"printf X | dd of={weights} conv=notrunc bs=1 seek=9000 2>/dev/null"
    side.lie({"answer": MARKER, "script": script})
    heard, problems = pull(world, side, (9, 10))
    assert problems + lacks(side, 30) == [], heard.said
    assert not side.held(20).exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [("logs", "training.log"), ("status", "heartbeat_rank0.jsonl"), ("events", "events.jsonl")],
)
def test_a_pipe_in_the_place_of_a_file_that_is_read_ends_by_the_deadline(
    world: World, command: str, name: str
) -> None:
    side = world.sides["near"]
    (side.run_dir / name).unlink()
    os.mkfifo(side.run_dir / name)
    heard, problems = told(
        world, side, command, side.run_id, "--timeout", "4", codes=(0, 5, 6, 7, 8, 9, 10)
    )
    assert problems == [], heard.said
