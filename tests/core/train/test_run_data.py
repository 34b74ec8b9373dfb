"""A run says what was dropped of its data, names what changed, and keeps its tokenizer."""

import json
import shutil
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.data.batch import LoaderState
from nsa_core.data.prefetch import LoaderStalled
from nsa_core.data.reporting import DataError
from nsa_core.data.shards import read_manifest as read_staged
from nsa_core.data.tokenizer import load_tokenizer
from nsa_core.env import RankEnvironment
from nsa_core.evaluate.run_model import WeightsFile, find_tokenizer
from nsa_core.rundir.checkpoint import CheckpointManifest
from nsa_core.rundir.data_account import read_account
from nsa_core.rundir.events import read_events
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from nsa_core.train import loop, run_data
from nsa_core.train.checkpoint_files import TrainingState
from nsa_core.train.group import RankGroup
from nsa_core.train.resume_point import ResumePoint
from nsa_core.train.run_data import open_data
from nsa_core.train.stop import StopWatch
from tests.core.train.sessions import attempt, new_run, write_texts
from tests.core.train.thread_ranks import ThreadRank, run_both


def opened(run, point=None):
    with attempt(run) as context:
        stop = StopWatch(run, context.manifest, context.signals, report_stale=lambda what: None)
        return open_data(context, stop, point)


def point_of(run, staged):
    """A checkpoint of the run on these tokens, as far as its data looks at it."""
    state = LoaderState(
        epoch=0, global_sample=4, manifest_sha256=staged.manifest_sha256, seq_len=48, seed=3
    )
    manifest = CheckpointManifest(
        run_id=run.run_id, attempt=1, step=1, tokens_seen=1, created_unix_s=1.0,
        config_sha256="0" * 64, tokenizer_fingerprint="", files=[],
    )  # fmt: skip
    return ResumePoint(
        path=run.checkpoint(1),
        manifest=manifest,
        state=TrainingState(step=1, tokens_seen=1, loader=state.model_dump()),
        config=RunConfig(),
        is_own=True,
    )


def data_events(run):
    return [event for event in read_events(run) if event.kind.startswith("data_")]


def test_what_was_dropped_is_an_event_once_and_a_file_of_the_run(tmp_path):
    text = tmp_path / "text.jsonl"
    write_texts(text)
    text.write_text(text.read_text() + "torn\n")
    run = new_run(tmp_path, text)
    opened(run)
    (event,) = data_events(run)
    assert event.kind == "data_dropped"
    assert "0.83 % dropped (malformed JSON: 1, first text.jsonl:121)" in event.message
    assert read_account(run.data_account).num_lost == event.facts["num_lost"] == 1
    opened(run)
    assert len(data_events(run)) == 1


def test_a_changed_data_set_is_named_by_its_file_and_its_own_shards_serve_a_resume(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    write_texts(folder / "a.jsonl")
    write_texts(folder / "b.jsonl")
    run = new_run(tmp_path, folder)
    staged = opened(run)
    (folder / "b.jsonl").write_text(json.dumps({"text": "other"}) + "\n")
    assert opened(run, point_of(run, staged)).manifest_sha256 == staged.manifest_sha256
    assert "b.jsonl has changed (" in data_events(run)[-1].message
    shutil.rmtree(staged.folder)
    with pytest.raises(DataError) as refused:
        opened(run, point_of(run, staged))
    assert "the data has changed since the checkpoint: b.jsonl has changed (" in str(refused.value)
    assert staged.manifest_sha256[:12] not in str(refused.value)
    shutil.rmtree(run.data)
    with pytest.raises(DataError, match="not what the checkpoint was trained on"):
        opened(run, point_of(run, staged))


def test_a_run_directory_holds_its_trained_tokenizer(tmp_path):
    """A backup is of the run directory alone."""
    text = tmp_path / "text.jsonl"
    write_texts(text)
    data = {"tokenizer": "bpe", "bpe_vocab_size": 300}
    run = new_run(tmp_path, text, model={"vocab_size": 300}, data=data)
    staged = opened(run)
    shutil.rmtree(staged.folder)
    fingerprint = staged.tokenizer.fingerprint
    record = read_staged(run.data)[0].tokenizer
    assert load_tokenizer(record.name, run.data).fingerprint == fingerprint
    weights = WeightsFile(run.final_model, read_manifest(run).config, None, fingerprint)
    backup = RunDir(tmp_path / "backup" / run.run_id)
    shutil.copytree(run.root, backup.root)
    assert find_tokenizer(backup, weights).fingerprint == fingerprint


class SlowLoader:
    """Each batch takes a while, less than its deadline."""

    def next_batch(self, poll):
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            poll()
            time.sleep(0.02)
        return "batch"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_batches_of_a_step_have_one_deadline_where_other_ranks_wait_for_them(num_ranks):
    config = RunConfig.model_validate(
        {"batch": {"accumulation": 4 * num_ranks}, "data": {"loader_timeout_s": 0.3}}
    )
    group = RankGroup(RankEnvironment(world_size=num_ranks))
    here = SimpleNamespace(
        config=config,
        context=SimpleNamespace(
            group=group, beats=SimpleNamespace(within=lambda *_: nullcontext())
        ),
        clock=SimpleNamespace(within=lambda _: nullcontext()),
        stop=SimpleNamespace(check_alone=lambda: None),
        loader=SlowLoader(),
    )
    batches, fault = loop._fetch(here)
    if num_ranks == 1:
        assert (len(batches), fault) == (4, None)
    else:
        assert isinstance(fault, LoaderStalled)
        assert "the 4 batches of a step were not read within 0.3 s" in fault.message


def test_ranks_wait_for_one_that_stages_longer_than_a_collective(tmp_path, text, monkeypatch):
    """Each pod stages its own data, one of them perhaps for hours."""

    def stage_slowly(config, root, seed, progress, expected):
        staged = stage(config, root, seed, expected=expected)
        end = time.monotonic() + 2 * ThreadRank.timeout_s * ranks[threading.get_ident()]
        while time.monotonic() < end:
            progress(run_data.StageProgress("tokens"))
            time.sleep(0.02)
        return staged

    def act(group):
        ranks[threading.get_ident()] = group.place.rank
        with attempt(run) as context:
            here = replace(context, group=group)
            stop = StopWatch(run, context.manifest, context.signals, pytest.fail, group)
            return open_data(here, stop, None).manifest_sha256

    ranks, stage = {}, run_data.stage
    run = new_run(tmp_path, text)
    monkeypatch.setattr(run_data, "stage", stage_slowly)
    monkeypatch.setattr(run_data, "_MEET_EVERY_S", 0.1, raising=False)
    first, second = run_both(lambda group: (act(group), group.add_up([1])))
    assert first == second
    assert first[1] == [2]
