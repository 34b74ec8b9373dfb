import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_core.rundir.report import CheckResult, Report
from nsa_ops.errors import DeadlineError, LocalResourceError, PodUnreachableError
from nsa_ops.remote.audit import Head
from nsa_ops.store import MemberPod, Receipt, RunRecord, Store
from nsa_ops.store.audit_head import AuditHead
from nsa_ops.store.registry import registry_advice
from tests.ops.operators import POD


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "registry.sqlite")


def _run(run_id: str, launched_unix_s: float) -> RunRecord:
    return RunRecord(run_id, POD.name, "tiny-cpu", "cpu", "code", "config", launched_unix_s)


def test_what_is_written_is_read_by_another_process(store: Store) -> None:
    store.add_pod(POD)
    store.save_run(_run("r1", 1.0))
    other = Store(store.path)
    assert other.pods() == [POD]
    assert other.find_run("r1") == _run("r1", 1.0)


def test_a_pod_name_is_taken_once(store: Store) -> None:
    store.add_pod(POD)
    with pytest.raises(sqlite3.IntegrityError):
        store.add_pod(POD)


def test_runs_come_newest_first(store: Store) -> None:
    store.save_run(_run("old", 1.0))
    store.save_run(_run("new", 2.0))
    assert [run.run_id for run in store.runs()] == ["new", "old"]
    assert store.runs("another-pod") == []


def test_the_newest_report_for_this_pod_code_and_profile_counts(store: Store) -> None:
    for at, status in ((1.0, "fail"), (2.0, "pass")):
        check = CheckResult(name="a", status=status, message="")  # type: ignore[arg-type]
        report = Report(at=at, pod_id="p", code_id="c", profile="cpu", checks=[check])
        store.save_report(f"sha-{at}", report)
    found = store.newest_report("p", "c", "cpu")
    assert found is not None
    assert (found[0], found[1].verdict) == ("sha-2.0", "pass")
    assert store.newest_report("p", "other code", "cpu") is None


def test_receipts_are_kept_by_step(store: Store) -> None:
    for step in (10, 20):
        store.save_receipt(Receipt("r", step, f"/b/{step}", 5, "sha", 1.0, 2.0))
    assert [receipt.step for receipt in store.receipts("r")] == [20, 10]


def test_an_intent_that_ends_is_closed_also_when_it_fails(store: Store) -> None:
    with store.intent("launch", "r1"):
        assert [intent.act for intent in store.open_intents()] == ["launch"]
    with pytest.raises(ValueError, match="boom"), store.intent("halt", "r1"):
        message = "boom"
        raise ValueError(message)
    assert store.open_intents() == []


