"""A reader that leaves (`| head -c 5`) ends every command that prints, quietly and with 141."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Never

import pytest

from nsa_core.bench import __main__ as bench
from nsa_core.rundir.manifest import read_manifest
from nsa_core.terminal import READER_GONE, run_to_exit_code
from tests.core.evaluate.run_case import make_run, save

PRINTING = (
    "nsa_core.generate", "nsa_core.evaluate", "nsa_core.data", "nsa_core.checks",
    "nsa_core.checks.machine", "nsa_core.bench",
)  # fmt: skip


def without_reader(words):
    """Exit code and stderr of a module whose stdout nobody reads."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words], stdout=writing, stderr=subprocess.PIPE,
            text=True, env=buffered, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", PRINTING)
def test_every_command_that_prints_ends_quietly_without_a_reader(module: str) -> None:
    assert without_reader([module, "--help"]) == (READER_GONE, "")


@pytest.mark.integration
def test_a_text_ends_when_its_reader_leaves(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    save(run, read_manifest(run).config, 5)
    words = ["--run", str(run.root), "--device", "cpu", "--prompt", "x", "--temperature", "1"]
    code, said = without_reader(["nsa_core.generate", *words])
    assert code == READER_GONE
    assert said.startswith("weights: ")
    assert said.count("\n") == 1


def test_a_bench_whose_reader_left_does_not_blame_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_) -> Never:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(bench, "_run", leave)
    with pytest.raises(BrokenPipeError):
        bench.main(["recall", "--device", "cpu"])


def refuse_flags() -> Never:
    raise SystemExit(2)


@pytest.mark.parametrize(("main", "code"), [(lambda: 9, 9), (refuse_flags, 2)])
def test_the_code_of_a_command_that_is_read_is_its_own(main, code: int) -> None:
    assert run_to_exit_code(main) == code


def test_an_end_with_words_stays_what_it_is() -> None:
    def end() -> Never:
        words = "words"
        raise SystemExit(words)

    with pytest.raises(SystemExit, match="words"):
        run_to_exit_code(end)
