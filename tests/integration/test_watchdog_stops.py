import json
import os
import signal
from pathlib import Path

import pytest

from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.manifest import read_manifest
from nsa_core.rundir.process import is_alive
from nsa_ops.pod.act import act
from nsa_ops.pod.card_watch import MARK_NAME, PodMark
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.messages import HaltAction, SignalAction
from nsa_ops.pod.processes import kill_session, read_processes
from nsa_ops.pod.stacks import HangReport
from tests.integration.pod_runs import make_run, start, wait_for

pytestmark = pytest.mark.integration

QUICK = {
    "interval_s": 0.1, "ack_grace_s": 0.6, "term_grace_s": 0.6, "phase_limit_s": 5.0,
    "stall_min_s": 1.0, "stale_warn_s": 0.8, "stale_halt_s": 1.5,
}  # fmt: skip
PATIENT = QUICK | {"stale_warn_s": 60, "stale_halt_s": 60, "stall_min_s": 60}


@pytest.fixture
def both():
    """Start runner and watchdog on a run; whatever still lives in the end is killed."""
    started = []

    def begin(run):
        started.append((run, start("runner", run), start("watchdog", run)))
        return started[-1][1:]

    yield begin
    for run, *processes in started:
        record = read_processes(run)
        if record is not None and record.trainer is not None:
            kill_session(record.trainer)
        for process in processes:
            process.kill()
            process.wait()


def kinds(run):
    return [event.kind for event in read_events(run)]


def signals(run):
    return [e.facts["signal"] for e in read_events(run) if e.kind == "signal"]


def test_a_healthy_run_is_watched_to_its_end_and_left_alone(tmp_path: Path, both) -> None:
    run = make_run(tmp_path, [["beat", 5], ["sleep", 0.5], ["exit_record", 0]], limits=QUICK)
    _, watchdog = both(run)
    assert watchdog.wait(15) == 0
    assert kinds(run) == ["started", "ended", "not_restarted"]
    record = read_watchdog(run)
    assert (record.doing, record.verdict.level, record.restarts) == ("done", "healthy", 0)
    assert not run.halt.exists()
    assert not run.anomaly.exists()


def test_losses_that_are_not_finite_halt_the_run_through_the_file(tmp_path: Path, both) -> None:
    run = make_run(tmp_path, [["beat", 5], ["bad", 2], ["wait_halt", 20]], limits=QUICK)
    _, watchdog = both(run)
    assert watchdog.wait(15) == 0
    assert (read_exit(run).code, run.anomaly.read_text()) == (10, "loss_nonfinite\n")
    assert read_exit(run).reason.startswith("loss_nonfinite: ")
    assert signals(run) == []
    assert read_manifest(run).attempt == 1


def test_a_gate_collapse_leaves_its_figures(tmp_path: Path, both) -> None:
    run = make_run(tmp_path, [["beat", 2], ["gates", 3], ["wait_halt", 20]], limits=QUICK)
    _, watchdog = both(run)
    watchdog.wait(15)
    details = json.loads(run.gate_collapse.read_text())
    assert (details["layer"], details["entropy_mean"]) == (3, [0.05] * 3)


def test_a_hang_is_reported_with_stacks_and_then_ended_by_term(tmp_path: Path, both) -> None:
    script = [["stacks", 0], ["beat", 3], ["hang", 30]]
    run = make_run(tmp_path, script, limits=QUICK)
    _, watchdog = both(run)
    assert watchdog.wait(20) == 0
    report = HangReport.model_validate_json(run.hang_report.read_bytes())
    assert (report.rule, report.groups[0].ranks) == ("stall", [0])
    assert "do_hang" in report.groups[0].text
    assert signals(run) == ["TERM"]
    assert read_exit(run).code == 16
    assert "killed by SIGTERM: watchdog asked (stall: " in read_exit(run).reason
    assert read_manifest(run).attempt == 1


def test_a_trainer_that_ignores_term_is_killed_and_not_restarted(tmp_path: Path, both) -> None:
    script = [["ignore", "TERM"], ["ignore", "USR1"], ["beat", 3], ["sleep", 60]]
    run = make_run(tmp_path, script, limits=QUICK)
    _, watchdog = both(run)
    trainer = wait_for(lambda: (r := read_processes(run)) and r.trainer)
    assert watchdog.wait(30) == 0
    assert not is_alive(trainer)
    assert signals(run) == ["TERM", "KILL"]
    assert read_exit(run).code == 16
    assert "killed by SIGKILL" in read_exit(run).reason
    assert read_manifest(run).attempt == 1


def test_a_stale_halt_file_does_nothing(tmp_path: Path, both) -> None:
    run = make_run(tmp_path, [["wait_halt", 1.0], ["exit_record", 0]], limits=QUICK)
    run.halt.write_text('{"run_id": "other", "attempt": 9, "reason": "r", "by": "x", "at": 1}')
    _, watchdog = both(run)
    watchdog.wait(15)
    assert read_exit(run).code == 0


def test_a_run_has_one_watchdog_and_a_second_one_refuses(tmp_path: Path, both) -> None:
    run = make_run(tmp_path, [["sleep", 60]], limits=PATIENT)
    both(run)
    wait_for(run.watchdog.exists)
    assert start("watchdog", run).wait(20) == 7


def test_the_watchdog_survives_a_hangup(tmp_path: Path, both) -> None:
    run = make_run(tmp_path, [["wait_halt", 1.5], ["exit_record", 0]], limits=QUICK)
    _, watchdog = both(run)
    wait_for(run.watchdog.exists)
    watchdog.send_signal(signal.SIGHUP)
    assert watchdog.wait(15) == 0


