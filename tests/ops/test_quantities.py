"""Numbers as people read them."""

import ast
import itertools
import math
import re
from pathlib import Path

import pytest

from nsa_ops import quantities
from nsa_ops.quantities import (
    count_of,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_seconds,
    parse_count,
    sentence_case,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.008, "8 ms"), (0, "0.0 s"), (9.9, "9.9 s"), (42, "42 s"), (59.9, "1 min"),
     (185, "3 min 5 s"), (3600, "1 h"), (7800, "2 h 10 min"), (100_800, "1 d 4 h"),
     (math.nan, "unknown")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (812, "812 B"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB"), (700 * 2**20, "700 MiB"),
     (3 * 2**41, "6 TiB"), (None, "unknown")],
)  # fmt: skip
def test_bytes(count: float | None, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (4032.18, "4032"), (0.0006, "6e-4"), (1.05e7, "1.05e7"),
     (-2.5, "-2.5"), (math.nan, "nan")],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(950, "950"), (12_500, "12.5k"), (1_048_576, "1.05M"), (3.2e9, "3.2B")]
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("keep the last one", "Keep the last one"),
        ("a100's profile", "a100's profile"),
        ("runtime.num_gpus is 2", "runtime.num_gpus is 2"),
        ("h_bash@pod:22 does not answer", "h_bash@pod:22 does not answer"),
        ("ssh cannot start", "ssh cannot start"),
        ("unknown: what", "Unknown: what"),
        ("NSA_X is set", "NSA_X is set"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_and_a_name_keeps_its_case(text: str, shown: str) -> None:
    assert sentence_case(text) == shown


def test_a_name_in_front_of_a_sentence_keeps_its_case() -> None:
    assert sentence_case("demo has ended", "demo") == "demo has ended"
    assert sentence_case("the run has ended", "demo", "") == "The run has ended"


def test_a_count_and_its_noun_agree() -> None:
    assert [count_of(number, "step") for number in (0, 1, 2, 12_000)] == [
        "0 steps", "1 step", "2 steps", "12,000 steps",
    ]  # fmt: skip
    assert count_of(1, "entry", "entries") == "1 entry"
    assert count_of(3, "entry", "entries") == "3 entries"


#: A number in a message: what a length, a count or a total is written as.
_NUMBER = re.compile(
    r"\blen\(|\bnum_\w+$|\b(?:count|steps|lines|restarts|entries|without_progress)\b"
)
#: The noun behind it, with at most one adjective.
_NOUNS = re.compile(
    r" (?:[a-z]+ )?(?:steps|records|files|runs|pods|lines|checks|commands|checkpoints|documents|"
    r"tensors|losses|cards|events|entries|acts|restarts|keys|sockets|links|layers|names|facts)\b"
)


def spelled_counts(source: Path) -> list[str]:
    """F-strings that put a number before a plural without asking how many it is."""
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for number, text in itertools.pairwise(parts):
            if isinstance(number, ast.FormattedValue) and isinstance(text, ast.Constant):
                spelled = ast.unparse(number.value)
                is_asked = spelled.startswith("count_of(")
                if not is_asked and _NUMBER.search(spelled) and _NOUNS.match(str(text.value)):
                    found.append(f"{source.name}: {spelled}{text.value}")
    return found


#: Where there are always several: the number is a limit, or one alone never gets there.
_ALWAYS_SEVERAL = {
    "MAX_FILES files", "LONG_RUN_STEPS steps", "len(cards) cards are told", "len(newest) records",
    "len(row) records", "len(known) backups", "tries attempts", "learning_rules.py: len(records)",
    "learning_rules.py: steps steps", "len(counted) records", "num_pods pods",
    "len(run.members) pods", "len(names) pods, and at most", "estimate.num_ranks cards",
}  # fmt: skip


def test_every_message_that_counts_something_says_one_of_it_in_the_singular() -> None:
    folder = Path(quantities.__file__).parent
    spelled = [one for path in sorted(folder.rglob("*.py")) for one in spelled_counts(path)]
    assert [one for one in spelled if not any(text in one for text in _ALWAYS_SEVERAL)] == []


def test_the_search_for_counts_finds_them(tmp_path: Path) -> None:
    source = tmp_path / "some.py"
    source.write_text(
        'f"{len(a)} files" f"{x.num_old} more keys" f"{count_of(n, \'step\')} left"\n'
    )
    assert len(spelled_counts(source)) == 2


def test_seconds_of_a_step_keep_three_digits() -> None:
    shown = [format_seconds(value) for value in (0.0831, 0.83, 0.9996, 1.213, 12.34, 5000)]
    assert shown == ["83.1 ms", "830 ms", "1 s", "1.21 s", "12.3 s", "1 h 23 min"]


@pytest.mark.parametrize("text", ["", "-1", " 5", "1_0", "1.0", "²", "٣", "9" * 19, "9" * 5000])
def test_what_is_no_count_of_a_machine_is_unknown(text: str) -> None:
    assert parse_count(text) is None


def test_a_count_is_read_with_leading_zeros() -> None:
    assert [parse_count(text) for text in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]
