import math

import pytest

from nsa_core.train.judgement import find_breach, find_fault, recent


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0])
def test_a_loss_or_gradient_that_is_not_finite_or_exactly_zero_is_a_fault(bad):
    assert "loss" in find_fault(bad, 1.0, 8)
    assert "gradient norm" in find_fault(2.0, bad, 8)


def test_a_batch_without_targets_has_no_loss():
    assert "missing" in find_fault(0.0, 0.0, 0)


def test_a_usable_step_has_no_fault():
    assert find_fault(2.0, 0.3, 8) is None


def breach(unusable, step):
    return find_breach(unusable, step, in_row=2, in_100=3)


def test_one_skipped_step_does_not_end_the_run():
    assert breach([7], 7) is None


def test_two_in_a_row_end_it():
    assert "2 steps in a row" in breach([7, 8], 8)


def test_three_in_a_hundred_end_it_and_three_in_more_do_not():
    assert "3 of 100" in breach([1, 50, 100], 100)
    assert breach(recent([1, 50, 101], 101), 101) is None


def test_a_good_step_after_two_bad_ones_is_no_breach():
    assert breach([7, 9], 10) is None
