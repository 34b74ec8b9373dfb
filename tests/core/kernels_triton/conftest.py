"""The interpreter processes of the tests here: all that are needed at once, a core each."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.core.kernels_triton.interpreter_process import Interpreting


@pytest.fixture(scope="session")
def interpreting(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Interpreting]]:
    """By name, every module that a selected test wants to be run."""
    wanted = {
        item.module.INTERPRETED
        for item in request.session.items
        if isinstance(item, pytest.Function) and "interpreted" in item.fixturenames
    }
    started = {name: Interpreting(name) for name in sorted(wanted)}
    yield started
    for one in started.values():
        one.end()


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest, interpreting: Mapping[str, Interpreting]) -> Any:
    """What the module named by `INTERPRETED` of a test module found."""
    return interpreting[request.module.INTERPRETED].result()
