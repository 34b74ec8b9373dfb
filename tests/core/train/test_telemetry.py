"""Heartbeats, tables, TensorBoard and the log of an attempt."""

import json
import math

import pytest

from nsa_core.evaluate.perplexity import Perplexity
from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.events import read_events
from nsa_core.rundir.heartbeat import BeatFigures, Heartbeat
from nsa_core.train.disk import RESERVE_BYTES, LossyWrites, RunLog, hold_reserve, release_reserve
from nsa_core.train.tables import TensorBoardLog
from nsa_core.train.telemetry import Telemetry, TrainerFigures
from tests.core.train.sessions import new_run, opened, write_texts


def figures(**fields):
    given = {
        "tokens_seen": 64, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.7, "tokens_per_s": 100.0,
        "mfu": None, "step_s": 0.1, "data_s": 0.0, "skipped": 0,
    }  # fmt: skip
    return TrainerFigures(**{**given, **fields})


def beats(run):
    return read_records(run.heartbeat(), Heartbeat).records


def test_a_logged_step_is_in_the_table_and_in_a_heartbeat(telemetry, run):
    telemetry.continue_from(0)
    telemetry.beats.advance(step=3)
    telemetry.progress(3, figures(gate_entropy_mean=1.0))
    line = run.training_csv.read_text().splitlines()[1]
    assert line.startswith("3,64,2.5,0.001,0.7,100.0,,")
    beat = beats(run)[-1]
    assert (beat.msg, beat.step, beat.loss, beat.tokens_seen) == ("progress", 3, 2.5, 64)
    assert beat.gate_entropy_mean == 1.0


def test_a_loss_of_nan_leaves_a_heartbeat_that_is_json(telemetry, run):
    telemetry.anomaly(7, "the loss is nan", math.nan, math.inf, 1)
    last = run.heartbeat().read_text().splitlines()[-1]
    assert json.loads(last)["finite"] is False
    assert read_events(run)[-1].facts["loss"] == "nan"


def test_progress_moves_with_the_loop_and_not_with_the_thread(telemetry, run):
    telemetry.beats.write("beat")
    telemetry.beats.write("beat")
    telemetry.beats.advance(step=1)
    telemetry.beats.write("beat")
    assert [beat.progress_seq for beat in beats(run)] == [0, 0, 1]


def test_a_long_phase_is_written_at_once_with_its_deadline(telemetry, run):
    telemetry.beats.enter("eval", 300.0)
    assert (beats(run)[-1].phase, beats(run)[-1].phase_deadline_s) == ("eval", 300.0)


def test_only_beats_of_the_data_phase_have_the_progress_of_staging(telemetry, run):
    telemetry.beats.enter("data")
    telemetry.beats.staging = BeatFigures(staging="tokenise: 5 documents", staging_share=0.5)
    telemetry.beats.write("beat")
    telemetry.beats.enter("init")
    said = [(beat.staging, beat.staging_share) for beat in beats(run)]
    assert said == [(None, None), ("tokenise: 5 documents", 0.5), (None, None)]


def test_a_validation_of_a_step_is_remembered_across_attempts(telemetry, run):
    telemetry.validation(8, Perplexity(loss=2.0, num_tokens=100, num_bytes=90))
    telemetry.continue_from(8)
    assert telemetry.validated_steps == {8}


@pytest.mark.parametrize(("attempt", "kept_in"), [(4, 3), (2, 1), (1, 1)])
def test_rows_that_are_done_again_are_kept_beside_the_attempt_before(
    run, manifest, attempt, kept_in
):
    """That is where a proof of a resume looks for them; the first attempt has none before it."""
    again = Telemetry(run, manifest.model_copy(update={"attempt": attempt}))
    for step in (1, 2):
        again.progress(step, figures())
    again.continue_from(1)
    again.close()
    (row,) = (run.attempt(kept_in) / "replayed_training.csv").read_text().splitlines()[1:]
    assert row.startswith("2,64,2.5,")
    assert read_events(run)[-1].message.startswith("1 rows of training.csv after step 1")


def test_tensorboard_points_can_be_read_by_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLog(tmp_path / "tb", 1, LossyWrites(print))
    log.open(purge_step=1)
    log.scalars("train", {"loss": 2.5}, 4)
    log.close()
    found = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(4, 2.5)]


def test_a_later_attempt_hides_the_points_it_replays(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for attempt, first in ((1, 1), (2, 3)):
        log = TensorBoardLog(tmp_path / "tb", attempt, LossyWrites(print))
        log.open(purge_step=first)
        for step in range(first, 6):
            log.scalars("train", {"loss": float(attempt)}, step)
        log.close()
    found = EventAccumulator(str(tmp_path / "tb")).Reload()
    values = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert values == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_a_disk_that_refuses_costs_lines_and_is_reported_once():
    said = []
    writes = LossyWrites(said.append)

    def refuse():
        raise OSError(28, "No space left on device")

    assert [writes.attempt("a heartbeat", refuse) for _ in range(3)] == [False] * 3
    assert writes.num_lost == 3
    assert len(said) == 1
    assert "No space left" in said[0]


def test_a_bug_in_a_write_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        LossyWrites(print).attempt("x", lambda: 1 / 0)


def test_the_reserve_holds_real_blocks_and_gives_them_back(run):
    hold_reserve(run)
    assert run.reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    release_reserve(run)
    assert not run.reserve.exists()


def test_lines_are_kept_in_the_log_with_their_time(run, capfd):
    log = RunLog(run.log)
    log.report("resumed: from step 5")
    assert capfd.readouterr().err == "resumed: from step 5\n"
    assert run.log.read_text().endswith(" resumed: from step 5\n")


def test_a_log_that_is_stderr_has_each_line_once(run, monkeypatch):
    with run.log.open("ab") as file:
        monkeypatch.setattr("nsa_core.train.disk.STDERR", file.fileno())
        RunLog(run.log).report("one")
    assert run.log.read_text() == "one\n"


def test_heartbeats_of_staging_have_its_activity_and_its_share(tmp_path):
    text = tmp_path / "text.jsonl"
    write_texts(text)
    run = new_run(tmp_path, text, data={"max_tokens": 2000, "document_batch": 8})
    with opened(run):
        beats = read_records(run.heartbeat(), Heartbeat).records
    said = {beat.staging.partition(":")[0]: beat for beat in beats if beat.staging}
    assert {"tokenise", "verify"} <= set(said)
    assert {beat.phase for beat in said.values()} == {"data"}
    assert 0 < said["tokenise"].staging_share <= 1
    assert said["verify"].staging_share is None
    assert beats[-1].staging is None
