"""What a run says in its tables, heartbeats and summaries is what it did."""

import itertools
import json
import math
from statistics import median

import pytest

from nsa_core.config.counts import count_flops
from nsa_core.data.loader import LoaderPlan, validation_batches
from nsa_core.data.staging import stage
from nsa_core.evaluate.device import move
from nsa_core.model.transformer import LanguageModel
from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.manifest import read_manifest
from nsa_core.train.failure import NonFiniteError
from nsa_core.train.learner import Learner
from nsa_core.train.loop import train
from nsa_core.train.step import StepResult
from nsa_core.train.timing import GoodputClock
from tests.core.train.models import CPU, same, weights
from tests.core.train.sessions import new_run, opened, run_here
from tests.integration.trainer_runs import events, rows

TOKENS = 192


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    made = new_run(
        tmp_path_factory.mktemp("run"), text,
        evaluation={"eval_every": 2, "eval_batches": 3}, telemetry={"gate_every": 2},
    )  # fmt: skip
    assert run_here(made).code == 0
    return made


@pytest.fixture(scope="module")
def beats(run):
    return read_records(run.heartbeat(), Heartbeat).records


def test_each_progress_line_has_the_figures_of_its_row(run, beats):
    lines = [beat for beat in beats if beat.msg == "progress"]
    table = rows(run.training_csv)
    assert [beat.step for beat in lines] == [1, 2, 3, 4, 5]
    for beat, row in zip(lines, table, strict=True):
        for name in ("loss", "lr", "grad_norm", "step_s", "data_s"):
            assert getattr(beat, name) == float(row[name]), name
        assert beat.tokens_seen == int(row["tokens"]) == beat.step * TOKENS
        assert beat.finite
        assert beat.skipped == 0
        assert beat.phase == "train"
        assert beat.host_rss_mib > 50
        assert beat.kernel_paths == {
            "compressed": "sdpa", "selected": "sdpa", "sliding": "sdpa", "loss": "torch",
        }  # fmt: skip
    assert [beat.gate_entropy_mean is not None for beat in lines] == [False, True] * 2 + [False]


#: What only a card can tell, or a run in fp16.
OF_A_CARD = {
    "mfu", "loss_scale", "gpu_mem_alloc", "gpu_mem_reserved", "gpu_mem_peak", "gpu_mem_total",
    "gpu_util", "power_w", "temp_c", "throttle",
}  # fmt: skip


def test_every_field_of_a_heartbeat_is_filled_by_some_beat(beats):
    told = {name for beat in beats for name, value in beat if value not in (None, {}, [])}
    of_a_known_length = {"staging_share"}  # of a staging; see test_staging_progress.py
    of_several = {"work_s", "sync_s"}  # ranks; see test_several_ranks.py
    assert Heartbeat.model_fields.keys() - told == OF_A_CARD | of_a_known_length | of_several


def test_a_heartbeat_of_an_older_version_is_still_read(beats):
    line = beats[-1].model_dump_json()[:-1] + ', "fallbacks": {"selected": 2}}'
    assert Heartbeat.model_validate_json(line).step == beats[-1].step


def test_the_loop_moves_in_every_step_and_micro_step(beats):
    moved = [beat.progress_seq for beat in beats if beat.msg == "progress"]
    # a step of two micro-batches advances once between them and once at its end
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(moved))
    every = [beat.progress_seq for beat in beats]
    assert every == sorted(every)


def test_phases_are_written_as_they_begin_and_lead_back_to_training(beats):
    phases = [beat.phase for beat in beats if beat.msg == "beat"]
    assert {"data", "init", "eval", "checkpoint", "shutdown"} <= set(phases)
    deadlines = {beat.phase: beat.phase_deadline_s for beat in beats}
    assert (deadlines["eval"], deadlines["train"]) == (300.0, 180.0)
    assert [beat.checkpoint_step for beat in beats if beat.msg == "checkpoint"] == [1, 2, 3, 4, 5]


def test_speed_is_tokens_over_seconds_and_the_first_step_has_none(run):
    first, *later = rows(run.training_csv)
    assert first["tokens_per_s"] == ""
    for row in later:
        seconds = float(row["step_s"]) + float(row["data_s"])
        assert float(row["tokens_per_s"]) == pytest.approx(TOKENS / seconds, rel=0.02)


