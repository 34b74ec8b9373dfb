"""A hub that fails for a while is waited out, and nothing is lost or repeated (bug case B27)."""

import threading
from pathlib import Path
from typing import Never

import datasets
import pytest

from nsa_core.data.build import BuildJob, build_folder
from nsa_core.data.reporting import DataError, ignore_progress
from nsa_core.data.shards import StagingPlan
from nsa_core.data.sources import make
from nsa_core.data.sources.hub import RETRY_WAITS_S, HubSource
from nsa_core.data.sources.source import SourcePosition
from nsa_core.data.staging import open_staged
from nsa_core.rundir.checkpoint import hash_file
from tests.core.data.conftest import local

RECORDS = [{"text": f"record {n}"} for n in range(20)]


class FakeStream:
    """A stream over records; `failures` holds an exception for the places where it breaks once."""

    def __init__(self, records, failures) -> None:
        self.records, self.failures, self.place = records, failures, 0

    def __iter__(self):
        while True:
            if self.failures.get(self.place):
                raise self.failures[self.place].pop()
            if self.place == len(self.records):
                return
            self.place += 1
            yield self.records[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state_dict) -> None:
        self.place = state_dict["place"]


def source(failures=None, records=RECORDS, stall_s: float = 60.0):
    slept_s = []
    failures = failures or {}

    def open_stream(dataset, subset) -> FakeStream:
        return FakeStream(records, failures)

    made = HubSource("org/set", "sample", "text", open_stream, slept_s.append, stall_s)
    return made, slept_s


def texts(documents):
    return [document.text for document in documents]


def test_a_gateway_that_times_out_for_90_s_is_waited_out_and_nothing_is_lost() -> None:
    errors = [FileNotFoundError("504 Gateway Time-out") for _ in range(7)]
    made, slept_s = source({7: errors})
    reports = []
    found = texts(made.documents(SourcePosition(), reports.append))
    assert found == [record["text"] for record in RECORDS]
    assert sum(slept_s) >= 90
    stalls = [report.detail for report in reports if report.doing == "wait"]
    assert "data stalled, try 2 in 1 s; FileNotFoundError: 504" in stalls[0]


def test_the_budget_of_tries_begins_again_after_a_record() -> None:
    failures = {n: [TimeoutError("slow")] * 5 for n in range(1, 20)}
    made, _ = source(failures)
    assert len(texts(made.documents(SourcePosition()))) == 20


def test_a_hub_that_stays_away_is_a_clean_stop_with_the_position() -> None:
    made, slept_s = source({7: [ConnectionError("no route")] * 99})
    with pytest.raises(DataError, match=r"org/set did not answer in 11 tries .* after record 7"):
        texts(made.documents(SourcePosition()))
    assert len(slept_s) == sum(RETRY_WAITS_S)


def test_a_data_set_that_does_not_exist_is_not_asked_for_again() -> None:
    error = datasets.exceptions.DatasetNotFoundError("Dataset 'org/set' doesn't exist")
    made, slept_s = source({0: [error]})
    with pytest.raises(DataError, match=r"doesn't exist.*correct data\.path"):
        texts(made.documents(SourcePosition()))
    assert not slept_s


def test_a_hub_that_never_answered_is_given_up_early() -> None:
    made, slept_s = source({0: [ConnectionError("no route")] * 99})
    with pytest.raises(DataError, match="in 4 tries over 7 s, after record 0"):
        texts(made.documents(SourcePosition()))
    assert len(slept_s) == 7


def test_a_wait_can_be_stopped_through_progress() -> None:
    made, slept_s = source({7: [ConnectionError("no route")] * 99})

    def stop(progress) -> None:
        if progress.doing == "wait":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        texts(made.documents(SourcePosition(), stop))
    assert not slept_s


class SilentOnce(list):
    """Failures of which the first is a read that never answers."""

    def pop(self):
        found = super().pop()
        if isinstance(found, threading.Event):
            found.wait()
            found = ConnectionError("too late")
        return found


def test_a_read_without_an_answer_is_given_up_and_tried_again() -> None:
    release = threading.Event()
    made, _ = source({7: SilentOnce([ConnectionError("then this"), release])}, stall_s=0.2)
    reports = []
    found = texts(made.documents(SourcePosition(), reports.append))
    release.set()
    assert found == [record["text"] for record in RECORDS]
    assert any("nothing was read for 0.2 s" in report.detail for report in reports)


