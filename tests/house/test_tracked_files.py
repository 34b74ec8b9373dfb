"""No tracked file names a package registry, an index address or a path of somebody's machine."""

import re
import subprocess
from pathlib import Path

import pytest

from nsa_core.bench.__main__ import load_bench, parse_arguments
from nsa_core.config.training import DataConfig

#: Written in two halves, so that this file does not name them either.
HOSTS = [
    "pypi" + ".org", "python" + "hosted.org", "download.py" + "torch.org", "deb.deb" + "ian.org",
    "archive.ub" + "untu.com", "registry.np" + "mjs.org", "conda.an" + "aconda.org",
    "pypi.nv" + "idia.com", "gh" + "cr.io", "nv" + "cr.io", "docker" + ".io",
]  # fmt: skip
FORBIDDEN = {
    "a registry host": re.compile("|".join(map(re.escape, HOSTS))),
    "an index address": re.compile(r"(index-url|find-links|index_url)[ =]*['\"]?(https?|file):"),
    "a path of one machine": re.compile(
        r"(?<![\w.$}])/(wo" + r"rk/(env|wt|main|shared)|home/[a-z]+/|Us" + r"ers/[A-Za-z]+/)"
    ),
}


def test_what_a_bench_writes_without_flags_is_not_offered_to_git() -> None:
    root = Path(__file__).parents[2]
    validate, compare = (
        parse_arguments([], name, load_bench(name)).root for name in ("validate", "compare")
    )
    for place in (validate / DataConfig().cache_dir / "x", compare / "x"):
        ignored = subprocess.run(
            ["git", "check-ignore", "--quiet", place], cwd=root, capture_output=True, check=False
        )
        if ignored.returncode == 128:
            pytest.skip("not a git checkout, so nothing is tracked")
        assert ignored.returncode == 0, place


@pytest.fixture(scope="module")
def tracked() -> list[tuple[str, str]]:
    """Path and text of every tracked text file."""
    root = Path(__file__).parents[2]
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so nothing is tracked")
    paths = [root / name for name in listed.stdout.split("\0") if name]
    return [
        (str(path.relative_to(root)), path.read_text(encoding="utf-8", errors="replace"))
        for path in paths
        if path.is_file()
    ]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_names(what: str, tracked: list[tuple[str, str]]) -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in tracked
        for number, line in enumerate(text.splitlines(), 1)
        if FORBIDDEN[what].search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a registry host", f"see https://{HOSTS[0]}/simple"),
        ("an index address", "--extra-index" + "-url https://example.test/simple"),
        ("a path of one machine", "cd /wo" + "rk/main"),
        ("a path of one machine", "source /ho" + "me/someone/.venv/bin/activate"),
    ],
)
def test_the_search_finds_what_it_searches_for(what: str, line: str) -> None:
    assert FORBIDDEN[what].search(line)
