"""A staging that drops too much is refused with the file, the reason and the next step."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Never

import pytest

from nsa_core.data import build, staged_before, staging
from nsa_core.data.build import BuildJob, build_folder
from nsa_core.data.reporting import DataError, ignore_progress
from nsa_core.data.shards import ACCOUNT_NAME, JOURNAL_NAME
from nsa_core.data.sources.local import LocalSource
from nsa_core.data.sources.source import SourcePosition
from nsa_core.data.staging import plan_staging, stage
from nsa_core.rundir.data_account import DataAccount
from tests.core.data.conftest import local

TRIALS = Path(__file__).parents[4] / "shared" / "cases" / "trials"


def good(count: int, start: int = 0):
    return "".join(json.dumps({"text": f"text {n} of many"}) + "\n" for n in range(start, count))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """20 documents in one file, one of ten bad in the next, and a file in UTF-16."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.jsonl").write_text(good(20))
    (folder / "b.jsonl").write_text(good(29, 20) + "{torn\n")
    (folder / "c.jsonl").write_bytes(good(40, 30).encode("utf-16"))
    return folder


def test_most_lines_bad_is_refused_with_share_reason_and_first_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text((good(1) + '{"text": 7}\n' * 9) * 20)
    with pytest.raises(DataError) as refused:
        stage(local(path), tmp_path, 0)
    assert "90.00 % of the documents would be dropped, data.max_dropped allows 1.00 %" in str(
        refused.value
    )
    assert "`text` is not a text: 180, first bad.jsonl:2" in refused.value.message
    assert "`--set data.max_dropped=0.91`" in refused.value.hint


