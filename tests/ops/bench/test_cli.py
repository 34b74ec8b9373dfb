"""`nsa-ops bench` on the command line, from files: nothing is measured here."""

import json
from pathlib import Path
from typing import Any

import pytest

from nsa_core.rundir.bench_result import parse_bench_result
from nsa_ops.bench.run import Benched, BenchRequest
from tests.ops.bench.results import LONG_ROW, ROW, document
from tests.ops.cli_case import CommandLine


@pytest.fixture
def result(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.json"
    path.write_text(document([ROW, LONG_ROW]))
    return path


def test_a_file_becomes_a_table_and_a_picture(cli: CommandLine, result: Path) -> None:
    plot = result.with_suffix(".svg")
    outcome = cli("bench", "kernels", "--from", str(result), "--plot", str(plot))
    assert outcome.exit_code == 0
    assert "FWD+BWD MS" in outcome.out
    assert "NVIDIA T1000" in outcome.out
    assert plot.read_text().startswith("<svg")
    assert outcome.err == f"wrote {plot}\n"


def test_a_script_gets_the_rows_and_the_machine(cli: CommandLine, result: Path) -> None:
    document = json.loads(cli("bench", "kernels", "--from", str(result), "--json").out)
    assert (document["schema"], document["ok"]) == ("nsa-ops/bench-kernels/1", True)
    assert document["data"]["result"]["card"] == "NVIDIA T1000"
    assert document["data"]["result"]["rows"][1] == LONG_ROW


def test_a_result_can_be_copied(cli: CommandLine, result: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    assert cli("bench", "kernels", "--from", str(result), "--out", str(copy)).exit_code == 0
    assert json.loads(copy.read_text())["rows"] == [ROW, LONG_ROW]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "is no bench result: card: "),
        ("no JSON", "is no bench result: "),
        ("\udcff\udcfe", "is no bench result: Invalid JSON"),
        ("[]", "is no bench result: Input should be an object"),
        ('{"schema": "nsa-ops/audit/1", "ok": true, "data": null, "errors": []}', "card: "),
        (document([ROW]).replace("{", '{"schema_version": 2, ', 1), "written by a newer version"),
        (document([ROW], bench="decode"), "is a result of `bench decode`"),
    ],
)
def test_a_file_that_is_no_result_of_this_bench_is_usage(
    cli: CommandLine, tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    outcome = cli("bench", "kernels", "--from", str(path))
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert says in outcome.err
    assert "hint: " in outcome.err


FILE_FLAGS = [
    pytest.param(["bench", "kernels", "--from"], id="a result"),
    pytest.param(["bench", "validate", "--from"], id="a matrix"),
    pytest.param(["preflight", "--evidence"], id="evidence"),
    pytest.param(["health", "--log"], id="a log"),
]


@pytest.mark.parametrize("words", FILE_FLAGS)
def test_a_file_that_is_not_there_is_not_found(
    cli: CommandLine, result: Path, words: list[str]
) -> None:
    for path in (result.parent / "no.json", result / "below-a-file.json"):
        outcome = cli(*words, str(path))
        assert (outcome.exit_code, outcome.out) == (6, "")
        assert f"`{path}` does not exist" in outcome.err


@pytest.mark.parametrize("words", FILE_FLAGS)
def test_a_folder_where_a_file_is_needed_is_usage(
    cli: CommandLine, tmp_path: Path, words: list[str]
) -> None:
    outcome = cli(*words, str(tmp_path))
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert f"`{tmp_path}` is a folder, and a file is needed" in outcome.err


@pytest.mark.parametrize("words", FILE_FLAGS)
def test_a_file_that_may_not_be_read_is_a_lack_of_this_machine(
    cli: CommandLine, result: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def refuse(path: Path, _mode: str) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))  # as root, chmod refuses nothing

    monkeypatch.setattr(Path, "open", refuse)
    outcome = cli(*words, str(result))
    assert (outcome.exit_code, outcome.out) == (11, "")
    assert f"`{result}` cannot be read: Permission denied" in outcome.err