def test_a_preempted_attempt_continues_as_the_next_one(tmp_path: Path, both) -> None:
    run = make_run(
        tmp_path, [["beat", 3], ["exit_record", 75]], [["beat", 3], ["exit_record", 0]],
        limits=QUICK,
    )  # fmt: skip
    _, watchdog = both(run)
    assert watchdog.wait(20) == 0
    assert (read_manifest(run).attempt, read_exit(run).code) == (2, 0)
    assert (run.attempt(1) / "exit.json").exists()
    assert kinds(run).count("restarted") == 1


def test_crashes_without_a_new_checkpoint_use_up_the_budget(tmp_path: Path, both) -> None:
    run = make_run(tmp_path, [["beat", 3], ["die", "SIGKILL"]], limits=QUICK)
    _, watchdog = both(run)
    assert watchdog.wait(40) == 0
    assert read_manifest(run).attempt == 4
    assert kinds(run).count("restarted") == 3
    assert "budget 3" in read_watchdog(run).why


def test_a_crash_before_the_first_step_is_not_tried_again(tmp_path: Path, both) -> None:
    run = make_run(tmp_path, [["exit", 1]], limits=QUICK)
    _, watchdog = both(run)
    watchdog.wait(15)
    assert read_manifest(run).attempt == 1
    assert run.anomaly.read_text() == "process_gone\n"


def test_an_end_on_purpose_is_not_restarted(tmp_path: Path, both) -> None:
    run = make_run(tmp_path, [["beat", 3], ["exit_record", 12]], limits=QUICK)
    _, watchdog = both(run)
    watchdog.wait(15)
    assert read_manifest(run).attempt == 1


def test_what_the_operator_stopped_by_signal_stays_stopped(tmp_path: Path, both) -> None:
    script = [["term_exit", 75], ["beat", 3], ["wait_halt", 60]]
    run = make_run(tmp_path, script, limits=QUICK)
    _, watchdog = both(run)
    wait_for(lambda: run.heartbeat().exists() and run.heartbeat().read_bytes().count(b"\n") > 3)
    reply = act(SignalAction(run_dir=run.root, signal="TERM").model_dump_json().encode())
    assert reply.outcome == "done"
    watchdog.wait(15)
    assert (read_manifest(run).attempt, read_exit(run).code) == (1, 75)
    assert "operator" in read_watchdog(run).why


def test_what_the_operator_killed_after_a_halt_stays_stopped(tmp_path: Path, both) -> None:
    run = make_run(tmp_path, [["beat", 3], ["sleep", 60]], limits=PATIENT)
    _, watchdog = both(run)
    trainer = wait_for(lambda: (r := read_processes(run)) and r.trainer)
    act(HaltAction(run_dir=run.root, reason="enough").model_dump_json().encode())
    os.kill(trainer.pid, signal.SIGKILL)
    watchdog.wait(15)
    assert read_manifest(run).attempt == 1


def test_a_run_whose_trainer_and_runner_were_killed_is_restarted(tmp_path: Path, both) -> None:
    run = make_run(
        tmp_path, [["beat", 3], ["sleep", 60]], [["beat", 2], ["exit_record", 0]],
        limits=PATIENT,
    )  # fmt: skip
    runner, watchdog = both(run)
    wait_for(lambda: run.heartbeat().exists() and run.heartbeat().read_bytes().count(b"\n") > 3)
    trainer = read_processes(run).trainer
    runner.kill()
    runner.wait()
    os.kill(trainer.pid, signal.SIGKILL)
    assert watchdog.wait(20) == 0
    assert read_manifest(run).attempt == 2
    assert json.loads((run.attempt(1) / "exit.json").read_text())["by"] == "watchdog"


def test_a_card_that_falls_off_the_bus_stops_the_run(
    tmp_path: Path, both, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    smi, log = tools / "nvidia-smi", tools / "dmesg"
    smi.write_text(
        "#!/bin/sh\necho 'index, uuid, pci.bus_id, ecc.errors.uncorrected.volatile.total'\n"
        "echo '0, GPU-a, 00000000:1A:00.0, 0'\n"
    )
    log.write_text(f"#!/bin/sh\ncat {tools}/log 2>/dev/null || true\n")
    for tool in (smi, log):
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    run = make_run(tmp_path, [["wait_halt", 30]], limits=PATIENT | {"cards_every_s": 0.2})
    _, watchdog = both(run)
    wait_for(lambda: run.cards.exists() and run.heartbeat().exists())
    (tools / "log").write_text("[ 9.0] NVRM: Xid (PCI:0000:1a:00): 79, pid=1, fell off the bus\n")
    assert watchdog.wait(20) == 0
    assert read_exit(run).code == 10
    assert "card_xid: Xid 79" in read_exit(run).reason
    assert run.anomaly.read_text() == "card_xid\n"
    assert PodMark.model_validate_json((run.pod_root / MARK_NAME).read_bytes()).run_id == "run-1"


def test_a_loss_that_is_too_good_starts_the_causality_probe_which_stops_the_run(
    tmp_path: Path, both
) -> None:
    run = make_run(
        tmp_path, [["losses", [11.0, 0.01, 0.01, 0.01]], ["wait_halt", 30]], limits=PATIENT
    )
    runner = start("runner", run)
    watchdog = start("watchdog", run, "--checks", "tests.integration.fake_checks")
    try:
        assert watchdog.wait(30) == 0
        assert "causality_probe" in kinds(run)
        assert read_exit(run).code == 10
        assert "causality_broken" in read_exit(run).reason
    finally:
        kill_session(read_processes(run).trainer)
        for process in (runner, watchdog):
            process.kill()
            process.wait()
