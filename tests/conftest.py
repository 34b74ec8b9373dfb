"""What every test shares: a quiet, offline process and the place of the shared cases."""

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read by torch, OpenMP and the hub's client when they are first imported, so set before any test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
gc.disable()  # until the tests are loaded

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the working tree."""
    return REPOSITORY


@pytest.fixture
def shared() -> Path:
    """The shared cases and seeds beside the repository; skips the test where they are absent."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the shared cases are not beside this checkout")
    return folder


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A new folder with a name short enough for a unix socket, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="nsa-") as name:
        yield Path(name)


NOT_RUN = pytest.StashKey[int]()


def pytest_deselected(items) -> None:
    """Count the tests that need a card and are left out."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.config.stash[NOT_RUN] = item.config.stash.get(NOT_RUN, 0) + 1


def pytest_sessionfinish(session) -> None:
    """A worker of pytest-xdist tells its count to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = session.config.stash.get(NOT_RUN, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Every worker collects all tests, so each count is the whole one; a crashed one has none."""
    if output := getattr(node, "workeroutput", None):
        node.config.stash[NOT_RUN] = output["not_run"]


def pytest_terminal_summary(terminalreporter) -> None:
    """Say where the time went, and which tests were not run: without a card none proves one."""
    show_durations(terminalreporter)
    if count := terminalreporter.config.stash.get(NOT_RUN, 0):
        terminalreporter.line(
            f"{count} GPU tests were NOT RUN; on a machine with a card: pytest tests/gpu -m gpu"
        )


def show_durations(terminalreporter) -> None:
    """The seconds of each folder's tests, all workers together, for a run that takes a minute."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[str(Path(report.nodeid.partition("::")[0]).parent)] += report.duration
    if sum(seconds.values()) < 60:
        return
    terminalreporter.section("seconds by folder")
    for folder, spent in seconds.most_common():
        terminalreporter.line(f"{spent:7.0f}  {folder}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """No test frees what all of them have loaded, so the collector need not walk it in each.

    The process that only hands out tests loads none, and comes here as well.
    """
    gc.freeze()
    gc.enable()
