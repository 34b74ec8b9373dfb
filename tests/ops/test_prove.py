import pytest

from nsa_ops.runs.prove import compare_losses

HEADER = "step,tokens,loss,lr,attempt\n"


def table(losses, attempt):
    return HEADER + "".join(
        f"{step},{step * 8},{loss},0.1,{attempt}\n" for step, loss in losses.items()
    )


BEFORE = {3: "2.5", 4: "2.25", 5: "2.125"}


def test_equal_digits_are_exact_and_steps_outside_the_replay_do_not_count():
    again = {1: "9.0", 2: "8.0"} | BEFORE | {6: "1.0"}
    found = compare_losses(table(BEFORE, 1), table(again, 2), from_step=2, to_step=5)
    assert found.is_exact
    assert (found.first_step, found.last_step, found.num_compared) == (3, 5, 3)


@pytest.mark.parametrize("other", ["2.2500000000000004", "nan", ""])
def test_one_different_digit_is_not_exact_and_is_named(other):
    again = BEFORE | {4: other}
    found = compare_losses(table(BEFORE, 1), table(again, 2), from_step=2, to_step=5)
    assert not found.is_exact
    assert found.num_different == 1
    assert "step 4: loss 2.25 before" in found.difference


def test_nothing_compared_is_not_exact():
    found = compare_losses(table({}, 1), table(BEFORE, 2), from_step=2, to_step=5)
    assert found.num_compared == 0
    assert not found.is_exact
