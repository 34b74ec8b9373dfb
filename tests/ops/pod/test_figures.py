"""Figures of a run come from the newest record that carries each, and from no other clock."""

from dataclasses import replace

import pytest

from nsa_ops.pod.messages import PhaseUse
from nsa_ops.pod.probe import figures_of
from nsa_ops.pod.tracker import MachineEvidence, ProcessEvidence, Tracker
from tests.ops.pod.ends import exit_record
from tests.ops.pod.health import FACTS, LIMITS, beat


def evidence_of(*beats, now_s: float = 100.0, process: ProcessEvidence | None = None):
    tracker = Tracker(FACTS, 1)
    tracker.feed(beats)
    alive = process or ProcessEvidence(trainer_alive=True)
    return tracker.evidence(now_s, alive, MachineEvidence())


def record(step: int, ts: float, **fields):
    given = {"ts": ts, "loss": 2.0, "step_s": 0.5, "progress_seq": step}
    return beat(step).model_copy(update=given | fields)


def test_each_figure_comes_from_the_newest_record_that_has_it() -> None:
    found = figures_of(
        evidence_of(
            record(10, 40.0, gate_entropy_mean=0.7, tokens_per_s=100.0),
            record(20, 60.0, tokens_per_s=80.0),
        ),
        LIMITS,
    )
    assert (found.record.step, found.gates.step) == (20, 10)
    assert found.pace_s == pytest.approx(2.0)
    assert found.usual_tokens_per_s == pytest.approx(100.0)


def test_the_phase_shows_how_much_of_its_patience_is_used() -> None:
    phase = figures_of(evidence_of(record(10, 40.0)), LIMITS).phase
    assert phase == PhaseUse(
        phase="train", still_s=60.0, limit_s=LIMITS.stall_min_s, warn_s=LIMITS.stall_min_s
    )


def test_an_ended_attempt_has_no_phase_and_one_that_has_not_begun_has_nothing() -> None:
    process = ProcessEvidence(trainer_alive=False, exit=exit_record(0))
    found = figures_of(evidence_of(record(10, 40.0), process=process), LIMITS)
    assert (found.phase, found.record.step) == (None, 10)
    empty = figures_of(evidence_of(), LIMITS)
    assert (empty.record, empty.gates, empty.phase, empty.pace_s) == (None, None, None, None)


def test_a_clock_that_was_set_back_gives_no_negative_figure() -> None:
    beats = (record(10, 5000.0), record(20, 10.0))
    found = figures_of(replace(evidence_of(*beats), still_s=-4990.0), LIMITS)
    assert found.pace_s == 0.5
    assert found.phase.still_s == 0.0
