"""A checkpoint of another run, or of another lineage of this run, is passed over loudly."""

import json

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.model.weights import model_tensors
from nsa_core.rundir import events
from nsa_core.rundir.exit import ExitRecord, write_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import Parent, read_manifest, write_manifest
from nsa_core.train import checkpoint_files as content
from nsa_core.train.failure import CheckpointError
from nsa_core.train.random_state import read_random_state
from nsa_core.train.resume import find_point, find_resume_point
from tests.core.train.models import CPU, make_model
from tests.core.train.sessions import attempt
from tests.integration.trainer_runs import next_attempt

OWN, OTHER = "a" * 32, "b" * 32


def write(run, step, run_id="r1", attempt=1, attempt_id=OWN):
    snapshot = content.TrainingSnapshot(
        state=content.TrainingState(step=step, tokens_seen=step, loader={}),
        config=RunConfig(),
        model=content.to_host(model_tensors(make_model())),
        optimizer={},
        random={0: read_random_state(CPU)},
    )
    origin = content.CheckpointOrigin(run_id, attempt, "c0ffee", "tokens", attempt_id)
    return content.write_checkpoint(run, snapshot, origin)


@pytest.fixture
def own(run, manifest):
    """Attempt 1 of `r1`, which has an identity."""
    write_manifest(run, manifest.model_copy(update={"attempt_id": OWN}))
    return read_manifest(run)


def search(run, manifest):
    rejected = []
    point = find_resume_point(run, manifest, lambda folder, why: rejected.append(why))
    return (point.state.step if point else None), rejected


def test_a_checkpoint_names_the_attempt_that_wrote_it(run, own):
    assert write(run, 5).manifest.attempt_id == OWN
    assert json.loads((run.checkpoint(5) / "checkpoint.json").read_bytes())["attempt_id"] == OWN


@pytest.mark.parametrize(
    ("foreign", "why"),
    [
        ({"run_id": "r2"}, "it was written by run r2, not by r1"),
        ({"attempt": 2}, "it was written by attempt 2, and r1 is at 1"),
        ({"attempt_id": OTHER}, "it is of another lineage of r1"),
        ({"attempt_id": ""}, "it is of another lineage of r1"),
    ],
)
def test_auto_resume_skips_a_foreign_checkpoint_and_reports_it(run, own, foreign, why):
    write(run, 5)
    write(run, 10, **foreign)
    step, rejected = search(run, own)
    assert step == 5
    assert [one.startswith(why) for one in rejected] == [True]


def test_where_every_checkpoint_is_foreign_the_trainer_does_not_begin_from_nothing(run, own):
    write(run, 5, attempt_id=OTHER)
    write(run, 10, run_id="r2")
    with pytest.raises(CheckpointError, match=r"of another run, newest step_000010: .* run r2"):
        search(run, own)


def test_a_named_foreign_checkpoint_is_refused_with_15(run, own):
    path = write(run, 10, attempt_id=OTHER).path
    named = next_attempt(run, resume=str(path))
    with pytest.raises(CheckpointError, match="another lineage of r1") as refused:
        search(run, named)
    assert int(refused.value.code) == 15


def test_its_own_checkpoint_stays_its_own_whichever_path_names_it(run, own, tmp_path):
    """Of one that is not its own, neither the data nor the step have to be the run's."""
    write(run, 10)
    (tmp_path / "link").symlink_to(run.root)
    named = next_attempt(run, resume=str(tmp_path / "link" / "checkpoints" / "step_000010"))
    point = find_resume_point(run, named, lambda folder, why: pytest.fail(why))
    assert point.is_own


def test_a_checkpoint_of_an_older_version_is_accepted_where_nothing_contradicts(run, manifest):
    write_manifest(run, manifest.model_copy(update={"attempt_id": ""}))
    write(run, 5, attempt_id="")
    assert search(run, read_manifest(run)) == (5, [])
    assert search(run, next_attempt(run)) == (5, [])


def test_the_next_attempt_continues_from_a_checkpoint_of_the_one_before(run, own):
    write(run, 5)
    second = next_attempt(run)
    assert search(run, second) == (5, [])
    write(run, 10, attempt=2, attempt_id=second.attempt_id)
    third = next_attempt(run)
    assert search(run, third) == (10, [])


def test_a_checkpoint_of_another_model_is_refused_though_its_weights_would_fit(run, own):
    write(run, 5)
    other = RunConfig.model_validate({"model": {"nsa": {"window": 256}}})
    write_manifest(run, own.model_copy(update={"config": RunConfig()}))
    with attempt(run) as context:
        assert find_point(context).state.step == 5
    write_manifest(run, own.model_copy(update={"config": other}))
    with attempt(run) as context, pytest.raises(CheckpointError, match="another model") as refused:
        find_point(context)
    assert "model.nsa.window 512 -> 256" in str(refused.value)


@pytest.fixture
def parent(tmp_path, manifest):
    """Another run, `r0`, with a checkpoint of step 20."""
    run = RunDir(tmp_path / "runs" / "r0")
    run.root.mkdir(parents=True)
    write_manifest(run, manifest.model_copy(update={"run_id": "r0", "attempt_id": OTHER}))
    write(run, 20, run_id="r0", attempt_id=OTHER)
    return run


