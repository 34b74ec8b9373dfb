"""The history of all ranks in a report: bounded, summed up, absent for a run with one rank."""

import json
import os
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest, write_manifest
from nsa_ops.cli.console import envelope
from nsa_ops.report import rank_history
from nsa_ops.report.rank_history import describe_spread, rank_cells
from nsa_ops.report.record import read_record
from nsa_ops.report.write import write_report
from tests.ops.report.builder import RunBuilder

STEPS = 40
HUGE_STEP = f'"step": {10**30},'


def begin(folder: Path, num_ranks: int) -> RunBuilder:
    """A run of some ranks that has trained; only rank 0 has written heartbeats."""
    builder = RunBuilder(RunDir(folder / "runs" / "r1"), steps=STEPS).launch()
    manifest = read_manifest(builder.run)
    values = manifest.config.model_dump()
    values["batch"]["accumulation"] = num_ranks
    values["runtime"] |= {"device": "cpu", "cpu_ranks": num_ranks}
    config = RunConfig.model_validate(values)
    write_manifest(builder.run, manifest.model_copy(update={"config": config}))
    for step in range(2, STEPS + 1, 2):
        builder.row(step)
        builder.beat(step, work_s=0.8, sync_s=0.4, data_s=0.0, gpu_mem_peak=30_000, temp_c=60.0)
    return builder.save(STEPS).validate(STEPS).end(0, "all steps done", STEPS).summarise()


def follow(run: RunDir, rank: int, **fields) -> None:
    """Heartbeats of another rank beside those of rank 0."""
    lines = []
    for text in run.heartbeat().read_text().splitlines():
        line = json.loads(text) | {"rank": rank, "loss": None, "tokens_per_s": None} | fields
        lines.append(json.dumps(line) + "\n")
    run.heartbeat(rank).write_text("".join(lines))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = begin(tmp_path, 4).run
    follow(run, 1)
    follow(run, 2, work_s=1.2, sync_s=0.0, gpu_mem_peak=30_500, temp_c=91.0, throttle="sw_thermal")
    follow(run, 3, work_s=0.81)
    return run


def pages(run: RunDir) -> tuple[str, str, str]:
    written = write_report(run.root, out=run.root.parent.parent / "p.html", now_unix_s=1e9)
    page, twin = written.page.read_text(), written.markdown.read_text()
    return page, twin, envelope("report", written)


def test_page_markdown_and_json_show_the_slowest_rank_the_spread_and_memory(run: RunDir) -> None:
    page, twin, result = pages(run)
    spread = (
        "Rank 2 is the slowest: 1.2 s own time a step, 1.50 times the others. Of all ranks the "
        "fastest takes 800 ms, the median 805 ms."
    )
    assert spread in page
    assert spread in twin
    assert "<h3>Own time of ranks</h3>" in page
    row = "2 | 20 | 1.2 s (1.2 s to 1.2 s) | 0 ms | 0 ms | 30,500 MiB | "
    assert row in twin
    assert "91 degrees C | 100 % of the records |" in twin
    assert "<td>30,500 MiB</td>" in page
    ranks = json.loads(result)["data"]["ranks"]
    assert [(one["rank"], one["own_s"], one["gpu_mem_peak"]) for one in ranks] == [
        (0, 0.8, 30_000), (1, 0.8, 30_000), (2, 1.2, 30_500), (3, 0.81, 30_000),
    ]  # fmt: skip
    assert read_record(run).missing == []


def test_a_run_with_one_rank_has_no_ranks_and_reads_no_other_file(tmp_path: Path) -> None:
    run = begin(tmp_path, 1).run
    os.mkfifo(run.heartbeat(1))
    page, twin, result = pages(run)
    assert "Ranks" not in page
    assert "of ranks" not in page
    assert "## Ranks" not in twin
    assert json.loads(result)["data"]["ranks"] == []


def test_ranks_without_figures_are_named_without_a_spread(tmp_path: Path) -> None:
    run = begin(tmp_path, 2).run
    follow(run, 0, work_s=None)
    follow(run, 1, work_s=None, sync_s=None, gpu_mem_peak=None)
    history = read_record(run).ranks
    assert describe_spread(history) == ""
    assert rank_cells(history)[1][2:6] == ("unknown", "0 ms", "unknown", "unknown")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.unlink(), "heartbeat_rank1.jsonl is missing"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "heartbeat_rank1.jsonl cannot be read"),
        (lambda path: path.write_bytes(b"\xff\x00" * 500 + b"\n"), "1 line cannot be used"),
        (lambda path: path.write_text(path.read_text().replace('"rank": 1', '"rank": 9')),
         "20 lines cannot be used as heartbeats of rank 1"),
        (lambda path: path.write_text(path.read_text().replace('"step": 2,', HUGE_STEP)),
         "1 line cannot be used"),
        (lambda path: path.write_text(""), "has no record of a step"),
    ],
)  # fmt: skip
def test_a_hostile_file_of_a_rank_costs_itself_and_is_named(run: RunDir, make, said: str) -> None:
    make(run.heartbeat(1))
    record = read_record(run)
    assert [line for line in record.missing if said in line]
    assert [rank.num_records for rank in record.ranks.ranks][2:] == [20, 20]
    assert record.ranks.slowest.rank == 2
    assert "Own time of ranks" in pages(run)[0]


def test_memory_that_no_machine_has_is_unknown(run: RunDir) -> None:
    follow(run, 1, gpu_mem_peak=10**99, host_rss_mib=-1)
    one = read_record(run).ranks.ranks[1]
    assert (one.num_records, one.gpu_mem_peak, one.host_rss_mib) == (20, None, None)


def test_only_the_end_of_a_long_file_is_read_and_that_is_said(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_history, "_BYTES_OF_EACH", 4096)
    record = read_record(run)
    assert 0 < record.ranks.ranks[1].num_records < 20
    assert "heartbeat_rank1.jsonl is longer than 4 KiB: only its end was read" in record.missing
