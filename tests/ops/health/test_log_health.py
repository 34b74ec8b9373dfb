from pathlib import Path

import pytest

from nsa_ops.errors import ConfigurationError, NotFoundError
from nsa_ops.health.log_health import failure_of, judge_log


def test_a_log_that_diverges_to_nan_is_a_halt_with_the_step_where_it_was_seen(
    tmp_path: Path,
) -> None:
    log = tmp_path / "train.log"
    log.write_text("iter 1: loss 3.1\niter 2: loss nan\niter 3: loss nan\n")
    found = judge_log(log)
    assert (found.level, found.replay.num_records) == ("halt", 3)
    assert found.replay.first("halt").step == 3


def test_a_healthy_log_is_healthy(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"iter {n}: loss {4 - n / 100}\n" for n in range(50)))
    assert judge_log(log).level == "healthy"


def test_a_file_that_is_no_log_or_does_not_exist_is_refused(tmp_path: Path) -> None:
    prose = tmp_path / "prose.txt"
    prose.write_text("It was a dark and stormy night.")
    with pytest.raises(ConfigurationError, match="no line with a training step"):
        judge_log(prose)
    with pytest.raises(NotFoundError, match="does not exist"):
        judge_log(tmp_path / "absent.log")
    with pytest.raises(ConfigurationError, match="at once"):
        judge_log(prose, "run-1")


def test_a_log_that_was_read_in_part_only_is_not_called_healthy(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_text("iter 0 loss 5.0\n" + "".join(f"[{n}] objective -> 4.{n}\n" for n in range(9)))
    health = judge_log(log)
    assert (health.level, health.num_unread) == ("unknown", 9)
    assert failure_of(health).exit_code == 26
    assert "9 lines could not" in failure_of(health).message


def test_lines_whose_words_differ_are_of_one_shape(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    hosts = ["alpha", "beta-2", "gamma", "delta.x", "eps", "zeta", "eta", "theta", "iota"]
    lines = (f"[{n}] objective -> 4.{n} @ {host}\n" for n, host in enumerate(hosts))
    log.write_text("iter 0 loss 5.0\n" + "".join(lines))
    assert judge_log(log).level == "unknown"


def test_a_log_that_would_halt_a_run_is_a_failure_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "nan.log"
    log.write_text("".join(f"step {n} loss nan\n" for n in range(4)))
    assert failure_of(judge_log(log)).exit_code == 25


def test_a_cancelled_job_is_reported_and_stays_healthy(tmp_path: Path) -> None:
    log = tmp_path / "cancelled.log"
    log.write_text(
        "step 7 loss 3.0\nslurmstepd: error: *** STEP 4 CANCELLED DUE TO TIME LIMIT ***\n"
    )
    health = judge_log(log)
    assert (health.level, failure_of(health)) == ("healthy", None)
    assert health.replay.ending.startswith("stopped from outside after step 7")
    assert "TIME LIMIT" in health.replay.ending


def test_a_slow_log_is_told_in_its_own_unit(tmp_path: Path) -> None:
    """It may count samples or steps."""
    log = tmp_path / "slow.log"
    speeds = [100.0] * 20 + [20.0] * 9
    log.write_text("".join(f"iter {n} loss 3 {one} samples/s\n" for n, one in enumerate(speeds)))
    said = judge_log(log).replay.alarms[0].finding.sentence
    assert "20 % of the run's own median (100 a second, in the log's own unit)" in said
