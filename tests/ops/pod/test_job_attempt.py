"""Which attempt a node of an engine's job takes part in, and the code that the engine gets."""

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import Node, RunManifest, read_manifest, write_manifest
from nsa_core.rundir.process import ProcessIdentity, identify
from nsa_ops.pod import node_job
from nsa_ops.pod.ending import RestartDecision, decide_after
from nsa_ops.pod.job_attempt import (
    JobPlace,
    begin_attempt,
    code_for_engine,
    find_fault,
    find_finished,
    join_first_node,
    judge_end,
)
from nsa_ops.pod.processes import RunProcesses, write_processes
from nsa_ops.pod.rank_ending import LOST_ELSEWHERE
from nsa_ops.pod.runner import StartRefusedError
from tests.ops.pod.ends import exit_record, write_end

GONE = ProcessIdentity(pid=2**22 - 1, start_ticks=1, boot_id="another boot")
AGAIN, FINAL = RestartDecision(restart=True, why="w"), RestartDecision(restart=False, why="w")


def manifest(**runtime) -> RunManifest:
    config = RunConfig.model_validate({"runtime": runtime, "batch": {"accumulation": 4}})
    return RunManifest(run_id="run-1", config=config, config_sha256="0" * 64, created_unix_s=1.0)


def place(root: Path, rank: int = 0, num_nodes: int = 2, port: int = 5) -> JobPlace:
    node = Node(rank=rank, address="127.0.0.1", port=port) if num_nodes > 1 else Node()
    return JobPlace(RunDir(root / f"node_{rank}" / "runs" / "run-1"), node, num_nodes, wait_s=0.5)


def start(run: RunDir, trainer: ProcessIdentity | None = GONE, attempt: int = 1) -> None:
    there = read_manifest(run)
    record = RunProcesses(
        run_id="run-1", attempt=attempt, attempt_id=there.attempt_id, runner=GONE, trainer=trainer,
        restarted_by="engine", started_unix_s=1.0,
    )  # fmt: skip
    write_processes(run, record)


def test_node_0_makes_the_run_and_fits_it_to_the_nodes_of_the_engine(tmp_path: Path) -> None:
    made = begin_attempt(place(tmp_path), manifest())
    there = read_manifest(place(tmp_path).run)
    assert (there.attempt, there.node, there.config.num_ranks) == (1, place(tmp_path).node, 2)
    assert made == there
    assert there.attempt_id
    assert there.config_sha256 != "0" * 64
    assert begin_attempt(place(tmp_path), manifest()) == there


def test_an_attempt_that_was_not_started_only_changes_its_place(tmp_path: Path) -> None:
    begin_attempt(place(tmp_path), manifest())
    moved = begin_attempt(place(tmp_path, port=6), manifest())
    assert (moved.attempt, moved.node.port) == (1, 6)
    assert read_manifest(place(tmp_path).run) == moved


@pytest.mark.parametrize(("code", "by"), [(75, "engine"), (14, "operator")])
def test_an_ended_attempt_is_followed_by_the_next_one(tmp_path: Path, code: int, by: str) -> None:
    here = place(tmp_path)
    begin_attempt(here, manifest())
    start(here.run)
    write_end(here.run, code)
    new = begin_attempt(place(tmp_path, num_nodes=1), manifest())
    assert (new.attempt, new.resume, new.config.num_ranks) == (2, "auto", 1)
    assert [e.by for e in read_events(here.run) if e.kind == "resumed"] == [by]
    assert any(e.kind == "restarted" for e in read_events(here.run)) == (by == "engine")


def test_a_node_that_went_down_is_recorded_before_the_next_attempt(tmp_path: Path) -> None:
    here = place(tmp_path)
    begin_attempt(here, manifest())
    start(here.run)
    assert begin_attempt(here, manifest()).attempt == 2
    kept = read_exit(RunDir(here.run.attempt(1)))
    assert kept is not None
    assert "the exit code is unknown" in kept.reason


def test_nothing_begins_beside_a_trainer_that_lives(tmp_path: Path) -> None:
    here = place(tmp_path)
    begin_attempt(here, manifest())
    start(here.run, identify(os.getpid()))
    with pytest.raises(StartRefusedError, match="still runs on this node"):
        begin_attempt(here, manifest())


def test_a_finished_run_is_left_alone_on_every_node(tmp_path: Path) -> None:
    first = place(tmp_path)
    begin_attempt(first, manifest())
    assert find_finished(first) is None
    write_end(first.run, 0)
    assert find_finished(place(tmp_path, rank=1)) == read_exit(first.run)


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_node_joins_the_attempt_that_node_0_trains(tmp_path: Path, listening: int) -> None:
    first, second = place(tmp_path, port=listening), place(tmp_path, 1, port=listening)
    begun = begin_attempt(first, manifest())
    start(first.run)
    joined = join_first_node(second)
    assert (joined.attempt_id, joined.node.rank) == (begun.attempt_id, 1)
    assert read_manifest(second.run) == joined


