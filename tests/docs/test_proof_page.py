"""The page of proofs names files that exist, each of the eleven properties, and true numbers."""

import re

import pytest

from tests.docs.markdown import REPOSITORY
from tests.faults.faults import read_faults
from tests.faults.record import page_rows, read_record

PAGE = (REPOSITORY / "docs" / "proof.md").read_text()


def test_every_named_file_exists() -> None:
    named = set(re.findall(r"`((?:tests|nsa_core|bench)/[\w/.]+)`", PAGE))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []


def test_every_property_has_a_row_with_tests() -> None:
    rows = dict(re.findall(r"^\| (\d+) \|(.*)$", PAGE, re.MULTILINE))
    assert list(rows) == [str(number) for number in range(1, 12)]
    assert all("`tests/" in row for row in rows.values())


def test_the_page_counts_the_faults_of_the_list_and_of_the_record() -> None:
    assert page_rows(read_faults(), read_record()) in PAGE, (
        "print them by python -m tests.faults --rows"
    )


FREE_CHOICES = re.findall(r"^\| `(tests/core/model/\w+\.py)` \| (\d+) \|$", PAGE, re.MULTILINE)


def test_the_page_names_the_tests_of_free_choices() -> None:
    assert len(FREE_CHOICES) >= 6


@pytest.mark.parametrize(("file", "least"), FREE_CHOICES)
def test_a_number_of_free_choices_is_the_least_that_its_test_asserts(file, least) -> None:
    text = (REPOSITORY / file).read_text()
    asserted = re.findall(r"free_tokens\(.*\) (?:>=|==) (\d+)$", text, re.MULTILINE)
    assert min(map(int, asserted)) == int(least)
