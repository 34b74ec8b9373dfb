"""A report of a run whose files hold numbers that no run has: each costs itself, never the page."""

import json
from pathlib import Path
from typing import Any

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_ops.report.record import MAX_CSV_BYTES, read_rows
from nsa_ops.report.write import write_report
from tests.ops.report.builder import RunBuilder

LONG = "9" * 400
CELLS = {
    "largest": "1e308", "smallest": "-1e308", "tiny": "1e-320", "infinite": "inf", "nan": "nan",
    "400-digits": LONG, "minus-400-digits": "-" + LONG, "2^53+1": "9007199254740993",
    "negative": "-1", "quoted-200-KB": '"' + "x" * 200_000 + '"', "200-KB": "x" * 200_000,
    "underscore": "1_0", "other-digits": "\u0661", "nul": "\0", "quote": '"', "empty": "",
}  # fmt: skip
COLUMNS = 11


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    builder = RunBuilder(RunDir(tmp_path / "runs" / "r1"), steps=40).launch()
    builder.train(0, 40).save(40).validate(40).end(0, "all steps done", 40)
    return builder.summarise().run


def report(run: RunDir) -> str:
    out = run.root.parent.parent / "page.html"
    return write_report(run.root, out=out, now_unix_s=1_795_800_000.0).page.read_text()


@pytest.mark.parametrize("cell", CELLS)
def test_a_number_of_a_table_costs_its_row_at_most(run: RunDir, cell: str) -> None:
    for path, columns in ((run.training_csv, COLUMNS), (run.validation_csv, 7)):
        good = path.read_text().splitlines()[-1].split(",")
        lines = [
            ",".join([*good[:at], CELLS[cell], *good[at + 1 :]]) + "\n" for at in range(columns)
        ]
        path.write_text(path.read_text("utf-8") + "".join(lines) + ",".join(good) + "\n", "utf-8")
    rows = read_rows(run.training_csv)
    assert rows is not None
    assert rows.rows[-1].step == 40
    assert "Throughput" in report(run)


def test_a_table_longer_than_any_run_is_one_torn_line(run: RunDir) -> None:
    with run.training_csv.open("r+b") as file:
        file.truncate(MAX_CSV_BYTES + 1)
    rows = read_rows(run.training_csv)
    assert rows is not None
    assert (rows.rows, rows.torn) == ([], 1)


NUMBERS: dict[str, Any] = {
    "largest": 1e308, "smallest": -1e308, "80-bits": 2**80, "minus-80-bits": -(2**80),
    "400-digits": 10**400, "text": "x" * 1000, "list": [1e308, -1e308, 1e308],
}  # fmt: skip


def changed_lines(path: Path, value: Any) -> None:
    """The last line again, once with each of its fields replaced."""
    last = json.loads(path.read_bytes().splitlines()[-1])
    with path.open("a", encoding="utf-8") as file:
        for key in last:
            file.write(json.dumps(last | {key: value}) + "\n")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", ["heartbeat_rank0.jsonl", "events.jsonl"])
def test_a_number_of_a_line_costs_its_line_at_most(run: RunDir, name: str, number: str) -> None:
    changed_lines(run.root / name, NUMBERS[number])
    assert "Throughput" in report(run)


@pytest.mark.parametrize("number", ["largest", "minus-80-bits", "list"])
@pytest.mark.parametrize("name", ["exit.json", "goodput.json", "metrics.json", "manifest.json",
                                  "samples.json", "env.json"])  # fmt: skip
def test_a_number_of_a_document_costs_that_document_at_most(
    run: RunDir, name: str, number: str
) -> None:
    path = run.root / name
    document = json.loads(path.read_bytes())
    keys = document if isinstance(document, dict) else {}
    for key in keys:
        path.write_text(json.dumps(document | {key: NUMBERS[number]}))
        assert "Throughput" in report(run)
    inner = document.get("buckets", {}) if isinstance(document, dict) else {}
    for key in inner:
        changed = document | {"buckets": inner | {key: NUMBERS[number]}}
        path.write_text(json.dumps(changed))
        assert "Throughput" in report(run)


@pytest.mark.parametrize("number", [10**30, 10**4000])
def test_a_manifest_of_more_cards_and_pods_than_there_are_costs_the_manifest(
    run: RunDir, number: int
) -> None:
    document = json.loads(run.manifest.read_bytes())
    document["node"]["rank"] = number
    document["config"]["runtime"]["num_gpus"] = number
    document["config"]["batch"]["accumulation"] = number
    run.manifest.write_text(json.dumps(document))
    assert "Throughput" in report(run)