def test_a_process_killed_in_an_act_leaves_its_intent_open(store: Store) -> None:
    code = (
        "import os, sys; from pathlib import Path; from nsa_ops.store import Store\n"
        "with Store(Path(sys.argv[1])).intent('launch', 'r1'): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(store.path)], check=False, timeout=60)
    (intent,) = store.open_intents()
    assert (intent.act, intent.subject, intent.outcome) == ("launch", "r1", None)


def test_an_act_whose_answer_was_lost_stays_open_until_it_is_done(store: Store) -> None:
    for error in (PodUnreachableError("no answer"), DeadlineError("late"), KeyboardInterrupt()):
        with pytest.raises(type(error)), store.intent("resume", "r1"):
            raise error
    assert [store.is_held(intent) for intent in store.open_intents()] == [False] * 3
    with store.intent("halt", "r1"), store.intent("resume", "r2"):
        pass
    assert len(store.open_intents()) == 3
    with store.intent("resume", "r1"):
        pass
    assert store.open_intents() == []


def test_an_act_of_a_living_process_is_held_and_that_of_a_killed_one_is_not(store: Store) -> None:
    code = (
        "import os, sys; from pathlib import Path; from nsa_ops.store import Store\n"
        "with Store(Path(sys.argv[1])).intent('launch', 'r1'):\n"
        "    print('in', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(store.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as busy:  # fmt: skip
        assert busy.stdout is not None
        assert busy.stdout.readline() == b"in\n"
        (intent,) = store.open_intents()
        assert store.is_held(intent)
        with store.intent("launch", "r1"):
            pass
        assert store.open_intents() == [intent]
        busy.kill()
    assert not store.is_held(intent)
    assert list((store.path.parent / "intents").iterdir()) == []


def test_a_registry_of_a_newer_version_is_refused(store: Store) -> None:
    sqlite3.connect(store.path).execute("PRAGMA user_version=99")
    with pytest.raises(LocalResourceError, match="newer nsa-ops"):
        Store(store.path)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalResourceError, match="cannot be opened"):
        Store(tmp_path / "file" / "registry.sqlite")


def damage(path: Path, first: int, last: int) -> None:
    """Overwrite these pages of the file, the first being 0."""
    page = 4096
    with path.open("r+b") as file:
        file.seek(first * page)
        file.write(b"\xa5" * page * (last - first + 1))


def test_a_damaged_page_is_one_line_with_the_way_out(store: Store) -> None:
    store.add_pod(POD)
    store.save_run(_run("r1", 1.0))
    check = CheckResult(name="a", status="pass", message="")
    store.save_report("sha", Report(at=1.0, pod_id="p", code_id="c", profile="cpu", checks=[check]))
    store.save_receipt(Receipt("r", 1, "/b", 5, "sha", 1.0, 2.0))
    store.close()
    damage(store.path, 1, store.path.stat().st_size // 4096 - 1)
    reads: list[Callable[[Store], object]] = [
        Store.pods, Store.runs, Store.receipts, Store.open_intents,
        lambda damaged: damaged.newest_report("p", "c", "cpu"),
        lambda damaged: damaged.find_pod(POD.name),
        lambda damaged: damaged.save_run(_run("r2", 2.0)),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(LocalResourceError, match="is damaged") as told:
            read(Store(store.path))
        assert "move it away and add the pods again" in told.value.hint


def test_a_file_that_is_no_registry_is_one_line_with_the_way_out(store: Store) -> None:
    store.add_pod(POD)
    store.close()
    damage(store.path, 0, 0)
    with pytest.raises(LocalResourceError, match="is damaged") as told:
        Store(store.path)
    assert "move it away" in told.value.hint


def test_a_report_that_is_no_report_any_more_is_damage(store: Store) -> None:
    check = CheckResult(name="a", status="pass", message="")
    store.save_report("sha", Report(at=1.0, pod_id="p", code_id="c", profile="cpu", checks=[check]))
    with sqlite3.connect(store.path) as file:
        file.execute("UPDATE reports SET content = '{'")
    with pytest.raises(LocalResourceError, match="is damaged"):
        store.newest_report("p", "c", "cpu")


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("UPDATE pods SET added_unix_s = 'x'", Store.pods),
        ("UPDATE pods SET root = x'ff00'", Store.pods),
        ("UPDATE runs SET other_pods = '['", Store.runs),
        ("UPDATE runs SET other_pods = '[1]'", Store.runs),
        ("UPDATE intents SET detail = '[1]'", Store.open_intents),
        ("UPDATE receipts SET verified_unix_s = 'x'", Store.receipts),
    ],
)
def test_a_cell_that_holds_what_no_version_writes_is_damage(
    store: Store, change: str, read: Callable[[Store], object]
) -> None:
    store.add_pod(POD)
    store.save_run(_run("r1", 1.0))
    store.save_receipt(Receipt("r", 1, "/b", 5, "sha", 1.0, 2.0))
    with sqlite3.connect(store.path) as file:
        file.execute("INSERT INTO intents VALUES (1, 1.0, 'a', 's', '{}', NULL, NULL)")
        file.execute(change)
    with pytest.raises(LocalResourceError, match="is damaged"):
        read(store)


@pytest.mark.parametrize("column", ["lines", "bytes", "sha256"])
def test_a_head_of_the_audit_log_that_is_none_is_refused(store: Store, column: str) -> None:
    head = AuditHead(store.path)
    head.write(Head(1, 2, "sha"))
    with sqlite3.connect(store.path) as file:
        file.execute(f"UPDATE audit_head SET {column} = x'ff00'")
    with pytest.raises(LocalResourceError, match="cannot read the audit log's head"):
        head.read()


def test_two_commands_at_once_lose_nothing(store: Store) -> None:
    code = (
        "import sys; from pathlib import Path; from nsa_ops.store import RunRecord, Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "for number in range(40):\n"
        "    name = f'{sys.argv[2]}-{number}'\n"
        "    with store.intent('launch', name):\n"
        "        store.save_run(RunRecord(name, 'p', 'r', 'c', 'x', 'y', 1.0))\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(store.path), name]) for name in "abc"
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    assert len(store.runs()) == 120
    assert store.open_intents() == []


def test_a_registry_of_schema_1_gets_addresses_and_keeps_its_pods(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    with sqlite3.connect(path) as old:
        old.execute(
            "CREATE TABLE pods (name TEXT PRIMARY KEY, pod_id TEXT NOT NULL, kind TEXT NOT NULL, "
            "root TEXT NOT NULL, python TEXT NOT NULL, profile TEXT NOT NULL, "
            "added_unix_s REAL NOT NULL)"
        )
        old.execute("INSERT INTO pods VALUES ('here', 'pod-1', 'local', '/p', '/py', 'cpu', 1.0)")
        old.execute("PRAGMA user_version=1")
    old.close()
    store = Store(path)
    (pod,) = store.pods()
    assert (pod.name, pod.address) == ("here", "")
    store.replace_pod(replace(pod, address="u@h:22"))
    assert Store(path).pods()[0].address == "u@h:22"


def test_a_registry_of_schema_2_keeps_its_runs_and_takes_those_of_several_pods(
    tmp_path: Path,
) -> None:
    path = tmp_path / "registry.sqlite"
    with sqlite3.connect(path) as old:
        old.execute(
            "CREATE TABLE runs (run_id TEXT PRIMARY KEY, pod TEXT NOT NULL, recipe TEXT NOT NULL, "
            "profile TEXT NOT NULL, code_id TEXT NOT NULL, config_sha256 TEXT NOT NULL, "
            "launched_unix_s REAL NOT NULL, pod_id TEXT NOT NULL DEFAULT '', "
            "attempt INTEGER NOT NULL DEFAULT 0, attempt_id TEXT NOT NULL DEFAULT '')"
        )
        old.execute("INSERT INTO runs VALUES ('r1', 'a', 'r', 'c', 'x', 'y', 1.0, 'id-a', 2, '')")
        old.execute("PRAGMA user_version=2")
    old.close()
    store = Store(path)
    (run,) = store.runs("a")
    assert run.members == (MemberPod("a", "id-a"),)
    store.save_run(run.with_others([MemberPod("b", "id-b"), MemberPod("c", "id-c")]))
    (again,) = Store(path).runs("c")
    assert [one.pod for one in again.members] == ["a", "b", "c"]
    assert again.with_others([]) == run
    assert store.runs("d") == []


def test_the_hint_for_a_registry_that_takes_no_write_is_for_what_sqlite_said(
    tmp_path: Path,
) -> None:
    path = tmp_path / "registry.sqlite"
    Store(path).close()
    with (
        closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as registry,
        pytest.raises(sqlite3.OperationalError) as refused,
    ):
        registry.execute("DELETE FROM pods")
    assert "read-only" in registry_advice(refused.value)
    assert "Free space" not in registry_advice(refused.value)
