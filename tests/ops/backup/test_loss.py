"""`you lose at most …` is a pure function of what is safe."""

import pytest

from nsa_ops.runs.backup.loss import at_most_lost


@pytest.mark.parametrize(
    ("last", "saved", "step_s", "sentence"),
    [
        (0, None, None, "nothing is backed up, and no step is done yet"),
        (1200, None, 0.5, "nothing is backed up: you lose all 1,200 steps / 10 min"),
        (
            520,
            400,
            2.0,
            "you lose at most 120 steps / 4 min: the newest verified backup is step 400",
        ),
        (520, 400, None, "you lose at most 120 steps: the newest verified backup is step 400"),
        (400, 400, 2.0, "you lose nothing: the newest verified backup is step 400"),
        (300, 400, 2.0, "you lose nothing: the newest verified backup is step 400"),
    ],
)
def test_the_sentence(last: int, saved: int | None, step_s: float | None, sentence: str) -> None:
    assert at_most_lost(last_step=last, saved_step=saved, step_s=step_s).sentence == sentence
