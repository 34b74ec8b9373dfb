"""Which checkpoint is of a run, and which chain of attempts goes on from which."""

import dataclasses

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.lineage import (
    Lineage,
    find_divergence,
    find_foreign,
    find_not_own,
    lineage_of,
)
from nsa_core.rundir.manifest import Parent, RunManifest, begin_next_attempt, write_manifest

A, B, C, OTHER = ("a" * 32, "b" * 32, "c" * 32, "d" * 32)


@dataclasses.dataclass(frozen=True)
class Said:
    """What a checkpoint says about itself."""

    run_id: str = "r1"
    attempt: int = 1
    attempt_id: str = A
    step: int = 40


def manifest(attempt: int = 2, **fields: object) -> RunManifest:
    values = {
        "run_id": "r1", "attempt": attempt, "attempt_id": B, "earlier_attempts": {1: A},
        "config": RunConfig(), "config_sha256": "0" * 64, "created_unix_s": 1.0,
    }  # fmt: skip
    return RunManifest.model_validate(values | fields)


UNKNOWN = {"attempt_id": "", "earlier_attempts": {}}


@pytest.mark.parametrize(
    ("said", "run"),
    [
        (Said(), manifest()),
        (Said(attempt=2, attempt_id=B), manifest()),
        (Said(attempt_id=""), manifest(**UNKNOWN)),
        (Said(attempt_id=""), manifest(earlier_attempts={})),
        (Said(attempt=0, attempt_id=""), manifest(**UNKNOWN)),
        (Said(attempt=0, attempt_id=""), manifest(earlier_attempts={})),
    ],
)
def test_a_checkpoint_of_the_runs_own_attempts_is_its_own(said: Said, run: RunManifest) -> None:
    assert find_not_own(said, run) is None
    assert find_foreign(said, run) is None


@pytest.mark.parametrize(
    ("said", "run", "why"),
    [
        (Said(run_id="r2"), manifest(), "written by run r2, not by r1"),
        (Said(attempt=3, attempt_id=C), manifest(), "attempt 3, and r1 is at 2"),
        (Said(attempt=3, attempt_id=""), manifest(), "attempt 3, and r1 is at 2"),
        (Said(attempt=-1, attempt_id=""), manifest(), "attempt -1"),
        (Said(attempt_id=OTHER), manifest(), f"attempt 1 is {'d' * 12}, and this run's is aaaa"),
        (Said(attempt=2, attempt_id=A), manifest(), "another lineage of r1"),
        (Said(attempt=0), manifest(), "another lineage of r1"),
        (Said(attempt_id=""), manifest(), f"attempt 1 is unknown, and this run's is {'a' * 12}"),
        (Said(attempt=2, attempt_id=""), manifest(earlier_attempts={}), "attempt 2 is unknown"),
        (Said(attempt=0, attempt_id=""), manifest(), "attempt unknown is unknown"),
        (Said(), manifest(**UNKNOWN), "this run's is none"),
    ],
)
def test_a_checkpoint_that_contradicts_the_run_is_foreign(
    said: Said, run: RunManifest, why: str
) -> None:
    for find in (find_not_own, find_foreign):
        found = find(said, run)
        assert found is not None
        assert why in found


PARENT = Parent(run_id="r0", step=40, attempt_id=A)
CHILD = manifest(1, attempt_id=B, earlier_attempts={}, parent=PARENT)


def test_only_the_named_checkpoint_of_the_parent_may_begin_a_run() -> None:
    assert find_foreign(Said("r0"), CHILD) is None
    assert "another lineage of r0" in str(find_foreign(Said("r0", attempt_id=""), CHILD))
    assert find_foreign(Said("r0", step=60), CHILD) == "it is step 60 of r0, and the parent is 40"
    assert "another lineage of r0" in str(find_foreign(Said("r0", attempt_id=OTHER), CHILD))
    assert "whose parent is r0" in str(find_foreign(Said("r2"), CHILD))


