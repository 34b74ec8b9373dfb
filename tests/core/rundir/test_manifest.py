import pytest

from nsa_core.config.recipe import resolve
from nsa_core.rundir.exit import ExitRecord, read_exit, write_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import (
    ManifestError,
    RunManifest,
    begin_next_attempt,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def run(tmp_path):
    resolved = resolve("tiny-cpu", "cpu")
    run = RunDir(tmp_path / "run-a")
    run.root.mkdir()
    write_manifest(
        run,
        RunManifest(
            run_id="run-a",
            config=resolved.config,
            origins=resolved.origins,
            config_sha256=resolved.sha256,
            created_unix_s=1.0,
        ),
    )
    return run


def end(run, attempt=1, code=10):
    record = ExitRecord(
        run_id="run-a",
        attempt=attempt,
        code=code,
        reason="halted",
        step=5,
        checkpoint_step=5,
        at=2.0,
        by="trainer",
    )
    write_exit(run, record)


def test_the_next_attempt_keeps_the_record_of_the_last_and_changes_only_what_it_says(run):
    first = read_manifest(run)
    end(run)
    second = begin_next_attempt(run, at_unix_s=3.0, wanted=first)
    assert second.attempt == 2
    own = {"attempt": 1, "attempt_id": "", "created_unix_s": 1.0}
    assert second.model_copy(update=own) == first
    assert read_manifest(run) == second
    assert read_exit(run) is None
    assert (run.attempt(1) / "manifest.json").exists()
    assert (run.attempt(1) / "exit.json").exists()


def test_a_kill_before_the_new_manifest_is_written_can_be_repeated(run):
    end(run)
    before = run.manifest.read_bytes()
    begin_next_attempt(run, at_unix_s=3.0)
    run.manifest.write_bytes(before)
    assert begin_next_attempt(run, at_unix_s=4.0).attempt == 2
    assert (run.attempt(1) / "exit.json").exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"run_id": "x"}'])
def test_a_damaged_manifest_is_one_line_that_names_the_file(run, content):
    run.manifest.write_bytes(content)
    with pytest.raises(ManifestError, match=r"^[^\n]*manifest\.json[^\n]*$"):
        read_manifest(run)


def test_a_folder_without_a_manifest_is_not_a_run(tmp_path):
    with pytest.raises(ManifestError, match="not a run directory"):
        read_manifest(RunDir(tmp_path))


def test_unknown_fields_of_a_newer_manifest_survive_a_round_trip(run):
    text = run.manifest.read_text().replace('"attempt"', '"from_the_future": 7, "attempt"', 1)
    run.manifest.write_text(text)
    write_manifest(run, read_manifest(run))
    assert '"from_the_future": 7' in run.manifest.read_text()
