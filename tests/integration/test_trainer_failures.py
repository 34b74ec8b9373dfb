"""Every bad end has its own code, an exit record, one clear line, and no traceback on stderr."""

from pathlib import Path

import pytest

from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.layout import RunDir
from nsa_core.train.memory_report import MemoryReport
from tests.integration import trainer_faults as faults
from tests.integration.trainer_runs import (
    events,
    exit_of,
    finish,
    losses,
    make_run,
    start,
    start_from_shell,
    stderr,
)

pytestmark = pytest.mark.integration


def one_clear_line(run):
    """The single error line; a traceback may stand in training.log only."""
    said = [line for line in stderr(run).splitlines() if line.startswith("error:")]
    assert len(said) == 1, said
    assert "Traceback" not in stderr(run)
    return said[0]


def test_one_step_without_a_usable_loss_is_skipped_and_recorded(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    run = make_run(tmp_path, shards)
    assert start(run, faults.nan_once).wait() == 0
    assert [event.facts["loss"] for event in events(run, "anomaly")] == ["nan"]
    found, sound = losses(run), losses(undisturbed)
    assert found[:4] == sound[:4]
    assert found[4][0] == "6"  # no row for a step that changed nothing
    assert found[-1] != sound[-1]


def test_a_run_of_nan_ends_with_its_own_code_and_does_not_save_suspect_weights(
    tmp_path: Path, shards: Path
) -> None:
    run = make_run(tmp_path, shards)
    assert start(run, faults.nan_from_step_5).wait() == 12
    assert "2 steps in a row" in one_clear_line(run)
    assert "step 4" in exit_of(run).reason
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [4]
    assert run.anomaly.read_text() == "nonfinite\n"
    assert not run.final_model.exists()


def test_out_of_memory_has_its_own_code_and_names_the_way_out(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards)
    assert start(run, faults.out_of_memory_at_step_5).wait() == 13
    assert "2.00 GiB" in one_clear_line(run)
    report = read_model(MemoryReport, run.memory_report(1))
    assert (report.step, report.phase, report.card) == (4, "train", None)
    assert f"hint: {report.advice[0]}; {run.memory_report(1).name}" in stderr(run)


def test_a_bug_leaves_its_traceback_in_the_log_and_one_line_on_stderr(
    tmp_path: Path, shards: Path
) -> None:
    run = make_run(tmp_path, shards)
    assert start(run, faults.bug_at_step_5).wait() == 1
    assert "IndexError" in one_clear_line(run)
    assert "Traceback" in run.log.read_text()
    assert exit_of(run).code == 1


def test_data_that_fails_in_mid_run_ends_after_a_checkpoint(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards)
    assert start(run, faults.data_fails_after_step_5).wait() == 14
    assert "Input/output error" in one_clear_line(run)
    assert exit_of(run).checkpoint_step == 5


def test_a_loader_that_hangs_ends_the_run_after_its_deadline_with_a_checkpoint(
    tmp_path: Path, shards: Path
) -> None:
    run = make_run(tmp_path, shards, data={"loader_timeout_s": 0.5})
    assert start(run, faults.data_hangs_after_step_5).wait() == 14
    assert "0.5 s" in one_clear_line(run)
    assert exit_of(run).checkpoint_step == 5


def test_a_data_path_that_does_not_exist_ends_in_one_clear_line(
    tmp_path: Path, shards: Path
) -> None:
    run = make_run(tmp_path, shards, data={"path": str(tmp_path / "missing.jsonl")})
    assert finish(run) == 14
    assert "missing.jsonl" in one_clear_line(run)


def test_a_card_that_is_not_here_is_a_configuration_error(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards, runtime={"device": "cuda"})
    assert finish(run) == 2
    assert "CUDA" in one_clear_line(run)
    assert exit_of(run).code == 2


def test_a_damaged_manifest_is_a_configuration_error(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards)
    run.manifest.write_text('{"run_id": ')
    assert finish(run) == 2
    assert "manifest.json" in one_clear_line(run)


def test_a_folder_without_a_manifest_is_no_run_directory(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards)
    run.manifest.unlink()
    assert finish(run) == 2
    assert list(run.root.iterdir()) == [run.log]


@pytest.mark.parametrize("arguments", [[], ["--run-dir"], ["--resume-from", "x"], ["--run", "d"]])
def test_a_flag_that_is_not_known_is_an_error(
    arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    from nsa_core.train.__main__ import parse_arguments

    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2


def test_the_shell_sees_the_exit_code(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards, data={"path": str(tmp_path / "missing.jsonl")})
    assert start_from_shell(run) == 14
