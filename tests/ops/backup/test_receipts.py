"""`you lose at most …` is a pure function of what is safe."""

import pytest

from nsa_ops.backup.receipts import at_most_lost, receipts_of
from nsa_ops.store import Receipt

STEP_400 = "the newest verified backup is step 400, verified at 1970-01-01 00:01:00 UTC"


@pytest.mark.parametrize(
    ("last", "saved_step", "step_s", "sentence"),
    [
        (0, None, None, "nothing is backed up, and no step is done yet"),
        (1200, None, 0.5, "nothing is backed up: you lose all 1,200 steps / 10 min"),
        (520, 400, 2.0, f"you lose at most 120 steps / 4 min: {STEP_400}"),
        (520, 400, None, f"you lose at most 120 steps: {STEP_400}"),
        (400, 400, 2.0, f"you lose nothing: {STEP_400}"),
        (300, 400, 2.0, f"you lose nothing: {STEP_400}"),
    ],
)
def test_the_sentence(
    last: int, saved_step: int | None, step_s: float | None, sentence: str
) -> None:
    saved = Receipt("r", saved_step, "/b", 5, "sha", 1.0, 60.0) if saved_step else None
    assert at_most_lost(last_step=last, saved=saved, step_s=step_s).sentence == sentence


@pytest.mark.parametrize("path", ["", "/", "step_000400"])
def test_a_receipt_whose_path_has_no_folders_ends_nothing(path: str) -> None:
    receipt = Receipt("r", 400, path, 5, "sha", 1.0, 60.0)
    assert receipts_of([receipt], 1, "id") == [receipt]
