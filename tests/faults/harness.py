"""Plant faults in copies of the repository and see which tests fail.

A parent imports torch once and forks a child for each fault, so a fault costs what its tests cost.
Each slot has a copy of the repository of its own; the checkout is never edited. The parent must
not have imported the product, because a child takes everything it imports from its copy.
"""

import compileall
import gc
import json
import os
import py_compile
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest

#: Imported before the forks: slow to import, and not part of the product.
WARM = (
    "numpy", "torch", "torch._dynamo", "torch.distributed", "torch.utils.checkpoint", "triton",
    "pydantic.fields", "pydantic.types", "yaml", "safetensors.torch", "hypothesis.strategies",
    "_hypothesis_pytestplugin", "pytest_socket", "pytest_timeout",
)  # fmt: skip
PRODUCT = ("nsa_core", "nsa_ops", "tests")
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")
ALREADY_IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # of a plugin that is warm
TAIL_CHARACTERS = 3000


@dataclass(frozen=True)
class Job:
    """Tests to run, with one file of the copy replaced; `edit` is (file, text), or None."""

    name: str
    tests: tuple[str, ...]
    edit: tuple[str, str] | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ran:
    """What the tests of a job did.

    Attributes:
        exit_code: Of pytest: 0 all passed, 1 some failed; None if the time was up.
        outcomes: `passed`, `failed` or `skipped` by test id.
        seconds: Wall time.
        tail: End of what pytest printed.
    """

    exit_code: int | None
    outcomes: dict[str, str]
    seconds: float
    tail: str

    def passed(self, test: str) -> bool:
        """Whether a test, or all of its cases, passed, and at least one of them ran."""
        found = [
            outcome
            for name, outcome in self.outcomes.items()
            if name == test or name.startswith((f"{test}[", f"{test}::"))
        ]
        return "passed" in found and "failed" not in found

    @property
    def failed(self) -> list[str]:
        """Ids of the tests that failed."""
        return [name for name, outcome in self.outcomes.items() if outcome == "failed"]


@dataclass
class Slot:
    """A copy of the repository, and the child that runs in it."""

    tree: Path
    job: Job | None = None
    pid: int = 0
    started_s: float = 0.0
    original: str = ""

    @property
    def result(self) -> Path:
        """Where the child writes the outcomes of its tests."""
        return self.tree.parent / f"{self.tree.name}.json"

    @property
    def output(self) -> Path:
        """Where the child prints."""
        return self.tree.parent / f"{self.tree.name}.txt"

    def start(self, job: Job) -> None:
        """Plant the edit of a job and fork a child that runs its tests."""
        self.job, self.started_s = job, time.monotonic()
        self.result.unlink(missing_ok=True)
        if job.edit is not None:
            path = self.tree / job.edit[0]
            self.original = path.read_text()
            path.write_text(job.edit[1])
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            _run_child(self.tree, job, self.result, self.output)

    def finish(self, exit_code: int | None) -> Ran:
        """Take the edit back and read what the child left."""
        assert self.job is not None
        if self.job.edit is not None:
            (self.tree / self.job.edit[0]).write_text(self.original)
        seconds = time.monotonic() - self.started_s
        outcomes = json.loads(self.result.read_text()) if self.result.exists() else {}
        tail = self.output.read_text(errors="replace")[-TAIL_CHARACTERS:]
        self.job = None
        return Ran(exit_code, outcomes, seconds, tail)

    def poll(self, limit_s: float) -> Ran | None:
        """The result if the child has ended or its time is up; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return self.finish(os.waitstatus_to_exitcode(status))
        return None if time.monotonic() - self.started_s < limit_s else self.stop()

    def stop(self) -> Ran:
        """End the child and all of its processes, and take the edit back."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return self.finish(None)


@dataclass
class Recorder:
    """A pytest plugin: the outcome of every test."""

    outcomes: dict[str, str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failed set-up counts as a failure of the test; see pytest."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome


def _run_child(tree: Path, job: Job, result: Path, output: Path) -> None:
    """Run pytest in the copy and end this process; nothing of the parent's cleaning up runs."""
    code = 70
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path != str(tree))]
        for name in [name for name in sys.modules if name.partition(".")[0] in PRODUCT]:
            del sys.modules[name]
        recorder = Recorder()
        words = [
            "-q",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-W",
            ALREADY_IMPORTED,
        ]
        code = int(pytest.main([*words, *job.options, *job.tests], plugins=[recorder]))
        result.write_text(json.dumps(recorder.outcomes))
    except BaseException:
        traceback.print_exc()  # the process ends below, before Python would print it
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def warm_up() -> None:
    """Import what every child needs, on one thread.

    Raises:
        RuntimeError: If the product is loaded already: children would test that one.
    """
    loaded = [name for name in ("nsa_core", "nsa_ops") if name in sys.modules]
    if loaded:
        message = f"{', '.join(loaded)} is imported, so no child could import its own copy"
        raise RuntimeError(message)
    for name in WARM:
        import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # pytest collects garbage as it ends, and would copy every page of the parent


def _copy(root: Path, slots: list[Slot]) -> None:
    """Copies with byte code that is checked by hash: an edit may keep size and time of a file."""
    first = slots[0].tree
    shutil.copytree(root, first, ignore=NOT_COPIED, symlinks=True)
    for package in PRODUCT:
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(first / package, quiet=2, invalidation_mode=mode)
    for slot in slots[1:]:
        shutil.copytree(first, slot.tree, symlinks=True)


def _work(
    slots: list[Slot],
    waiting: list[Job],
    results: dict[str, Ran],
    limit_s: float,
    tell: Callable[[Job, Ran], None],
) -> None:
    while waiting or any(slot.job for slot in slots):
        for slot in slots:
            job = slot.job
            if job is not None and (ran := slot.poll(limit_s)) is not None:
                results[job.name] = ran
                tell(job, ran)
            if slot.job is None and waiting:
                slot.start(waiting.pop())
        time.sleep(0.02)


def run_jobs(
    jobs: Iterable[Job],
    root: Path,
    folder: Path,
    *,
    workers: int,
    limit_s: float,
    tell: Callable[[Job, Ran], None] = lambda _job, _ran: None,
) -> dict[str, Ran]:
    """Run every job in a copy of `root` and return the results by the name of the job.

    KeyboardInterrupt ends the children and returns what there is.

    Args:
        jobs: With names of their own.
        root: Repository; it is read only.
        folder: Empty folder for the copies.
        workers: Children at a time.
        limit_s: Of one job; then its whole process group is killed.
        tell: Gets each result as soon as it is there.
    """
    slots = [Slot(folder / f"copy{number}") for number in range(workers)]
    _copy(root, slots)
    waiting, results = list(jobs)[::-1], dict[str, Ran]()
    try:
        _work(slots, waiting, results, limit_s, tell)
    except KeyboardInterrupt:
        for slot in slots:
            if slot.job is not None:
                slot.stop()
    return results
