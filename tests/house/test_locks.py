"""The locks hold versions and hashes, no addresses, and agree with pyproject.toml."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = ["core", "train", "dev"]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)")
NOT_LOCKED = {"torch"}


def pins(repository: Path, name: str) -> dict[str, set[str]]:
    """Versions of each package; more than one where the platforms differ."""
    found: dict[str, set[str]] = {}
    for line in (repository / f"requirements/{name}.lock").read_text().splitlines():
        if match := PIN.match(line):
            found.setdefault(canonicalize_name(match[1]), set()).add(match[2])
    return found


def wanted(repository: Path, name: str) -> Iterator[Requirement]:
    """What pyproject.toml asks for in this lock."""
    project: dict[str, Any] = tomllib.loads((repository / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    groups = project["dependency-groups"]
    lists = {
        "core": [project["project"]["dependencies"]],
        "train": [project["project"]["dependencies"], extras["train"], groups["setup"]],
        "dev": [project["project"]["dependencies"], *extras.values(), *groups.values()],
    }
    for requirements in lists[name]:
        yield from map(Requirement, requirements)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_all_that_pyproject_asks_for(name: str, repository: Path) -> None:
    locked = pins(repository, name)
    for requirement in wanted(repository, name):
        package = canonicalize_name(requirement.name)
        if package not in NOT_LOCKED:
            assert package in locked, f"run `make lock`: {requirement} is not in {name}.lock"
            versions = locked[package]
            assert all(requirement.specifier.contains(version) for version in versions)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_pins_by_version_and_hash_and_names_no_address(name: str, repository: Path) -> None:
    text = (repository / f"requirements/{name}.lock").read_text()
    assert "://" not in text
    entries = [line for line in text.splitlines() if not line.startswith(("#", " "))]
    assert entries
    assert all(PIN.match(line) and line.endswith("\\") for line in entries)
    assert not pins(repository, name).keys() & NOT_LOCKED


def test_no_lock_holds_a_cuda_library(repository: Path) -> None:
    assert not [name for name in pins(repository, "dev") if name.startswith(("nvidia-", "cuda-"))]


def test_the_smaller_locks_hold_the_versions_of_the_larger(repository: Path) -> None:
    everything = pins(repository, "dev")
    for name in ("core", "train"):
        assert pins(repository, name).items() <= everything.items()


def test_the_pinned_torch_is_one_that_pyproject_allows(repository: Path) -> None:
    lines = (repository / "requirements/torch.txt").read_text().splitlines()
    (pin,) = [Requirement(line) for line in lines if line and not line.startswith("#")]
    (specifier,) = pin.specifier
    (allowed,) = [r for r in wanted(repository, "train") if r.name == "torch"]
    assert specifier.operator == "=="
    assert allowed.specifier.contains(specifier.version)