def test_a_lost_file_is_refused_by_name_and_both_limits_can_be_raised(
    mixed: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as refused:
        stage(local(mixed), tmp_path, 0)
    assert "1 whole file would be dropped" in refused.value.message
    assert "c.jsonl wholly dropped (UTF-16, not UTF-8: 1)" in refused.value.message
    assert "iconv -f UTF-16 -t UTF-8" in refused.value.hint
    assert (
        "`--set data.max_dropped=0.07` and `--set data.max_dropped_files=1`" in refused.value.hint
    )
    with pytest.raises(DataError, match=r"data\.max_dropped allows"):
        stage(local(mixed, max_dropped_files=1), tmp_path, 0)
    account = stage(local(mixed, max_dropped_files=1, max_dropped=0.07), tmp_path, 0).account
    assert (account.num_documents, account.num_lost) == (29, 2)
    assert account.sentence() == (
        "29 documents; 6.45 % dropped (UTF-16, not UTF-8: 1, first c.jsonl; malformed JSON: 1, "
        "first b.jsonl:10); c.jsonl wholly dropped (UTF-16, not UTF-8: 1); "
        "b.jsonl 10.00 % dropped (malformed JSON: 1)"
    )
    with pytest.raises(DataError, match="1 whole file"):  # the next run has limits of its own
        stage(local(mixed), tmp_path, 0)


def test_a_long_staging_is_refused_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text((good(9) + "bad\n") * 300)
    config = local(path, document_batch=50)
    plan, read = plan_staging(config, 0), []
    job = BuildJob(config, 0, plan, tmp_path / "staged", read.append, shard_tokens=1000)
    with pytest.raises(DataError, match=r"9\.99 % of the documents"):
        build_folder(job)
    assert max(report.num_documents for report in read) < 1500


def test_what_an_older_version_staged_is_judged_by_its_manifest(
    mixed: Path, tmp_path: Path
) -> None:
    (mixed / "c.jsonl").unlink()
    staged = stage(local(mixed, max_dropped=1), tmp_path, 0)
    (staged.folder / ACCOUNT_NAME).unlink()
    with pytest.raises(DataError, match=r"malformed JSON: 1, first b\.jsonl:10"):
        stage(local(mixed), tmp_path, 0)
    again = stage(local(mixed), tmp_path, 0, expected=staged.manifest_sha256)  # its run goes on
    assert again.account.num_lost == 1


def test_a_run_that_continues_is_not_judged_again_though_its_data_has_moved(
    mixed: Path, tmp_path: Path
) -> None:
    """Its tokens are the same; to lower a limit now would only keep it from its end."""
    loose = {"max_dropped": 1, "max_dropped_files": 1}
    sha256 = stage(local(mixed, **loose), tmp_path, 0).manifest_sha256
    moved = shutil.copytree(mixed, tmp_path / "moved")
    assert stage(local(moved), tmp_path, 0, expected=sha256).manifest_sha256 == sha256
    with pytest.raises(DataError, match="1 whole file"):
        stage(local(moved), tmp_path, 0)


def test_empty_lines_and_empty_text_files_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text(good(9).replace("\n", "\n\n"))
    (folder / "b.txt").write_text(" \n")
    account = stage(local(folder), tmp_path, 0).account
    assert (account.num_documents, account.num_lost) == (9, 0)
    assert account.rejected["empty line"].count == 9


def test_an_interrupted_staging_ends_with_the_account_of_a_whole_one(
    mixed: Path, tmp_path: Path
) -> None:
    config = local(mixed, max_dropped=1, max_dropped_files=1, document_batch=2)

    class Killed(BaseException):
        pass

    def kill(progress) -> None:
        if progress.num_documents == 24:
            raise Killed

    def build(name: str, progress):
        job = BuildJob(config, 0, plan_staging(config, 0), tmp_path / name, progress, 100)
        build_folder(job)
        return (tmp_path / name / ACCOUNT_NAME).read_text()

    with pytest.raises(Killed):
        build("killed", kill)
    journal = json.loads((tmp_path / "killed.partial" / JOURNAL_NAME).read_text())
    assert journal["position"]["num_documents"] > 0
    assert build("killed", ignore_progress) == build("whole", ignore_progress)
    assert DataAccount.model_validate_json((tmp_path / "whole" / ACCOUNT_NAME).read_text()).num_lost


def test_clean_data_has_the_manifest_it_always_had(tmp_path: Path) -> None:
    """A run that was begun before finds its place again: neither key nor manifest may move."""
    path = tmp_path / "c.jsonl"
    path.write_text(good(40) + "bad\n\n")
    staged = stage(local(path, max_dropped=1), tmp_path, 0)
    assert staged.folder.name == "fineweb_edu_local-byte-62664fe8638aa3b5"
    assert staged.manifest_sha256 == (
        "9e811f716a05df3db97addd4ecd338eb51ec12f85902d5acabaaecabd25d8da0"
    )


def aged(folder) -> None:
    """All files were written a minute ago, so that what is known of them is believed."""
    then_ns = time.time_ns() - 60 * 10**9
    for path in (one for one in folder.rglob("*") if one.is_file()):
        os.utime(path, ns=(then_ns, then_ns))


@pytest.fixture
def begun(tmp_path: Path):
    """A folder of data, its configuration, and what a run was begun with."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.jsonl").write_text(good(9).replace("many", name))
    config = local(folder)
    staged = stage(config, tmp_path, 0)
    aged(tmp_path)
    stage(config, tmp_path, 0)
    return folder, config, staged


def test_a_start_reads_neither_data_nor_shards_that_it_knows(
    begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config, staged = begun

    def refuse(path, *_) -> Never:
        raise AssertionError(path)

    monkeypatch.setattr("nsa_core.data.file_hashes.hash_watched", refuse)
    assert stage(config, tmp_path, 0).manifest_sha256 == staged.manifest_sha256
    monkeypatch.setattr(staged_before, "MAX_FILES_LOOKED_AT", 2)
    monkeypatch.setattr(staging, "make_source", refuse)  # a resume does not even list the files
    monkeypatch.setattr(staged_before, "make_source", refuse)
    assert stage(config, tmp_path, 0, expected=staged.manifest_sha256).notes == ()
    monkeypatch.undo()
    damaged = next(staged.folder.glob("train*.tokens.npy"))
    before = damaged.stat()
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    os.utime(damaged, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk that lies
    stage(config, tmp_path, 0)
    with pytest.raises(DataError, match="has SHA-256"):
        stage(config, tmp_path, 0, is_rehashed=True)


def test_a_run_continues_with_its_shards_and_reports_how_the_data_changed(
    begun, tmp_path: Path
) -> None:
    folder, config, staged = begun
    (folder / "a.jsonl").write_text(good(9).replace("many", "x"))
    (folder / "b.jsonl").unlink()
    (folder / "d.jsonl").write_text("more")
    again = stage(config, tmp_path, 0, expected=staged.manifest_sha256)
    assert again.manifest_sha256 == staged.manifest_sha256
    (note,) = again.notes
    assert "b.jsonl is gone; d.jsonl is new" in note
    assert "a.jsonl has changed (" in note
    shutil.rmtree(folder)
    (note,) = stage(config, tmp_path, 0, expected=staged.manifest_sha256).notes
    assert f"data.path {folder} does not exist" in note


def test_other_data_or_settings_are_not_passed_over_for_the_old_shards(
    begun, tmp_path: Path
) -> None:
    folder, config, staged = begun
    sha256 = staged.manifest_sha256
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    moved = config.model_copy(update={"path": str(other)})
    assert stage(moved, tmp_path, 0, expected=sha256).manifest_sha256 == sha256
    (other / "a.jsonl").write_text(good(12))
    assert stage(moved, tmp_path, 0, expected=sha256).notes  # that place is known now, too
    third = config.model_copy(update={"path": str(other / "a.jsonl")})
    assert stage(third, tmp_path, 0, expected=sha256).manifest_sha256 != sha256
    halved = config.model_copy(update={"validation_fraction": 0.5})
    assert stage(halved, tmp_path, 0, expected=sha256).manifest_sha256 != sha256
    missing = config.model_copy(update={"path": str(tmp_path / "nowhere")})
    with pytest.raises(DataError, match="does not exist"):
        stage(missing, tmp_path, 0, expected=sha256)


@pytest.fixture
def trials():
    if not TRIALS.is_dir():
        pytest.skip("the shared cases are not beside this checkout")
    return TRIALS


def trial(trials, name):
    (path,) = trials.glob(f"{name}_*")
    source = LocalSource(path, "text")
    return list(source.documents(SourcePosition())), source.tallies.account()


def test_trials_of_packing_and_encoding(trials, tmp_path: Path) -> None:
    for name in ("d01", "d03"):
        documents, account = trial(trials, name)
        assert (len(documents), account.num_lost) == (5, 0)
        assert bool(account.repaired) == (name == "d01")
    (path,) = trials.glob("d02_*")
    with pytest.raises(DataError, match=r"UTF-16.*iconv -f UTF-16 -t UTF-8"):
        stage(local(path), tmp_path, 0)
    (path,) = trials.glob("d06_*")
    with pytest.raises(DataError, match=r"`prompt`, `response`.*data\.text_key"):
        stage(local(path), tmp_path, 0)


def test_trials_of_bad_bytes_and_values(trials) -> None:
    documents, account = trial(trials, "d04")
    (repaired,) = account.repaired.values()
    assert repaired.count == 1
    assert "(byte " in repaired.first[0]
    assert sum(len(one.text) for one in documents) > 231_000
    documents, account = trial(trials, "d05")
    assert len(documents) in (2, 3)
    assert all(one.first for one in account.rejected.values())
    (path,) = trials.glob("d05_*")
    lines = path.read_bytes().removesuffix(b"\n").count(b"\n") + 1
    assert len(documents) + sum(one.count for one in account.rejected.values()) == lines


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_a_source_without_a_document_reports_progress_and_is_refused_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    """A stop is noticed, the heartbeat moves, and the wrong key does not cost hours."""
    monkeypatch.setattr(build, "JUDGED_EVERY", 2000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "text"}\n' * 6000)
    told = []
    with pytest.raises(DataError, match="its records have `body`") as raised:
        stage(local(path, tokenizer=tokenizer), tmp_path / "root", 0, told.append)
    assert "no key `text`: 2,000" in str(raised.value)
    first = "tokenise" if tokenizer == "byte" else "tokenizer"
    assert sum(report.doing == first for report in told) >= 2


def test_text_that_begins_like_a_packing_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"BZh{n} is no packing by itself.\n\n" * 9 for n in range(99)))
    assert stage(local(path), tmp_path / "root", 0).account.num_whole_files == 0


def test_a_folder_that_holds_the_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(good(20))
    config = local(tmp_path)
    with pytest.raises(DataError, match="would be read as text"):
        stage(config, tmp_path, 0)
    assert stage(local(tmp_path / "a.jsonl"), tmp_path, 0)