@pytest.mark.parametrize("flag", ["--out", "--plot"])
@pytest.mark.parametrize("bench", ["kernels", "validate"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    cli: CommandLine, result: Path, flag: str, bench: str
) -> None:
    folder = cli("bench", bench, flag, str(result.parent))
    assert (folder.exit_code, "is a folder, and a file is needed" in folder.err) == (2, True)
    nowhere = cli("bench", bench, flag, str(result.parent / "no" / "x"))
    assert (nowhere.exit_code, "there is no folder" in nowhere.err) == (6, True)


@pytest.mark.parametrize("bench", ["kernels", "validate"])
def test_one_file_for_the_result_and_its_picture_is_refused(
    cli: CommandLine, result: Path, bench: str
) -> None:
    fresh, content = result.parent / "fresh", result.read_bytes()
    link = result.parent / "link.svg"
    link.symlink_to(result)
    for words in (
        ("--out", str(fresh), "--plot", str(result.parent / "." / "fresh")),
        ("--from", str(result), "--plot", str(link)),
    ):
        outcome = cli("bench", bench, *words)
        assert (outcome.exit_code, outcome.out) == (2, "")
        first, file, _, other = words
        assert f"`{first} {file}` and `--plot {other}` are the same file" in outcome.err
    assert not fresh.exists()
    assert result.read_bytes() == content


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("kernels", "--shape", "A", "--length", "64", "--length", "8"), "`--shape`, `--length`"),
        (("kernels", "laptop", "--tokens", "64"), "`laptop`, `--tokens`"),
        (("model", "--set", "model.dim=32"), "`--set`"),
        (("decode", "--batch", "1", "--dtype", "float16", "--runs", "2"),
         "`--batch`, `--dtype`, `--runs`"),
        (("compare", "--root", "x"), "`--root`"),
        (("scale", "--ranks", "2", "--sharding", "fsdp"), "`--ranks`, `--sharding`"),
        (("validate", "--recipe", "tiny-cpu", "--profile", "cpu", "--steps", "2"),
         "`--recipe`, `--profile`, `--steps`"),
        (("validate", "laptop"), "`laptop`"),
    ],
)  # fmt: skip
def test_flags_that_measure_are_refused_beside_a_result_that_is_only_shown(
    cli: CommandLine, tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    path = tmp_path / "result.json"
    path.write_text(document([ROW], bench=words[0]))
    outcome = cli("bench", *words, "--from", str(path))
    assert (outcome.exit_code, outcome.out) == (2, "")
    error, _, hint = outcome.err.splitlines()
    assert (
        error == f"error: `--from {path}` measures nothing, so {named} cannot be combined with it"
    )
    assert hint.startswith("hint: Leave out `--from`")


@pytest.mark.parametrize(
    ("bench", "row", "why"),
    [
        ("compare", {"attention": "nsa"}, "KeyError: 'loss_curve'"),
        ("kernels", ROW | {"branches_ms": 1.5}, "AttributeError: "),
        ("kernels", ROW | {"branches_ms": {"selected": [1.0]}}, "IndexError: "),
        ("validate", {"path": 1e308, "T": 512, "tokens_per_s": 3e5}, "AttributeError: "),
    ],
)
def test_rows_of_another_kind_are_not_drawn(
    cli: CommandLine, tmp_path: Path, bench: str, row: dict[str, Any], why: str
) -> None:
    path, plot = tmp_path / "result.json", tmp_path / "x.svg"
    path.write_text(document([row], bench=bench))
    outcome = cli("bench", bench, "--from", str(path), "--plot", str(plot))
    assert outcome.exit_code == 2
    assert f"are not those of `bench {bench}`: {why}" in outcome.err
    assert not plot.exists()


def test_a_result_without_rows_is_not_drawn(cli: CommandLine, tmp_path: Path) -> None:
    path, plot = tmp_path / "empty.json", tmp_path / "empty.svg"
    path.write_text(document([]))
    outcome = cli("bench", "kernels", "--from", str(path), "--plot", str(plot))
    assert outcome.exit_code == 2
    assert not plot.exists()


VALIDATION = [
    {
        "path": path, "T": length, "tokens": 65536, "steps": 200, "tokens_per_s": 300000.0 + length,
        "spread": 0.01, "peak_gib": 20.5, "first_loss": 10.97, "final_loss": 7.123456,
        "first_loss_gap": 0.0, "final_loss_gap": 0.0011, "first_loss_limit": 0.005,
        "outcome": "ok", "kernels": {"selected": path},
    }
    for path in ("sdpa-masked", "triton-items")
    for length in (512, 2048)
]  # fmt: skip


def test_the_matrix_is_shown_and_drawn(cli: CommandLine, tmp_path: Path) -> None:
    path, plot = tmp_path / "matrix.json", tmp_path / "matrix.svg"
    path.write_text(document(VALIDATION, bench="validate"))
    outcome = cli("bench", "validate", "--from", str(path), "--plot", str(plot))
    assert outcome.exit_code == 0
    assert "triton-items" in outcome.out
    assert "7.1235" in outcome.out
    assert "triton-items" in plot.read_text()


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (
            ["kernels", "--shape", "A", "--length", "64", "--length", "128", "--tokens", "128"],
            "bench kernels|--shape A --length 64 --length 128 --tokens 128",
        ),
        (
            ["model", "--attention", "nsa", "--steps", "2", "--set", "model.dim=32"],
            "bench model|--attention nsa --steps 2 --set model.dim=32",
        ),
        (
            ["decode", "--batch", "1", "--batch", "16", "--dtype", "float16", "--runs", "2"],
            "bench decode|--batch 1 --batch 16 --dtype float16 --runs 2",
        ),
        (
            [
                "scale",
                "--recipe",
                "m7c-1b",
                "--ranks",
                "2",
                "--sharding",
                "ddp",
                "--sharding",
                "fsdp",
                "--accumulation",
                "4",
            ],
            "bench scale|--recipe m7c-1b --ranks 2 --sharding ddp --sharding fsdp --accumulation 4",
        ),
    ],
)
def test_flags_reach_the_pod_as_they_are(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, words: list[str], passed: str
) -> None:
    asked: list[str] = []

    def remember(_operator: object, _pod: object, request: BenchRequest) -> Benched:
        asked.append(f"bench {request.bench}|{' '.join(request.words)}")
        return Benched("pod x", parse_bench_result(document([], bench=request.bench), "test"))

    monkeypatch.setattr("nsa_ops.bench.run.run_bench", remember)
    assert cli("bench", *words).exit_code == 0
    assert asked == [passed]