def test_a_subset_that_does_not_exist_is_a_stop() -> None:
    def open_stream(dataset, subset) -> Never:
        message = f"BuilderConfig {subset!r} not found. Available: ['default']"
        raise ValueError(message)

    made = HubSource("org/set", "nope", "text", open_stream, pytest.fail)
    with pytest.raises(DataError, match=r"'nope' not found.*correct data.path or data.subset"):
        texts(made.documents(SourcePosition()))


def test_a_resume_continues_at_the_next_record_and_keeps_the_counts() -> None:
    records = [{"text": ""}, *RECORDS]
    first, _ = source(records=records)
    documents = first.documents(SourcePosition())
    assert next(documents).text == "record 0"
    position = SourcePosition(
        num_documents=1,
        rejected=first.tallies.rejected.freeze(),
        remote=first.remote_place(),
    )
    second, _ = source(records=records)
    saved = SourcePosition.model_validate_json(position.model_dump_json())
    found = list(second.documents(saved))
    assert found[0].text == "record 1"
    assert found[0].origin.line == 3
    assert second.tallies.rejected.counts == {"empty text": 1}


def test_records_without_the_column_name_the_columns_and_nulls_are_counted() -> None:
    made, _ = source(records=[{"text": None}, {"content": "x", "id": 1}])
    with pytest.raises(DataError, match=r"no column `text`; its columns are `content`, `id`"):
        texts(made.documents(SourcePosition()))
    assert made.tallies.rejected.counts == {"`text` is null or not a text": 1}


def test_a_real_datasets_stream_resumes_at_the_next_record(corpus: Path, tmp_path: Path) -> None:
    def open_stream(dataset, subset):
        return datasets.load_dataset(
            "json", data_files=str(corpus), split="train", streaming=True, cache_dir=str(tmp_path)
        )

    whole = texts(HubSource("d", "s", "text", open_stream).documents(SourcePosition()))
    first = HubSource("d", "s", "text", open_stream)
    documents = first.documents(SourcePosition())
    found = [next(documents).text for _ in range(13)]
    saved = SourcePosition(num_documents=13, remote=first.remote_place()).model_dump_json()
    second = HubSource("d", "s", "text", open_stream)
    found += texts(second.documents(SourcePosition.model_validate_json(saved)))
    assert found == whole
    assert len(whole) == 40


def test_a_staging_that_the_hub_interrupted_continues_at_its_last_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"text": f"record {n} " + "word " * 30} for n in range(60)]
    failures = {45: [ConnectionError("no route")] * (len(RETRY_WAITS_S) + 1)}
    opened = []

    def make_source(config, seed):
        made, _ = source(failures, records)
        opened.append(made)
        return made

    monkeypatch.setattr("nsa_core.data.build.make_source", make_source)
    config = local(tmp_path).model_copy(update={"source": "fineweb_edu", "document_batch": 5})
    plan = StagingPlan(
        source=source()[0].record(hash_file),
        tokenizer="byte",
        max_tokens=0,
        validation_fraction=0.2,
        read_ahead=0,
    )
    job = BuildJob(config, 0, plan, tmp_path / "staged", ignore_progress, shard_tokens=1000)
    with pytest.raises(DataError, match="after record 45"):
        build_folder(job)
    build_folder(job)
    staged = open_staged(tmp_path / "staged")
    row = [*staged.train.read(0, 10**6), *staged.validation.read(0, 10**6)]
    decoded = staged.tokenizer.decode(row)
    assert all(decoded.count(f"record {n} ") == 1 for n in range(60))
    assert opened[-1].remote_place().num_records == 60


def test_the_configured_source_is_made(corpus: Path, tmp_path: Path) -> None:
    assert isinstance(make.make_source(local(corpus, text_key="body"), 0), make.LocalSource)
    hub = local(corpus).model_copy(update={"source": "fineweb_edu", "path": ""})
    settings = make.make_source(hub, 0).record(hash_file).settings
    assert settings["dataset"] == "HuggingFaceFW/fineweb-edu"