def test_the_summary_is_that_of_the_tables(run):
    found = json.loads(run.metrics.read_text())
    speeds = [float(row["tokens_per_s"]) for row in rows(run.training_csv)[1:]]
    validations = rows(run.validation_csv)
    assert found["tokens_per_s"] == median(speeds)
    assert (found["step"], found["steps"], found["tokens_seen"]) == (5, 5, 5 * TOKENS)
    assert (
        found["num_parameters"] == LanguageModel(read_manifest(run).config.model).num_parameters()
    )
    assert found["validation_first"]["step"] == 0
    assert found["validation_last"]["step"] == 5
    best = min(float(row["bits_per_byte"]) for row in validations)
    assert found["bits_per_byte_best"] == best
    assert found["checkpoints"]["num_saved"] == found["checkpoints"]["last_step"] == 5
    assert found["skipped_steps"] == 0
    assert found["is_final"]
    assert found["mfu"] is None


def test_every_second_of_the_attempt_is_in_one_bucket(run):
    found = json.loads(run.goodput.read_text())
    buckets = found["buckets"]
    assert sum(buckets.values()) == pytest.approx(found["wall_s"], abs=0.02)
    assert found["goodput"] == pytest.approx(buckets["step"] / found["wall_s"], abs=1e-3)
    for name in ("init", "step", "eval", "checkpoint_stall"):
        assert buckets[name] > 0, name
    for name in ("rollback_lost", "hang", "down", "compile"):
        assert buckets[name] == 0, name
    stalls = sum(event.facts["stall_s"] for event in events(run, "saved"))
    assert buckets["checkpoint_stall"] >= stalls - 0.01


class SlowLoader:
    """Every batch takes five seconds of a clock that only it moves."""

    def __init__(self, loader, beats):
        self._loader, self._beats = loader, beats
        self.now_s = 0.0
        self.phases = []

    def next_batch(self, poll):
        self.now_s += 5.0
        self.phases.append((self._beats.phase, self._beats.phase_deadline_s))
        return self._loader.next_batch(poll)

    def __getattr__(self, name):
        return getattr(self._loader, name)


def test_waiting_for_batches_is_a_phase_and_a_bucket_of_its_own(tmp_path, text):
    made = new_run(tmp_path, text, schedule={"steps": 3, "warmup_steps": 0})
    with opened(made) as session:
        slow = SlowLoader(session.loader, session.context.beats)
        session.loader = slow
        session.clock = GoodputClock(0.0, {}, wall=lambda: slow.now_s, ticks=lambda: slow.now_s)
        train(session)
        buckets = session.clock.read(attempt=1, step=3).buckets
    assert {name: value for name, value in buckets.items() if value} == {"data_wait": 30.0}
    timeout_s = session.config.data.loader_timeout_s
    assert slow.phases == [("data_wait", timeout_s)] * 6


def test_validation_is_the_mean_over_held_out_tokens_and_their_bytes(run):
    """Again with the initial weights, in float64, of the batches that are promised."""
    config = read_manifest(run).config
    model = LanguageModel(config.model, seed=config.seed).double()
    staged = stage(config.data, run.pod_root, config.seed)
    row = staged.validation.read(0, len(staged.validation)).tolist()
    total = num_tokens = num_bytes = 0
    plan = LoaderPlan(config.batch.seq_len, config.batch.micro_batch, seed=99)
    for batch in validation_batches(staged, plan, 3, pack_documents=True):
        total += float(model.loss(*move(batch, CPU)).sum.detach())
        targets = batch.targets_BT[batch.targets_BT >= 0]
        num_tokens += len(targets)
        num_bytes += int((targets < 256).sum())
    assert 0 < num_tokens < len(row)
    logged = rows(run.validation_csv)[0]
    assert (int(logged["tokens"]), int(logged["bytes"])) == (num_tokens, num_bytes)
    assert float(logged["val_loss"]) == pytest.approx(total / num_tokens, rel=1e-6)
    bits = total / math.log(2) / num_bytes
    assert float(logged["bits_per_byte"]) == pytest.approx(bits, rel=1e-6)
    assert float(logged["ppl"]) == pytest.approx(math.exp(total / num_tokens), rel=1e-5)


class ScriptedSteps:
    """Steps whose results are given; the weights stay as they are."""

    def __init__(self, steps, results):
        self.optimizers, self.scaler = steps.optimizers, None
        self._results = iter(results)

    def run(self, batches, poll, num_valid):
        return next(self._results)


