"""The page of proofs names files that exist, and each of the eleven properties."""

import re

from tests.docs.markdown import REPOSITORY

PAGE = (REPOSITORY / "docs" / "proof.md").read_text()


def test_every_named_file_exists():
    named = set(re.findall(r"`((?:tests|nsa_core|bench)/[\w/.]+)`", PAGE))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []


def test_every_property_has_a_row_with_tests():
    rows = dict(re.findall(r"^\| (\d+) \|(.*)$", PAGE, re.MULTILINE))
    assert list(rows) == [str(number) for number in range(1, 12)]
    assert all("`tests/" in row for row in rows.values())