def test_a_parent_of_an_older_version_has_no_identity_that_its_checkpoint_could_lack() -> None:
    child = CHILD.model_copy(update={"parent": Parent(run_id="r0", step=40)})
    assert find_foreign(Said("r0", attempt_id=""), child) is None
    assert find_foreign(Said("r0"), child) is None


def test_a_checkpoint_of_the_parent_is_never_the_runs_own() -> None:
    assert find_not_own(Said("r0"), CHILD) == "it was written by run r0, not by r1"


def chain(*ids: str, run_id: str = "r1") -> Lineage:
    known = {number: one for number, one in enumerate(ids, 1) if one}
    return Lineage(run_id=run_id, attempt=len(ids), ids=known)


@pytest.mark.parametrize(
    ("held", "now"),
    [
        (chain(A), chain(A)),
        (chain(A), chain(A, B, C)),
        (chain(""), chain("", B)),
        (chain("", ""), chain("", "")),
    ],
)
def test_a_chain_continues_itself_and_its_beginning(held: Lineage, now: Lineage) -> None:
    assert find_divergence(held, now) is None


@pytest.mark.parametrize(
    ("held", "now", "why"),
    [
        (chain(A), chain(OTHER), "attempt 1 is aaaaaaaaaaaa in one and dddddddddddd in the other"),
        (chain(A, B), chain(A, C), "attempt 2"),
        (chain(A, B), chain(A, C, OTHER), "attempt 2"),
        (chain(A, B), chain(A), "gone on to attempt 2 and the other is at 1"),
        (chain("", ""), chain(""), "gone on to attempt 2 and the other is at 1"),
        (chain(""), chain(A), "attempt 1 is unknown in one"),
        (chain(A, B), chain(A, ""), "attempt 2 is bbbbbbbbbbbb in one and unknown"),
        (chain(A), chain(A, run_id="r2"), "one is of run r1 and the other of r2"),
    ],
)
def test_chains_that_part_are_recognised(held: Lineage, now: Lineage, why: str) -> None:
    assert why in str(find_divergence(held, now))


def test_every_attempt_gets_an_identity_of_its_own_and_keeps_the_earlier_ones(tmp_path) -> None:
    run = RunDir(tmp_path)
    write_manifest(run, manifest(1, attempt_id=A, earlier_attempts={}))
    second = begin_next_attempt(run, at_unix_s=2.0)
    third = begin_next_attempt(run, at_unix_s=3.0)
    assert len({A, second.attempt_id, third.attempt_id}) == 3
    assert lineage_of(third).ids == {1: A, 2: second.attempt_id, 3: third.attempt_id}
    assert find_divergence(lineage_of(second), lineage_of(third)) is None


def test_two_copies_of_one_run_that_both_continue_are_two_lineages(tmp_path) -> None:
    chains = []
    for name in ("here", "there"):
        run = RunDir(tmp_path / name)
        run.root.mkdir()
        write_manifest(run, manifest(1, attempt_id=A, earlier_attempts={}))
        chains.append(lineage_of(begin_next_attempt(run, at_unix_s=2.0)))
    assert "attempt 2 is" in str(find_divergence(*chains))


def test_a_manifest_of_an_older_version_has_a_lineage_that_begins_with_its_next_attempt(tmp_path):
    run = RunDir(tmp_path)
    write_manifest(run, manifest(1, **UNKNOWN))
    text = run.manifest.read_text()
    for field in ('  "attempt_id": "",\n', '  "earlier_attempts": {},\n'):
        assert field in text
        text = text.replace(field, "")
    run.manifest.write_text(text)
    second = begin_next_attempt(run, at_unix_s=2.0)
    assert lineage_of(second).ids == {2: second.attempt_id}


def test_an_enormous_attempt_number_costs_nothing() -> None:
    huge = manifest(10**15, attempt_id=B)
    assert lineage_of(huge).ids == {1: A, 10**15: B}
