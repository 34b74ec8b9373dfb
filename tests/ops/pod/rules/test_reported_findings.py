"""A rule speaks once, again when it is worse, and then in sums that come ever less often."""

import pytest

from nsa_ops.pod.rules.verdict import Finding, ReportedFindings

DAY_S = 86_400


def warning(level: str = "warn", **changes) -> Finding:
    return Finding(rule="loss_jump", level=level, sentence="The loss is high", **changes)


def test_what_is_found_all_day_long_is_a_handful_of_lines_with_sums() -> None:
    telling = ReportedFindings()
    told = [
        (at_s, one.sentence)
        for at_s in range(0, DAY_S, 5)
        for one in telling.take([warning()] if at_s % 20 == 0 else [], at_s)
    ]
    assert [at_s // 60 for at_s, _ in told] == [0, 10, 30, 70, 150, 310, 630, 990, 1350]
    assert told[0][1] == "The loss is high"
    assert told[1][1] == "The loss is high (found by 25 % of the looks of the last 10 min)"


@pytest.mark.parametrize("changes", [{"level": "halt"}, {"stage": 1}, {"subject": "gpu1"}])
def test_what_is_worse_or_about_something_else_is_reported_at_once(
    changes: dict[str, int] | dict[str, str],
) -> None:
    telling = ReportedFindings()
    assert telling.take([warning()], 0.0) == [warning()]
    worse = warning(**changes)
    assert telling.take([worse], 5.0) == [worse]
    assert telling.take([worse], 10.0) == []


def test_a_rule_that_found_nothing_for_long_is_reported_anew() -> None:
    telling = ReportedFindings()
    telling.take([warning()], 0.0)
    assert telling.take([warning()], 7 * 3600.0) == [warning()]
