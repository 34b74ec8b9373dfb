"""The same pods, honest: what the lies are measured against."""

import pytest

from tests.integration.hostile.ended_run import MARKER, STEPS
from tests.integration.hostile.lying_pod import World

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", ["far", "near"])
def test_an_honest_pod_is_pulled_whole(world: World, name: str) -> None:
    side = world.sides[name]
    before = world.before(side)
    heard = world("backup", "pull", side.run_id, "--checkpoint", "all", "-y")
    assert heard.problems([0]) == [], heard.said
    assert world.harm(before, side) == []
    assert [side.held(step).is_dir() for step in STEPS] == [True] * 3
    assert (side.backup / MARKER).read_bytes() == (side.run_dir / MARKER).read_bytes()
    assert world("backup", "verify", side.run_id, "--load").problems([0]) == []
