"""The list of faults is well formed, the harness tells a green one, and a part of it is planted."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.faults import Fault, FaultListError, read_faults
from tests.faults.harness import Ran
from tests.faults.judge import Verdict, baseline_jobs, fault_jobs, judge, table
from tests.faults.record import Seen, is_noticed, page_rows, read_record, write_record

FAULTS = read_faults()
KINDS = {
    "checkpoint", "checks", "choice", "control", "data", "decode", "evaluate", "kernels", "loop",
    "loss", "model", "optimizer", "packing", "precision", "schedule", "settings", "telemetry",
    "triton",
}  # fmt: skip


def test_there_are_at_least_150_faults_over_every_kind() -> None:
    assert len([fault for fault in FAULTS if not fault.equivalent]) >= 150
    assert {fault.kind for fault in FAULTS} >= KINDS


def test_every_fault_of_the_list_was_planted_and_noticed() -> None:
    record = read_record()
    real = [fault for fault in FAULTS if not fault.gpu and not fault.equivalent]
    never = [fault.id for fault in real if not is_noticed(fault, record)]
    assert never == [], "plant them by python -m tests.faults --record"


def test_faults_of_every_kind_are_planted_in_every_run() -> None:
    assert {fault.kind for fault in FAULTS if fault.ci} >= KINDS


def test_every_edit_applies_to_the_checkout(repository: Path) -> None:
    _, errors = fault_jobs([replace(fault, equivalent="") for fault in FAULTS], repository)
    assert [verdict.reason for verdict in errors] == []


def test_every_edit_is_one_of_the_product_and_is_python(repository: Path) -> None:
    for fault in FAULTS:
        assert fault.file.startswith("nsa_core/"), fault.id
        compile(fault.apply((repository / fault.file).read_text()), fault.file, "exec")


def test_every_named_test_exists(repository: Path) -> None:
    for test in {test for fault in FAULTS for test in fault.tests}:
        file, _, name = test.partition("::")
        text = (repository / file).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text, test


def test_only_faults_for_a_card_name_tests_for_a_card() -> None:
    for fault in FAULTS:
        assert {test.startswith("tests/gpu/") for test in fault.tests} <= {fault.gpu}, fault.id


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not a fault"),
        ('{"id": "a", "file": "f", "old": "x", "new": "y"}', "needs either tests or the reason"),
        (
            '{"id": "a", "file": "f", "old": "x", "new": "y", "tests": ["t"], "equivalent": "e"}',
            "needs either tests or the reason",
        ),
        ('{"id": "a", "file": "f", "old": "x", "new": "y", "test": ["t"]}', "not a fault"),
    ],
)
def test_a_line_that_is_no_fault_is_refused_with_its_place(
    tmp_path: Path, line: str, words: str
) -> None:
    (tmp_path / "kind.jsonl").write_text(f"{line}\n")
    with pytest.raises(FaultListError, match=f"kind.jsonl:1: .*{words}"):
        read_faults(tmp_path)


def test_an_id_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    line = '{"id": "a", "file": "f", "old": "x", "new": "y", "tests": ["t"]}\n'
    (tmp_path / "kind.jsonl").write_text(line * 2)
    with pytest.raises(FaultListError, match="twice: a"):
        read_faults(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("x", "y", "2 times"), ("z", "y", "0 times"), ("a = x", "a = x", "changes nothing")],
)
def test_an_edit_that_does_not_apply_once_is_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(FaultListError, match=words):
        Fault("a", "kind", "f", old, new, ("t",)).apply("a = x + x")


def ran(exit_code: int | None, **outcomes) -> Ran:
    return Ran(exit_code, {f"t.py::{name}": found for name, found in outcomes.items()}, 1.0, "end")


ONE = Fault("a", "kind", "f", "x", "y", ("t.py::test_a",))
WITHOUT = {"baseline t.py": ran(0, test_a="passed")}


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (ran(0, test_a="passed"), "green"),
        (ran(0, test_a="skipped"), "green"),
        (ran(1, test_a="failed"), "noticed"),
        (ran(2), "error"),
        (ran(4), "error"),
        (ran(None), "error"),
    ],
    ids=str,
)
def test_a_fault_is_noticed_by_a_failed_test_and_by_nothing_else(found, status: str) -> None:
    assert judge(ONE, WITHOUT | {"a": found}).status == status


@pytest.mark.parametrize(
    "without", [ran(1, test_a="failed"), ran(0, test_a="skipped"), ran(0, test_b="passed")]
)
def test_a_test_that_does_not_pass_without_the_fault_proves_nothing(without) -> None:
    verdict = judge(ONE, {"a": ran(1, test_a="failed"), "baseline t.py": without})
    assert verdict.status == "error"
    assert "without the fault" in verdict.reason


def test_a_fault_that_was_not_reached_is_not_judged() -> None:
    assert judge(ONE, WITHOUT).status == "error"
    assert judge(ONE, {"a": ran(1, test_a="failed")}).status == "error"


def test_the_table_counts_by_kind_and_names_what_is_not_noticed() -> None:
    equivalent = replace(ONE, id="b", tests=(), equivalent="no difference")
    verdicts = [
        Verdict(ONE, "green", "t.py::test_a passed"),
        Verdict(equivalent, "equivalent", "no difference"),
        Verdict(replace(ONE, id="c", kind="other"), "noticed", "t.py::test_a"),
    ]
    lines = table(verdicts).splitlines()
    assert lines[1].split() == ["kind", "1", "0", "1", "1", "0"]
    assert lines[3].split() == ["all", "2", "1", "1", "1", "0"]
    assert lines[4] == "green: a (f): t.py::test_a passed"


def test_every_named_test_is_run_once_without_a_fault() -> None:
    twice = [ONE, replace(ONE, id="b", tests=("t.py::test_a", "u.py"))]
    assert [(job.name, job.tests) for job in baseline_jobs(twice)] == [
        ("baseline t.py", ("t.py::test_a",)),
        ("baseline u.py", ("u.py",)),
    ]


def test_a_record_holds_for_the_edit_and_the_tests_that_the_list_has_now(tmp_path: Path) -> None:
    path = tmp_path / "noticed.jsonl"
    verdicts = [
        Verdict(ONE, "noticed", "t.py::test_a[1]", 1.26),
        Verdict(replace(ONE, id="b"), "green", "t.py::test_a passed"),
        Verdict(replace(ONE, id="gone"), "noticed", "t.py::test_a", 1.0),
    ]
    write_record([ONE, replace(ONE, id="b")], verdicts, path)
    record = read_record(path)
    assert record == {"a": Seen("a", record["a"].edit, "t.py::test_a[1]", 1.3)}
    assert is_noticed(ONE, record)
    assert not is_noticed(replace(ONE, new="z"), record)
    assert not is_noticed(replace(ONE, tests=("t.py::test_ab",)), record)


def test_a_fault_that_is_no_longer_noticed_leaves_the_record(tmp_path: Path) -> None:
    path = tmp_path / "noticed.jsonl"
    write_record([ONE], [Verdict(ONE, "noticed", "t.py::test_a")], path)
    write_record([ONE], [], path)
    assert list(read_record(path)) == ["a"]
    write_record([ONE], [Verdict(ONE, "green", "t.py::test_a passed")], path)
    assert read_record(path) == {}


def test_the_rows_of_the_page_count_what_was_noticed_here_and_on_a_card(tmp_path: Path) -> None:
    on_a_card = replace(ONE, id="c", gpu=True)
    equivalent = replace(ONE, id="e", kind="other", tests=(), equivalent="no difference")
    faults = [ONE, on_a_card, equivalent]
    path = tmp_path / "noticed.jsonl"
    write_record(faults, [Verdict(ONE, "noticed", "t.py::test_a")], path)
    assert page_rows(faults, read_record(path)).splitlines() == [
        "| kind | 1 | 1 | 1 | 0 | 0 |",
        "| other | 0 | 0 | 0 | 0 | 1 |",
        "| all | 1 | 1 | 1 | 0 | 1 |",
    ]


def small_repository(folder: Path) -> Path:
    """A product of one line with two tests, one of which sees nothing."""
    (folder / "nsa_core").mkdir()
    (folder / "tests").mkdir()
    (folder / "nsa_core" / "__init__.py").write_text("def double(x):\n    return 2 * x\n")
    (folder / "tests" / "__init__.py").write_text("")
    (folder / "tests" / "test_double.py").write_text(
        "from nsa_core import double\n\n\n"
        "def test_of_three():\n    assert double(3) == 6\n\n\n"
        "def test_of_two():\n    assert double(2) == 4\n"
    )
    (folder / "pyproject.toml").write_text("[tool.pytest]\nmarkers = ['gpu: needs a card']\n")
    return folder


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.faults", *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.integration
def test_a_fault_that_nothing_notices_ends_the_command_with_1(tmp_path: Path) -> None:
    root = small_repository(tmp_path)
    lists = tmp_path / "lists"
    lists.mkdir()
    edit = {"file": "nsa_core/__init__.py", "old": "2 * x", "new": "x * x"}
    faults = [
        edit | {"id": "seen", "tests": ["tests/test_double.py::test_of_three"]},
        edit | {"id": "unseen", "tests": ["tests/test_double.py::test_of_two"]},
        edit | {"id": "gone", "old": "3 * x", "tests": ["tests/test_double.py::test_of_two"]},
    ]
    (lists / "kind.jsonl").write_text("".join(json.dumps(fault) + "\n" for fault in faults))
    done = command("--root", str(root), "--lists", str(lists), "--json")
    found = {one["fault"]["id"]: one["status"] for one in json.loads(done.stdout)["faults"]}
    assert found == {"seen": "noticed", "unseen": "green", "gone": "error"}
    assert done.returncode == 1
    assert (root / "nsa_core" / "__init__.py").read_text() == "def double(x):\n    return 2 * x\n"
    assert command("--root", str(root), "--lists", str(lists), "seen").returncode == 0


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(1200)
def test_every_fault_that_is_marked_for_every_run_is_noticed() -> None:
    done = command("--ci")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
