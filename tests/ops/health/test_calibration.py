"""The judge on real logs of other people's runs: no false halt, and every alarm caught in time."""

from functools import cache
from pathlib import Path

import pytest

from nsa_core.config.training import WatchdogLimits
from nsa_ops.health.foreign_logs import parse_log
from nsa_ops.health.log_health import replay

LOGS = Path(__file__).parents[3].parent / "shared" / "cases" / "logs"
TRIALS = LOGS.parent / "trials"

pytestmark = pytest.mark.skipif(not LOGS.is_dir(), reason="the shared cases are not here")

#: Healthy logs and how many records each has.
HEALTHY = {
    "L01": 19073, "L03": 9536, "L05": 1530, "L07": 71, "L09": 1500, "L11": 2544, "L37": 5,
    "L39": 12,
}  # fmt: skip
#: Logs that must warn and not halt: rule, and the step of the first warning at latest.
WARNED = {
    "L18": ("loss_jump", 31219), "L46": ("loss_nonfinite", 2), "L52": ("data_slow", 32),
    "L55": ("throughput_low", 6250),
}  # fmt: skip
#: Rule that halts, step at which the trouble can first be seen, and the delay in records.
ALARMS = {
    "L13": ("process_gone", 595, 1),  # the last record before the line that says so
    "L15": ("loss_jump", 6920, 2),
    "L19": ("loss_jump", 17062, 2),
    "L30": ("loss_nonfinite", 3010, 1),
    "L31": ("loss_missing", 3385, 0),
    "L33": ("loss_nonfinite", 2, 0),
    "L35": ("loss_too_good", 2, 0),
    "L41": ("not_learning", 1, 2),
    "L43": ("gates_collapsed", 0, 2),
    "L48": ("stall", 0, 0),
}


#: Small made logs: what must be reported first of each level, and the step at the latest.
EXPECTED = {
    "t01": {}, "t02": {"halt": ("loss_jump", 820)}, "t03": {"halt": ("loss_exploded", 9010)},
    "t04": {"halt": ("loss_jump", 100)}, "t05": {"warn": ("validation_rising", 2000)}, "t06": {},
    "t07": {"halt": ("process_gone", 299)}, "t08": {"warn": ("throughput_low", 220)}, "t09": {},
    "h02": {"warn": ("throughput_low", 120)}, "h03": {"warn": ("validation_rising", 2500)},
}  # fmt: skip


@cache
def judged(name):
    path = next((LOGS if name.startswith("L") else TRIALS).glob(f"{name}_*"))
    log = parse_log(path.read_text(errors="replace"))
    return log, replay(log, WatchdogLimits())


def test_every_log_of_the_collection_is_judged() -> None:
    names = {path.name[:3] for path in LOGS.iterdir()}
    assert names == HEALTHY.keys() | WARNED.keys() | ALARMS.keys()


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_read_whole_and_never_halted(name: str) -> None:
    log, replayed = judged(name)
    assert sum(beat.loss is not None for beat in log.beats) == HEALTHY[name]
    assert log.num_unread <= len(log.beats)
    assert replayed.first("halt") is None
    # Single records that stand out are reported once and summed up; no other rule speaks.
    assert replayed.num_findings.keys() <= {"loss_jump"}
    assert sum(replayed.num_findings.values()) <= 0.01 * replayed.num_records


@pytest.mark.parametrize("name", WARNED)
def test_a_passing_problem_is_reported_and_not_halted(name: str) -> None:
    rule, step = WARNED[name]
    _, replayed = judged(name)
    assert replayed.first("halt") is None
    assert any(alarm.finding.rule == rule and alarm.step <= step for alarm in replayed.alarms)


@pytest.mark.parametrize("name", ALARMS)
def test_a_lost_run_is_halted_within_its_delay(name: str) -> None:
    rule, step, delay = ALARMS[name]
    log, replayed = judged(name)
    alarm = replayed.first("halt")
    seen = next(
        (index for index, beat in enumerate(log.beats) if beat.step >= step), len(log.beats)
    )
    if name == "L48":  # the newest beat shows the stall; the one before it is where it began
        seen = len(log.beats) - 1
    assert (alarm.finding.rule, alarm.record - seen) == (rule, delay)


def test_the_slow_run_is_reported_with_its_cause() -> None:
    _, replayed = judged("L55")
    assert "the data loader is not the cause" in replayed.first("warn").finding.sentence


def test_a_resume_in_a_log_begins_a_new_attempt_without_an_alarm() -> None:
    log, replayed = judged("L13")
    assert [next(b.step for b in log.beats if b.attempt == n) for n in (1, 2)] == [0, 430]
    assert replayed.first("warn") is None


@pytest.mark.parametrize("name", EXPECTED)
def test_the_problem_of_a_made_log_is_reported_in_time_and_nothing_else(name: str) -> None:
    _, replayed = judged(name)
    for level in ("halt", "warn"):
        alarms = [a for a in replayed.alarms if a.finding.level == level]
        if level in EXPECTED[name]:
            rule, step = EXPECTED[name][level]
            assert any(a.finding.rule == rule and a.step <= step for a in alarms)
        elif level == "halt" or not EXPECTED[name]:
            assert alarms == []


def test_a_late_leak_is_reported_before_the_loss_is_at_six_tenths_of_its_level() -> None:
    log, replayed = judged("h01")
    alarm = next(a for a in replayed.alarms if a.finding.rule == "loss_fall")
    assert log.beats[alarm.record].loss > 0.6 * log.beats[0].loss


def test_a_slow_epoch_is_reported_again_when_it_gets_worse() -> None:
    _, replayed = judged("t08")
    assert [a.finding.stage for a in replayed.alarms if a.finding.rule == "throughput_low"] == [
        0,
        1,
    ]


@pytest.mark.parametrize("name", ["t01", "t06"])
def test_a_healthy_log_is_read_well_enough_to_be_called_so(name: str) -> None:
    log, _ = judged(name)
    assert log.num_unread <= len(log.beats)
