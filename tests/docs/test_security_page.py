"""docs/security.md names the test of each line, and each of them exists."""

import re

from tests.docs.markdown import REPOSITORY
from tests.docs.test_faults_page import functions_of

PAGE = (REPOSITORY / "docs" / "security.md").read_text()
_ROW = re.compile(r"^\| (?!threat|who|---)(.+) \| (.+) \| (.*) \|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str]]:
    """Threat, defence and test of each line, without the table of who is trusted."""
    return _ROW.findall(PAGE[PAGE.index("## This laptop against") :])


def test_every_line_names_a_test_that_exists() -> None:
    files: dict[str, set[str]] = {}
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        files.setdefault(path.name, set()).update(functions_of(path))
    found = [
        (threat, re.findall(r"`(test_\w+\.py)::(test_\w+)`", test)) for threat, _, test in rows()
    ]
    assert len(found) > 40
    assert "to name" not in PAGE
    assert [threat for threat, named in found if not named] == []
    named = [one for _, tests in found for one in tests]
    assert [one for one in named if one[1] not in files.get(one[0], set())] == []


def test_the_readme_leads_to_the_page() -> None:
    assert "(docs/security.md)" in (REPOSITORY / "README.md").read_text()