@pytest.mark.parametrize(
    ("parent_of", "is_own"),
    [
        (Parent(run_id="r0", step=20, attempt_id=OTHER), True),
        (Parent(run_id="r0", step=20), True),
        (Parent(run_id="r0", step=15), False),
        (Parent(run_id="r0", step=20, attempt_id=OWN), False),
        (Parent(run_id="r9", step=20), False),
    ],
)
def test_a_new_run_begins_only_from_the_parent_that_its_manifest_names(
    run, own, parent, parent_of, is_own
):
    changes = {"resume": str(parent.checkpoint(20)), "parent": parent_of}
    manifest = own.model_copy(update=changes)
    if is_own:
        assert search(run, manifest) == (20, [])
    else:
        with pytest.raises(CheckpointError, match="r0"):
            search(run, manifest)


def test_without_a_parent_the_directory_that_holds_the_checkpoint_vouches_for_it(run, own, parent):
    path = parent.checkpoint(20)
    manifest = own.model_copy(update={"resume": str(path)})
    assert search(run, manifest) == (20, [])
    write_manifest(parent, read_manifest(parent).model_copy(update={"run_id": "r7"}))
    with pytest.raises(CheckpointError, match="written by run r0, not by r7"):
        search(run, manifest)
    parent.manifest.unlink()
    with pytest.raises(CheckpointError, match="written by run r0, not by r1"):
        search(run, manifest)


def test_a_copy_of_the_parents_checkpoint_in_the_runs_own_folder_is_foreign(run, own, parent):
    write(run, 20, run_id="r0", attempt_id=OTHER)
    manifest = own.model_copy(update={"parent": Parent(run_id="r0", step=20)})
    with pytest.raises(CheckpointError, match="written by run r0, not by r1"):
        search(run, manifest)


def note_saved(run, attempt, step):
    events.record(run, kind="saved", by="trainer", attempt=attempt, facts={"step": step})


def note_exit(run, checkpoint_step):
    record = ExitRecord(
        run_id="r1", attempt=1, code=75, reason="stopped", step=76, at=1.0, by="trainer",
        checkpoint_step=checkpoint_step,
    )  # fmt: skip
    write_exit(run, record)


@pytest.mark.parametrize("evidence", ["events", "exit"])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_by_itself(run, own, evidence):
    note_exit(run, 75 if evidence == "exit" else None)
    if evidence == "events":
        note_saved(run, 1, 75)
    second = next_attempt(run)
    with pytest.raises(CheckpointError, match="has saved a checkpoint of step 75") as refused:
        search(run, second)
    assert refused.value.code == 15
    assert "--afresh" in refused.value.hint
    afresh = next_attempt(run, resume="afresh")
    assert search(run, afresh) == (None, [])
    restarted = next_attempt(run, resume="auto")
    assert search(run, restarted) == (None, [])  # it began afresh and has saved nothing yet
    note_saved(run, 4, 5)
    with pytest.raises(CheckpointError, match="step 5"):
        search(run, next_attempt(run))


def test_a_run_that_never_saved_begins_again_at_the_first_step(run, own):
    note_exit(run, None)
    assert search(run, next_attempt(run)) == (None, [])


def test_a_run_that_lost_its_checkpoints_does_not_fall_back_to_its_parent(run, own, tmp_path):
    (tmp_path / "p").mkdir()
    parent = write(RunDir(tmp_path / "p"), 5, run_id="p").path
    first = own.model_copy(update={"resume": str(parent), "parent": Parent(run_id="p", step=5)})
    write_manifest(run, first)
    assert search(run, first)[0] == 5
    note_saved(run, 1, 75)
    with pytest.raises(CheckpointError, match="step 75"):
        search(run, next_attempt(run))


def damage_by_folder(folder):
    (folder / "checkpoint.json").unlink()
    (folder / "checkpoint.json").mkdir()
    return "checkpoint.json should be the checkpoint's manifest and is unreadable: Is a directory"


def damage_by_read_error(folder):
    """The beginning of /proc/self/mem cannot be read; its size is 0."""
    record = json.loads((folder / "checkpoint.json").read_bytes())
    for file in record["files"]:
        if file["name"] == "model.safetensors":
            file["size"] = 0
    (folder / "checkpoint.json").write_text(json.dumps(record))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/proc/self/mem")
    return "model.safetensors should be 0 bytes and is unreadable: Input/output error"


def damage_by_read_error_of_the_manifest(folder):
    (folder / "checkpoint.json").unlink()
    (folder / "checkpoint.json").symlink_to("/proc/self/mem")
    return (
        "checkpoint.json should be the checkpoint's manifest and is unreadable: Input/output error"
    )


@pytest.mark.parametrize(
    "damage", [damage_by_folder, damage_by_read_error, damage_by_read_error_of_the_manifest]
)
def test_an_unreadable_checkpoint_is_skipped_for_the_next_older_one(run, own, damage):
    write(run, 5)
    why = damage(write(run, 10).path)
    assert search(run, own) == (5, [why])
