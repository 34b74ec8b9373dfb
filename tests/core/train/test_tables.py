import pytest

from nsa_core.train.tables import CsvLog


@pytest.fixture
def table(tmp_path):
    return CsvLog(tmp_path / "t.csv", ["step", "loss"])


def test_the_header_is_written_once(table, tmp_path):
    table.append({"step": 1, "loss": 2.5})
    table.append({"step": 2, "loss": None})
    assert (tmp_path / "t.csv").read_text() == "step,loss\n1,2.5\n2,\n"


def test_a_torn_last_row_is_taken_out_and_reported(table, tmp_path):
    (tmp_path / "t.csv").write_text("step,loss\n1,2.5\n2,2.")
    found = table.repair(5, tmp_path / "kept.csv")
    assert found.torn == ["2,2."]
    assert (tmp_path / "t.csv").read_text() == "step,loss\n1,2.5\n"


def test_rows_that_will_be_done_again_move_to_another_file(table, tmp_path):
    (tmp_path / "t.csv").write_text("step,loss\n1,2.5\n2,2.4\n3,2.3\n")
    kept = tmp_path / "attempts" / "1" / "kept.csv"
    found = table.repair(1, kept)
    assert found.steps == [1]
    assert (tmp_path / "t.csv").read_text() == "step,loss\n1,2.5\n"
    assert kept.read_text() == "step,loss\n2,2.4\n3,2.3\n"


def test_a_whole_table_is_left_alone(table, tmp_path):
    (tmp_path / "t.csv").write_text("step,loss\n1,2.5\n")
    before = (tmp_path / "t.csv").stat().st_mtime_ns
    table.repair(1, tmp_path / "kept.csv")
    assert (tmp_path / "t.csv").stat().st_mtime_ns == before
    assert not (tmp_path / "kept.csv").exists()


def test_a_table_without_its_header_gets_one(table, tmp_path):
    (tmp_path / "t.csv").write_text("ste")
    table.repair(1, tmp_path / "kept.csv")
    assert (tmp_path / "t.csv").read_text() == "step,loss\n"
