"""The environment that a trainer is started with: its compilers' caches outlive the attempt."""

from pathlib import Path

import pytest

from nsa_core.env import (
    COMPILER_CACHES,
    RankEnvironment,
    compiler_caches,
    read_rank,
    trainer_environment,
)

ROOT = Path("/pod")


def test_every_code_has_folders_of_its_own_in_the_pods_root() -> None:
    assert compiler_caches(ROOT, "c0de", {}) == {
        "TRITON_CACHE_DIR": "/pod/caches/triton/c0de",
        "TORCHINDUCTOR_CACHE_DIR": "/pod/caches/torchinductor/c0de",
    }


def test_the_next_attempt_of_the_same_code_finds_the_same_folders() -> None:
    first = compiler_caches(ROOT, "c0de", {})
    assert compiler_caches(ROOT, "c0de", {}) == first
    assert compiler_caches(ROOT, "0ther", {}) != first


def test_the_shared_folders_of_a_provisioned_pod_are_cut_by_code() -> None:
    shared = {name: f"/pod/caches/{folder}" for name, folder in COMPILER_CACHES.items()}
    assert compiler_caches(ROOT, "c0de", shared) == compiler_caches(ROOT, "c0de", {})


@pytest.mark.parametrize("name", sorted(COMPILER_CACHES))
def test_a_folder_that_the_owner_has_set_stays(name: str) -> None:
    assert name not in compiler_caches(ROOT, "c0de", {name: "/fast/cache"})


def test_unknown_code_changes_nothing() -> None:
    assert compiler_caches(ROOT, "unknown", {}) == {}


def test_a_trainer_is_started_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/pod/caches/triton")
    caches = compiler_caches(ROOT, "c0de")
    assert trainer_environment("", caches)["TRITON_CACHE_DIR"] == "/pod/caches/triton/c0de"


def test_a_trainer_takes_no_rank_from_the_engine_that_its_pod_belongs_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some engines number the machines of a job with the variables of torchrun."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert read_rank(trainer_environment("")) == RankEnvironment()
