"""`python -m nsa_core.bench`: a table, a file, an exit code, on a machine without a card."""

import argparse
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from nsa_core.bench import __main__ as entry
from nsa_core.bench.command import Bench
from nsa_core.config.training import BatchConfig
from nsa_core.rundir.bench_result import parse_bench_result
from nsa_core.train.failure import TrainerConfigurationError


@dataclass(frozen=True)
class Row:
    T: int
    fwd_ms: float


def measure(options: argparse.Namespace, machine: object) -> Iterator[Row]:
    del machine
    if options.length < 1:
        message = f"--length must be at least 1, got {options.length}"
        raise ValueError(message)
    yield Row(options.length, 0.5)
    if options.crash:
        message = "the second row crashed"
        raise RuntimeError(message)
    yield Row(2 * options.length, 1.0)


def add_flags(parser) -> None:
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--crash", action="store_true")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    """A bench that measures nothing, under the word `fake`; returns what makes its verdict."""
    verdict: dict[str, str | None] = {"failure": None}
    made = Bench(
        summary="Pretend.", needs_card=False, add_flags=add_flags, measure=measure,
        header="T ms", format_row=lambda row: f"{row.T} {row.fwd_ms}",
        failure=lambda rows: verdict["failure"],
    )  # fmt: skip
    monkeypatch.setattr(entry, "BENCHES", {"fake": "a.module"})
    monkeypatch.setattr(
        entry.importlib, "import_module", lambda name: types.SimpleNamespace(BENCH=made)
    )
    return verdict


@pytest.mark.usefixtures("bench")
def test_the_table_is_the_result_and_the_file_holds_machine_command_and_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "result.json"
    assert entry.main(["fake", "--length", "8", "--commit", "abc", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("card ")
    assert lines[1:] == ["T ms", "8 0.5", "16 1.0"]
    result = parse_bench_result(path.read_bytes(), "it")
    assert (result.bench, result.commit, result.torch) == ("fake", "abc", torch.__version__)
    assert result.rows == [{"T": 8, "fwd_ms": 0.5}, {"T": 16, "fwd_ms": 1.0}]


@pytest.mark.usefixtures("bench")
def test_the_recorded_command_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    entry.main(["fake", "--json", str(path), "--commit", "abc"])
    assert parse_bench_result(path.read_bytes(), "it").command == (
        "python -m nsa_core.bench fake --json result.json --commit abc"
    )


@pytest.mark.usefixtures("bench")
def test_json_on_stdout_leaves_the_story_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["fake", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert len(parse_bench_result(out, "stdout").rows) == 2
    assert "64 0.5" in err


@pytest.mark.usefixtures("bench")
def test_rows_before_a_crash_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with pytest.raises(RuntimeError):
        entry.main(["fake", "--crash", "--json", str(path)])
    assert json.loads(path.read_text())["rows"] == [{"T": 64, "fwd_ms": 0.5}]


@pytest.mark.usefixtures("bench")
def test_flags_that_cannot_be_used_end_with_code_2_and_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert entry.main(["fake", "--length", "0"]) == 2
    assert capsys.readouterr().err == "error: --length must be at least 1, got 0\n"


@pytest.mark.usefixtures("bench")
def test_a_record_that_does_not_hold_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_options, _machine) -> None:
        BatchConfig(seq_len=0, micro_batch=0)

    bench = entry.load_bench("fake")
    monkeypatch.setattr(entry, "load_bench", lambda _: replace(bench, measure=refuse))
    assert entry.main(["fake"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: seq_len: Input should be greater than or equal to")


def test_rows_that_prove_something_wrong_end_with_code_9_after_the_result(
    bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench["failure"] = "path b differs"
    assert entry.main(["fake", "--json", "-"]) == 9
    out, err = capsys.readouterr()
    assert len(json.loads(out)["rows"]) == 2
    assert err.endswith("error: path b differs\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a card")
def test_the_kernel_bench_without_a_card_is_one_line_and_code_11(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert entry.main(["kernels"]) == 11
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: `bench kernels` needs a CUDA card, and torch sees none here\n"


@pytest.mark.parametrize("name", entry.BENCHES)
def test_every_bench_can_be_loaded_and_explains_its_flags(
    name, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main([name, "--help"])
    assert ended.value.code == 0
    assert "--json FILE" in capsys.readouterr().out


def test_a_refusal_of_the_trainer_without_a_hint_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        message = "this machine has no card"
        raise TrainerConfigurationError(message)

    monkeypatch.setattr(entry, "_run", refuse)
    assert entry.main(["compare"]) == 2
    assert capsys.readouterr().err == "error: this machine has no card\n"
