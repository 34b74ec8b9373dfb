"""Checkpoints that are whole and good, and of something else; steps that come a second time."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hostile import tree_guard
from tests.integration.hostile.ended_run import (
    HELD,
    change_manifest,
    proper_files,
    read_manifest,
    write_checkpoint,
)
from tests.integration.hostile.judged import lacks, pull, told
from tests.integration.hostile.lying_pod import Side, World
from tests.integration.local_pod import LocalPod

pytestmark = pytest.mark.integration


def say(checkpoint: Path, **changes: Any) -> None:
    change_manifest(checkpoint, read_manifest(checkpoint) | changes)


def of_another_run(world: World, side: Side, step: int) -> None:
    say(side.checkpoint(step), run_id="other-run")


def of_another_launch(world: World, side: Side, step: int) -> None:
    """Everything of the other run's checkpoint but its run id, which is forged."""
    other = world.sides["near" if side.name == "far" else "far"]
    shutil.rmtree(side.checkpoint(step))
    shutil.copytree(other.checkpoint(step), side.checkpoint(step))
    say(side.checkpoint(step), run_id=side.run_id)


def of_no_attempt(world: World, side: Side, step: int) -> None:
    """As an old version wrote it, in a run whose attempts have an identity."""
    manifest = read_manifest(side.checkpoint(step))
    assert manifest.pop("attempt_id")
    change_manifest(side.checkpoint(step), manifest)


def of_another_step(world: World, side: Side, step: int) -> None:
    say(side.checkpoint(step), step=step + 1)


def under_another_name(world: World, side: Side, step: int) -> None:
    shutil.rmtree(side.checkpoint(step))
    shutil.copytree(side.checkpoint(HELD), side.checkpoint(step))


FOREIGN = (of_another_run, of_another_launch, of_no_attempt, of_another_step, under_another_name)


@pytest.mark.parametrize(
    ("side_name", "forge"),
    [("far", of_another_launch), *(("near", forge) for forge in FOREIGN)],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_foreign_checkpoint_is_refused_and_the_good_ones_come(
    world: World, side_name: str, forge: Any
) -> None:
    side = world.sides[side_name]
    forge(world, side, 20)
    heard, problems = pull(world, side, (7, 9, 10))
    assert problems + lacks(side, 30) == [], heard.said
    assert not side.held(20).exists()


@pytest.mark.parametrize("forge", FOREIGN[:3], ids=lambda one: one.__name__)
def test_a_foreign_checkpoint_that_is_here_already_does_not_pass_verify(
    world: World, forge: Any
) -> None:
    side = world.sides["near"]
    forge(world, side, 20)
    shutil.copytree(side.checkpoint(20), side.held(20))
    heard = world("backup", "verify", side.run_id)
    assert heard.problems((7, 9)) == [], heard.said


@pytest.mark.parametrize("forge", FOREIGN[:3], ids=lambda one: one.__name__)
def test_nothing_resumes_from_a_foreign_checkpoint(world: World, forge: Any) -> None:
    side = world.sides["near"]
    shutil.rmtree(side.checkpoint(10))
    shutil.rmtree(side.checkpoint(30))
    forge(world, side, 20)
    record = json.loads((side.run_dir / "exit.json").read_bytes())
    (side.run_dir / "exit.json").write_text(json.dumps(record | {"code": 75, "reason": "stopped"}))
    before = tree_guard.look(side.run_dir / "checkpoints")
    try:
        heard, problems = told(world, side, "resume", side.run_id, "-y", codes=(6, 7, 9))
        assert problems == [], heard.said
        assert tree_guard.changed(before, tree_guard.look(side.run_dir / "checkpoints")) == []
    finally:
        LocalPod(side.folder, world.socket).stop()


@pytest.mark.parametrize("side_name", ["far", "near"])
@pytest.mark.parametrize("which", [str(HELD), "all"])
def test_a_held_step_with_other_content_is_a_conflict_and_both_are_kept(
    world: World, side_name: str, which: str
) -> None:
    side = world.sides[side_name]
    write_checkpoint(side.checkpoint(HELD), proper_files(77))
    there = tree_guard.look(side.checkpoint(HELD))
    heard, problems = pull(world, side, (7,) if which == str(HELD) else (7, 10), which=which)
    assert problems == [], heard.said
    assert tree_guard.look(side.checkpoint(HELD)) == there
    assert str(HELD) in heard.err.decode()
    if which == "all":
        assert lacks(side, 20, 30) == []


def test_a_held_step_with_a_rewritten_manifest_is_a_conflict(world: World) -> None:
    side = world.sides["near"]
    say(side.checkpoint(HELD), created_unix_s=1.0, tokens_seen=1)
    heard, problems = pull(world, side, (7,), which=str(HELD))
    assert problems == [], heard.said


def test_a_run_directory_of_another_run_is_not_pulled_over_this_one(world: World) -> None:
    side = world.sides["near"]
    other = world.sides["far"]
    shutil.rmtree(side.run_dir)
    shutil.copytree(other.run_dir, side.run_dir)
    heard, problems = pull(world, side, (7, 9, 10))
    assert problems == [], heard.said
    assert [side.held(step).exists() for step in (10, 20, 30)] == [True, False, False]
