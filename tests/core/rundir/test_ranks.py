"""The records that the ranks of one run leave."""

import json
from pathlib import Path

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import ProcessIdentity
from nsa_core.rundir.ranks import (
    RankEnd,
    RankProcess,
    read_rank_end,
    read_rank_process,
    write_rank_end,
    write_rank_process,
)

IDENTITY = ProcessIdentity(pid=7, start_ticks=8, boot_id="boot")


def test_a_record_of_another_attempt_or_rank_is_no_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    process = RankProcess(
        run_id="r", attempt=2, rank=1, local_rank=1, num_ranks=2, process=IDENTITY,
        started_unix_s=1.0,
    )  # fmt: skip
    end = RankEnd(run_id="r", attempt=2, rank=1, code=14, reason="no data", step=3, at=2.0)
    write_rank_process(run, process)
    write_rank_end(run, end)
    assert read_rank_process(run, 1, attempt=2) == process
    assert read_rank_end(run, 1, attempt=2) == end
    assert (read_rank_process(run, 1, attempt=3), read_rank_end(run, 1, attempt=3)) == (None, None)
    run.rank_exit(1).rename(run.rank_exit(0))
    assert read_rank_end(run, 0, attempt=2) is None


def test_a_record_that_cannot_be_read_is_no_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.rank_exit(0).write_text("{", encoding="utf-8")
    run.rank_process(0).mkdir()
    assert (read_rank_process(run, 0, attempt=1), read_rank_end(run, 0, attempt=1)) == (None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [("code", "1" + "0" * 30), ("code", "-9"), ("step", "-1"), ("step", "1" + "0" * 30),
     ("at", "1e999"), ("at", "NaN")],
)  # fmt: skip
def test_an_end_with_a_number_that_cannot_be_is_no_record(
    tmp_path: Path, key: str, value: str
) -> None:
    run = RunDir(tmp_path)
    end = RankEnd(run_id="r", attempt=2, rank=1, code=14, reason="no data", step=3, at=2.0)
    write_rank_end(run, end)
    content = run.rank_exit(1).read_text(encoding="utf-8")
    was = f'"{key}": {json.dumps(getattr(end, key))}'
    assert was in content
    run.rank_exit(1).write_text(content.replace(was, f'"{key}": {value}'), encoding="utf-8")
    assert read_rank_end(run, 1, attempt=2) is None
