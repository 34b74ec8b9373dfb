"""The loop of the trainer on a tiny run, in this process: what it logs is what was asked for."""

from types import SimpleNamespace

import pytest

from nsa_core.data.reporting import DataError
from nsa_core.env import RankEnvironment
from nsa_core.rundir.manifest import read_manifest
from nsa_core.train import checkpoint_files, learner, loop
from nsa_core.train.group import RankGroup
from nsa_core.train.optimizer import learning_rate_scale
from nsa_core.train.stop import SignalWatch, StopRequest
from nsa_core.train.telemetry import AttemptContext, Telemetry
from nsa_core.train.training_run import acknowledge
from tests.core.train.sessions import run_here
from tests.core.train.test_checkpoint import ORIGIN, snapshot
from tests.integration.trainer_runs import events, make_run, rows

STEPS = 6
SCHEDULE = {"steps": STEPS, "warmup_steps": 2, "min_ratio": 0.1}


@pytest.fixture
def tiny(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    return make_run(
        tmp_path,
        cache,
        batch={"accumulation": 2},
        schedule=SCHEDULE,
        optimizer={"learning_rate": 1e-3},
        checkpoint={"save_every": 3},
        evaluation={"eval_every": 0, "sample_tokens": 1},
    )


def test_the_logged_rate_is_that_of_the_optimizer_step_and_not_of_the_micro_step(tiny):
    assert run_here(tiny).code == 0
    schedule = read_manifest(tiny).config.schedule
    logged = [float(row["lr"]) for row in rows(tiny.training_csv)]
    expected = [1e-3 * learning_rate_scale(step, schedule) for step in range(STEPS)]
    assert logged == pytest.approx(expected, rel=1e-6)
    assert logged[-1] == pytest.approx(0.1 * 1e-3, rel=1e-6)


def test_a_compiled_run_records_its_gates_once_before_it_is_timed(tmp_path, monkeypatch):
    """A step that records is compiled apart; that must not happen in a step that is logged."""
    cache = tmp_path / "cache"
    cache.mkdir()
    run = make_run(
        tmp_path,
        cache,
        schedule={"steps": 8, "warmup_steps": 2},
        telemetry={"log_every": 6, "gate_every": 6},
        evaluation={"eval_every": 0, "sample_tokens": 0},
        runtime={"compile": True},
    )
    monkeypatch.setattr(learner, "compile_blocks", lambda model, **_: None)
    wanted, records_gates, limits = [], loop._records_gates, []
    monkeypatch.setattr(
        RankGroup, "tighten", lambda group, limit_s: limits.append((len(wanted), limit_s))
    )

    def noted(session):
        wanted.append(records_gates(session))
        return wanted[-1]

    monkeypatch.setattr(loop, "_records_gates", noted)
    assert run_here(run).code == 0
    assert [step for step, is_wanted in enumerate(wanted, start=1) if is_wanted] == [3, 6]
    config = read_manifest(run).config
    waits_s = (config.runtime.collective_timeout_s, config.data.loader_timeout_s + 30)
    assert limits == [(3, max(waits_s))], "ranks may compile until then"


@pytest.mark.parametrize(
    ("size", "has_agreed", "saves"), [(1, False, 1), (2, True, 1), (2, False, 0)]
)
def test_a_rank_that_alone_lost_its_data_begins_no_save_that_others_do_not_join(
    monkeypatch, size, has_agreed, saves
):
    """As where one rank cannot read a validation batch: the others are at another collective."""

    def fail(session):
        message = "reading the staged data failed"
        raise DataError(message, "look at the disk")

    saved = []
    monkeypatch.setattr(loop, "_run_steps", fail)
    session = SimpleNamespace(
        context=SimpleNamespace(group=SimpleNamespace(size=size, has_agreed=has_agreed)),
        keeper=SimpleNamespace(save=lambda *inputs, wait: saved.append(wait)),
        snapshot=None,
        step=3,
    )
    with pytest.raises(DataError):
        loop.train(session)
    assert len(saved) == saves


@pytest.mark.parametrize(
    ("rank", "says"), [(0, "stopped at step 4, checkpoint of step 3"), (1, "stopped at step 4")]
)
def test_only_the_rank_that_waits_for_the_save_says_what_is_saved(run, manifest, rank, says):
    """Seen before: rank 1 was gone before rank 0 had written step 4, and recorded step 3."""
    checkpoint_files.write_checkpoint(run, snapshot(3), ORIGIN)
    place = RankEnvironment(rank=rank, local_rank=0, world_size=2, local_size=1)
    telemetry = Telemetry(run, manifest, place)
    telemetry.beats.advance(step=4)
    context = AttemptContext(
        run, manifest, RankGroup(place), telemetry, SignalWatch(lambda why: None)
    )
    ended = acknowledge(context, StopRequest("received SIGTERM"))
    telemetry.close()
    assert ended.reason == f"received SIGTERM, {says}"
    assert events(run, "signal")[0].message == ended.reason
