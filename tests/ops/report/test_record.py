"""CSV files of a run: joined by attempt, read by header name, torn lines left out."""

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nsa_ops.report.record import LoggedStep, join_attempts, read_rows


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "training.csv") is None


def test_columns_are_found_by_name_and_in_any_order(tmp_path: Path) -> None:
    text = "loss,attempt,new_column,step\n5.5,1,x,0\n5.0,1,7,10\n"
    rows = read_rows(_write(tmp_path / "t.csv", text))
    assert rows is not None
    assert rows.column("loss") == [(0, 5.5), (10, 5.0)]
    assert rows.column("new_column") == [(10, 7.0)]
    assert rows.column("absent") == []


def test_steps_that_were_done_again_count_from_the_last_attempt(tmp_path: Path) -> None:
    text = "step,loss,attempt\n10,5,1\n20,4,1\n30,9,1\n20,4.1,2\n30,3.5,2\n40,3,2\n"
    rows = read_rows(_write(tmp_path / "t.csv", text))
    assert rows is not None
    assert rows.column("loss") == [(10, 5), (20, 4.1), (30, 3.5), (40, 3)]
    assert rows.replaced == 2


def test_an_attempt_that_died_early_takes_the_lost_steps_with_it(tmp_path: Path) -> None:
    text = "step,loss,attempt\n10,5,1\n20,4,1\n30,9,1\n20,4.1,2\n"
    rows = read_rows(_write(tmp_path / "t.csv", text))
    assert rows is not None
    assert rows.column("loss") == [(10, 5), (20, 4.1)]


def test_attempts_are_distinguished_without_an_attempt_column(tmp_path: Path) -> None:
    rows = read_rows(_write(tmp_path / "t.csv", "step,loss\n10,5\n20,4\n10,5\n20,3\n"))
    assert rows is not None
    assert [(row.attempt, row.step) for row in rows.rows] == [(2, 10), (2, 20)]


def test_a_torn_line_is_counted_and_never_read_as_a_smaller_number(tmp_path: Path) -> None:
    text = "step,loss,attempt\n10,5,1\n20,4.1\n30,3.9,1\n40,3.8,1,step,loss\n50,3.71,1"
    rows = read_rows(_write(tmp_path / "t.csv", text))
    assert rows is not None
    assert [row.step for row in rows.rows] == [10, 30]
    assert rows.torn == 3


def test_bytes_that_are_no_text_are_no_error(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"step,loss\n1,2\n\xff\x00\xfe,3\n2,1.5\n")
    rows = read_rows(path)
    assert rows is not None
    assert rows.column("loss") == [(1, 2), (2, 1.5)]


def test_values_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    rows = read_rows(_write(tmp_path / "t.csv", "step,loss\n1,nan\n2,inf\n3,\n"))
    assert rows is not None
    values = [value for _, value in rows.column("loss")]
    assert math.isnan(values[0])
    assert values[1] == math.inf
    assert len(values) == 2


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), max_size=60))
def test_joined_steps_always_increase_and_end_with_the_last_row(
    logged: list[tuple[int, int]],
) -> None:
    joined = join_attempts([LoggedStep(attempt, step) for attempt, step in logged])
    steps = [row.step for row in joined]
    assert steps == sorted(set(steps))
    if logged:
        assert (joined[-1].attempt, joined[-1].step) == logged[-1]