def test_a_node_does_not_join_what_a_lost_job_has_left_behind(
    tmp_path: Path, listening: int
) -> None:
    first, second = place(tmp_path, port=listening), place(tmp_path, 1, port=listening)
    begin_attempt(first, manifest())

    def refused(one: JobPlace) -> None:
        with pytest.raises(StartRefusedError, match="begun no attempt") as raised:
            join_first_node(one, lambda _: time.sleep(0.05))
        assert raised.value.code == 8

    refused(second)  # node 0 has not started it
    start(first.run)
    closed = JobPlace(second.run, second.node.model_copy(update={"port": 1}), 2, wait_s=0.2)
    refused(closed)  # its torchrun does not listen
    join_first_node(second)
    start(second.run)
    refused(second)  # it was in that attempt
    write_manifest(second.run, manifest())
    write_end(first.run, 1)
    refused(second)  # it has ended


@pytest.mark.parametrize(
    ("first", "decision", "other", "code"),
    [
        (0, FINAL, None, 0),
        (10, FINAL, None, 0),
        (75, AGAIN, None, 75),
        (1, AGAIN, None, 75),
        (-9, AGAIN, -9, 75),
        (1, AGAIN, 14, 14),
        (14, FINAL, 1, 14),
        (16, FINAL, None, 16),
        (-9, FINAL, None, 1),
        (75, FINAL, None, 1),
    ],
)
def test_the_engine_starts_again_only_what_may_be(first, decision, other, code) -> None:
    others = [] if other is None else [exit_record(other)]
    assert code_for_engine(exit_record(first), decision, others)[0] == code


def test_the_cause_on_another_node_is_named_where_node_0_only_followed() -> None:
    killed = exit_record(-9, reason="rank 1 of 2 was killed by SIGKILL")
    followed = killed.model_copy(update={"code": 1, "reason": f"{LOST_ELSEWHERE}; rank 0 of 2: x"})
    _, why = code_for_engine(followed, AGAIN, [followed, killed])
    assert why.endswith("; on another node: rank 1 of 2 was killed by SIGKILL")
    assert "another node" not in code_for_engine(killed, AGAIN, [followed])[1]


def test_the_watchdog_leaves_the_restart_to_the_engine(tmp_path: Path) -> None:
    here = place(tmp_path, num_nodes=1)
    begun = begin_attempt(here, manifest())
    start(here.run)
    ended = write_end(here.run, 75)
    assert decide_after(here.run, begun, ended).why.startswith("its engine starts it again")
    assert judge_end(here, begun)[0] == 75


@pytest.mark.parametrize(
    ("folder", "node", "num_nodes", "said"),
    [
        ("node_0/runs/run-1", Node(rank=2, address="a", port=1), 2, "counted from 0"),
        ("node_0/runs/other", Node(), 1, "ends in other"),
        ("node_0/runs/run-1", Node(), 2, "--master-addr is ''"),
        ("node_0/runs/run-1", Node(rank=1, address="a", port=1), 2, "end in node_1/runs/run-1"),
        ("runs/run-1", Node(), 1, ""),
    ],
)
def test_variables_that_describe_no_node_are_refused(folder, node, num_nodes, said: str) -> None:
    fault = find_fault(RunDir(Path("/v") / folder), "run-1", node, num_nodes)
    assert said in fault
    assert bool(said) == bool(fault)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "cannot be used as a manifest"),
        (["--num-nodes", "3"], "do not go together: batch.accumulation"),
        (["--master-port", "70000"], "master-port|less than or equal"),
    ],
)
def test_bad_input_ends_in_one_line_and_code_2(tmp_path, flags, said, capsys, monkeypatch) -> None:
    monkeypatch.setattr(node_job.signal, "signal", lambda *_: None)
    file = tmp_path / "manifest.json"
    file.write_text(manifest().model_dump_json() if flags else json.dumps({"run_id": 1}))
    folder = tmp_path / "node_0" / "runs" / "run-1"
    words = ["--run-dir", str(folder), "--manifest", str(file), "--master-addr", "127.0.0.1"]
    given = [*words, "--master-port", "5", *flags]
    assert node_job.main(given) == 2
    text = capsys.readouterr().err
    assert any(one in text for one in said.split("|")), text
    assert "Traceback" not in text
    assert not folder.exists()
