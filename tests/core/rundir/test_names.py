"""Names, sizes and hashes that another machine announces: which may become a path here."""

import pytest

from nsa_core.rundir.checkpoint import MANIFEST_NAME, CheckpointFile
from nsa_core.rundir.names import (
    MAX_CHECKPOINT_FILES,
    MAX_DEPTH,
    MAX_SIZE,
    checkpoint_fault,
    collisions,
    entry_fault,
    name_fault,
    show_name,
)

HASH = "0" * 64


def file(name: str, size: int = 1, sha256: str = HASH) -> CheckpointFile:
    return CheckpointFile(name=name, size=size, sha256=sha256)


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json", "a b.txt", "quote'\".txt", "$(touch x).txt", "-rf", ".HALT", "日本 é",
        ".gitignore", "headless.json",
        "attempts/1/exit.json", "..a", "a..", "...", "~", "~root/x", "C:x", "a" * 255,
        "/".join(["d"] * MAX_DEPTH),
    ],
)  # fmt: skip
def test_an_ordinary_name_is_taken(name: str) -> None:
    assert name_fault(name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("//x", "absolute"),
        ("..", "normalised"),
        ("../x", "normalised"),
        ("a/../../x", "normalised"),
        ("a/..", "normalised"),
        (".", "normalised"),
        ("./x", "normalised"),
        ("a//b", "normalised"),
        ("a/", "normalised"),
        ("a\\..\\b", "backslash"),
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("\x1b[2J", "control"),
        ("a\x7f", "control"),
        ("a\x85b", "control"),
        ("a\u2028b", "control"),
        ("txt.\u202eexe", "control"),
        ("zero\u200bwidth", "control"),
        ("\udcff.txt", "UTF-8"),
        ("\ud800", "UTF-8"),
        (".git", "git repository"),
        (".git/config", "git repository"),
        ("attempts/1/.GIT/hooks/post-checkout", "git repository"),
        ("GIT~1/config", "git repository"),
        (".git./config", "git repository"),
        ("HEAD", "git repository"),
        ("tb/head", "git repository"),
        ("a" * 256, "256 bytes"),
        ("日" * 86, "258 bytes"),
        ("/".join(["d"] * (MAX_DEPTH + 1)), "components"),
        ("/".join(["d" * 200] * 6), "1205 bytes"),
    ],
)
def test_a_name_that_could_lead_elsewhere_is_refused_with_a_reason(name: str, reason: str) -> None:
    assert reason in (name_fault(name) or "")


@pytest.mark.parametrize("size", [-1, MAX_SIZE + 1, 10**400])
def test_a_size_that_no_file_has_is_refused(size: int) -> None:
    assert "size" in (entry_fault(file("a", size)) or "")


@pytest.mark.parametrize("sha256", ["", "0" * 63, "0" * 65, "G" * 64, "A" * 64, HASH + "\n"])
def test_a_text_that_is_no_sha256_is_refused(sha256: str) -> None:
    assert "no sha256" in (entry_fault(file("a", 1, sha256)) or "")


def test_of_twins_the_plainest_stays() -> None:
    assert set(collisions(["Model", "model", "MODEL"])) == {"Model", "MODEL"}
    assert set(collisions(["e\u0301", "\u00e9"])) == {"e\u0301"}
    assert set(collisions(["\ufb01le", "file"])) == {"\ufb01le"}
    assert set(collisions(["TB/x", "tb/x", "tb/y"])) == {"TB/x"}
    assert collisions(["a", "b", "tb/a", "tb/b"]) == {}


def test_a_file_that_is_also_a_folder_is_refused_and_the_file_in_it_stays() -> None:
    assert set(collisions(["tb", "tb/a"])) == {"tb"}
    assert set(collisions(["TB", "tb/a/b"])) == {"TB"}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "lists no file"),
        ([MANIFEST_NAME], "manifest itself"),
        (["Checkpoint.JSON"], "manifest itself"),
        (["../model"], "normalised"),
        (["/model"], "absolute"),
        (["sub/model"], "another folder"),
        ([".model.part"], "part of a file"),
        (["a", "a"], "twice"),
        (["a", "A"], "case"),
        ([f"f{number}" for number in range(MAX_CHECKPOINT_FILES + 1)], "limit"),
    ],
)
def test_a_manifest_with_such_files_is_refused(names: list[str], reason: str) -> None:
    assert reason in (checkpoint_fault([file(name) for name in names], MANIFEST_NAME) or "")


def test_an_ordinary_manifest_is_taken() -> None:
    assert checkpoint_fault([file("model.safetensors"), file("state.json")], MANIFEST_NAME) is None


def test_a_manifest_that_adds_up_to_more_than_a_disk_is_refused() -> None:
    files = [file("a", MAX_SIZE), file("b", MAX_SIZE)]
    assert "bytes" in (checkpoint_fault(files, MANIFEST_NAME) or "")


def test_a_name_in_a_message_is_one_printable_line() -> None:
    assert show_name("a\x1b[2J\n\udcff\\") == r"`a\x1b[2J\n\udcff\\`"
    assert show_name("a" * 300).endswith("(300 characters)")
