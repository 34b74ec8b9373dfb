"""One lying world a process, made once and put back before every case."""

from collections.abc import Iterator

import pytest

from tests.integration.hostile.lying_pod import Side, World
from tests.integration.hostile.lying_world import lying_world


@pytest.fixture(scope="session")
def lasting_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with lying_world(tmp_path_factory.mktemp("hostile")) as made:
        yield made


@pytest.fixture
def world(lasting_world: World) -> World:
    lasting_world.reset()
    return lasting_world


@pytest.fixture
def far(world: World) -> Side:
    """The pod behind ssh."""
    return world.sides["far"]


@pytest.fixture
def near(world: World) -> Side:
    """The pod that is this machine."""
    return world.sides["near"]
