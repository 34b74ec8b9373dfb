"""The judge on real logs of other people's runs: no false halt, and every alarm caught in time."""

from pathlib import Path

import pytest

from nsa_core.config.training import WatchdogLimits
from nsa_ops.pod.foreign_logs import parse_log
from nsa_ops.pod.replay import replay

LOGS = Path(__file__).parents[3].parent / "shared" / "cases" / "logs"

pytestmark = pytest.mark.skipif(not LOGS.is_dir(), reason="the shared cases are not here")

#: Healthy logs and how many records each has.
HEALTHY = {
    "L01": 19073, "L03": 9536, "L05": 1530, "L07": 71, "L09": 1500, "L11": 2544, "L37": 5,
    "L39": 12,
}  # fmt: skip
#: Logs that must be told about and not halted: rule, and the step of the first warning at latest.
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


def judged(name):
    path = next(LOGS.glob(f"{name}_*"))
    log = parse_log(path.read_text(errors="replace"))
    return log, replay(log, WatchdogLimits())


def test_every_log_of_the_collection_is_judged():
    names = {path.name[:3] for path in LOGS.iterdir()}
    assert names == HEALTHY.keys() | WARNED.keys() | ALARMS.keys()


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_read_whole_and_never_halted(name):
    log, told = judged(name)
    assert sum(beat.loss is not None for beat in log.beats) == HEALTHY[name]
    assert told.first("halt") is None


@pytest.mark.parametrize("name", WARNED)
def test_a_passing_trouble_is_told_and_not_halted(name):
    rule, step = WARNED[name]
    _, told = judged(name)
    assert told.first("halt") is None
    assert any(alarm.finding.rule == rule and alarm.step <= step for alarm in told.alarms)


@pytest.mark.parametrize("name", ALARMS)
def test_a_lost_run_is_halted_within_its_delay(name):
    rule, step, delay = ALARMS[name]
    log, told = judged(name)
    alarm = told.first("halt")
    seen = next(
        (index for index, beat in enumerate(log.beats) if beat.step >= step), len(log.beats)
    )
    if name == "L48":  # the newest beat shows the stall; the one before it is where it began
        seen = len(log.beats) - 1
    assert (alarm.finding.rule, alarm.record - seen) == (rule, delay)


def test_the_slow_run_is_told_with_its_cause():
    _, told = judged("L55")
    assert "the data loader is not the cause" in told.first("warn").finding.sentence


def test_a_resume_in_a_log_begins_a_new_attempt_without_an_alarm():
    log, told = judged("L13")
    assert [next(b.step for b in log.beats if b.attempt == n) for n in (1, 2)] == [0, 430]
    assert told.first("warn") is None
