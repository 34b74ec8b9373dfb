import pytest

from nsa_ops.errors import NotFoundError
from nsa_ops.pod.messages import CheckpointFact
from nsa_ops.report.prove import choose_replay, compare_losses, last_recorded
from nsa_ops.runs.choose import FoundRun
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, ended, report

HEADER = "step,tokens,loss,lr,attempt\n"


def table(losses, attempt: int):
    return HEADER + "".join(
        f"{step},{step * 8},{loss},0.1,{attempt}\n" for step, loss in losses.items()
    )


BEFORE = {3: "2.5", 4: "2.25", 5: "2.125"}


def test_equal_digits_are_exact_and_steps_outside_the_replay_do_not_count() -> None:
    again = {1: "9.0", 2: "8.0"} | BEFORE | {6: "1.0"}
    found = compare_losses(table(BEFORE, 1), table(again, 2), from_step=2, to_step=5)
    assert found.is_exact
    assert (found.first_step, found.last_step, found.num_compared) == (3, 5, 3)


@pytest.mark.parametrize("other", ["2.2500000000000004", "nan", ""])
def test_one_different_digit_is_not_exact_and_is_named(other: str) -> None:
    again = BEFORE | {4: other}
    found = compare_losses(table(BEFORE, 1), table(again, 2), from_step=2, to_step=5)
    assert not found.is_exact
    assert found.num_different == 1
    assert "step 4: loss 2.25 before" in found.difference


def test_nothing_compared_is_not_exact() -> None:
    found = compare_losses(table({}, 1), table(BEFORE, 2), from_step=2, to_step=5)
    assert found.num_compared == 0
    assert not found.is_exact


def halted_at(desk, step: int, *, saved, recorded) -> FoundRun:
    """A run that ended at a step, the steps it saved and the steps it recorded."""
    exit_record = ended(10, "halted").model_copy(update={"step": step})
    checkpoints = [
        CheckpointFact(name=f"step_{one:06d}", step=one, size_bytes=1, whole=True) for one in saved
    ]
    if recorded is not None:
        content = table(dict.fromkeys(recorded, "2.5"), 1)
        desk.transport.files["/pod/runs/r1/training.csv"] = content.encode()
    seen = report("halted", exit=exit_record, checkpoints=checkpoints)
    return FoundRun(RUN, desk.operator.link(POD), seen)


@pytest.mark.parametrize(
    ("saved", "recorded", "chosen"),
    [
        ([44, 40, 20], [10, 20, 30, 40], 20),
        ([45, 42, 37], [10, 20, 30, 40], 37),
        ([45, 44, 43], [43, 44, 45], 44),
        ([45, 44], [44, 45, 46], 44),
    ],
)
def test_the_checkpoint_leaves_a_recorded_step_to_do_again(
    desk: Desk, saved: list[int], recorded: list[int], chosen: int
) -> None:
    found = halted_at(desk, 45, saved=saved, recorded=recorded)
    assert choose_replay(found) == f"/pod/runs/r1/checkpoints/step_{chosen:06d}"


@pytest.mark.parametrize(
    ("recorded", "words"),
    [([10, 20], "before its last recorded step 20"), ([], "it has none"), (None, "it has none")],
)
def test_without_a_recorded_step_after_a_checkpoint_there_is_nothing_to_prove(
    desk: Desk, recorded, words: str
) -> None:
    found = halted_at(desk, 25, saved=[25, 24], recorded=recorded)
    with pytest.raises(NotFoundError, match=words) as refused:
        choose_replay(found)
    assert "`telemetry.log_every=1`" in refused.value.hint


def test_a_row_that_a_kill_has_cut_is_not_recorded() -> None:
    whole = table({3: "2.5", 4: "2.25"}, 1)
    assert last_recorded(whole, 9) == 4
    assert last_recorded(whole[:-1], 9) == 3
    assert last_recorded(whole + "5,40", 9) == 4
