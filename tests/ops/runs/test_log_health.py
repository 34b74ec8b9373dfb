import pytest

from nsa_ops.errors import ConfigurationError, NotFoundError
from nsa_ops.runs.log_health import judge_log


def test_a_log_that_diverges_to_nan_is_a_halt_with_the_step_where_it_was_seen(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("iter 1: loss 3.1\niter 2: loss nan\niter 3: loss nan\n")
    found = judge_log(log)
    assert (found.level, found.replay.num_records) == ("halt", 3)
    assert found.replay.first("halt").step == 3


def test_a_healthy_log_is_healthy(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("".join(f"iter {n}: loss {4 - n / 100}\n" for n in range(50)))
    assert judge_log(log).level == "healthy"


def test_a_file_that_is_no_log_or_is_not_there_is_said_so(tmp_path):
    prose = tmp_path / "prose.txt"
    prose.write_text("It was a dark and stormy night.")
    with pytest.raises(ConfigurationError, match="no line that tells"):
        judge_log(prose)
    with pytest.raises(NotFoundError, match="does not exist"):
        judge_log(tmp_path / "absent.log")
    with pytest.raises(ConfigurationError, match="at once"):
        judge_log(prose, "run-1")