GOOD = StepResult(2.0, 1.0, None)
BAD = StepResult(math.nan, 1.0, "the loss is nan")
OVERFLOW = StepResult(2.0, math.inf, "the gradient norm is inf", is_overflow=True, loss_scale=8.0)
AT_FLOOR = StepResult(2.0, math.inf, "the gradient norm is inf", is_overflow=True, loss_scale=1.0)


def scripted(tmp_path, text, results, save_every=0):
    """A session that will see these results and then its end."""
    return opened(
        new_run(
            tmp_path, text, schedule={"steps": len(results), "warmup_steps": 0},
            batch={"accumulation": 1}, checkpoint={"save_every": save_every},
        )
    )  # fmt: skip


def test_a_skipped_step_counts_as_a_step_and_is_remembered(tmp_path, text):
    with scripted(tmp_path, text, [GOOD, BAD, GOOD]) as session:
        session.learner = Learner(session.model, ScriptedSteps(session.steps, [GOOD, BAD, GOOD]))
        before = weights(session.model)
        train(session)
        assert (session.step, session.num_skipped, session.num_good) == (3, 1, 2)
        assert session.position.unusable_steps == (2,)
        assert session.keeper.last_anomaly_step == 2
        assert session.position.tokens_seen == 3 * TOKENS // 2
        assert same(weights(session.model), before)
        run = session.context.run
    assert [row["step"] for row in rows(run.training_csv)] == ["1", "3"]
    assert rows(run.training_csv)[1]["skipped"] == "1"
    assert "step 2 was skipped: the loss is nan" in events(run, "anomaly")[0].message


def test_the_checkpoint_named_after_bad_steps_is_from_before_them(tmp_path, text):
    """Step 3 is saved after it was skipped: its weights hold whatever led to it."""
    results = [GOOD, GOOD, BAD, BAD]
    with scripted(tmp_path, text, results, save_every=1) as session:
        session.learner = Learner(session.model, ScriptedSteps(session.steps, results))
        with pytest.raises(NonFiniteError, match="the last good checkpoint is step 2"):
            train(session)
        run = session.context.run
    assert run.checkpoint(3).is_dir()
    told = read_records(run.heartbeat(), Heartbeat).records
    assert [beat.step for beat in told if beat.msg == "anomaly"] == [3, 4]


def test_bad_steps_before_any_checkpoint_leave_none_to_name(tmp_path, text):
    with scripted(tmp_path, text, [BAD, BAD], save_every=1) as session:
        session.learner = Learner(session.model, ScriptedSteps(session.steps, [BAD, BAD]))
        with pytest.raises(NonFiniteError, match="there is no checkpoint from before step 1"):
            train(session)


@pytest.mark.parametrize(
    ("results", "ends_after"),
    [
        ([GOOD, BAD, BAD, GOOD], 3),
        ([BAD, GOOD, BAD, GOOD, BAD, GOOD], 5),
        ([BAD, GOOD, BAD, GOOD], None),
        ([OVERFLOW] * 8, None),
        ([AT_FLOOR] * 8, 5),
        ([GOOD] * 20 + [OVERFLOW] * 8, 25),
        ([GOOD] * 19 + [OVERFLOW] * 8, None),
        ([GOOD] * 20 + [OVERFLOW] * 4 + [GOOD] + [OVERFLOW] * 4, None),
    ],
)
def test_too_many_skipped_steps_end_a_run_and_fewer_do_not(tmp_path, text, results, ends_after):
    with scripted(tmp_path, text, results) as session:
        session.learner = Learner(session.model, ScriptedSteps(session.steps, results))
        if ends_after is None:
            assert train(session) is None
            assert session.step == len(results)
            return
        with pytest.raises(NonFiniteError, match=f"up to step {ends_after}"):
            train(session)
        run = session.context.run
    assert run.anomaly.read_text() == "nonfinite\n"
    assert not list(run.checkpoints.glob("step_*"))


def test_flops_of_the_meter_are_those_of_the_model(tmp_path, text):
    with opened(new_run(tmp_path, text)) as session:
        flops = count_flops(session.config.model, session.config.batch.seq_len).train
        session.meter._peak = 1e9
        assert session.meter.mfu(100.0) == pytest.approx(100.0 * flops / 1e9)
