"""JSON that somebody else wrote never takes more than its limits and never ends in a crash."""

import os
import time
from pathlib import Path

import pytest

from nsa_core.config.base import TolerantModel
from nsa_core.rundir import bounded_json, events
from nsa_core.rundir.bounded_json import (
    DOCUMENT,
    JsonError,
    JsonLimits,
    parse_json,
    parse_model,
    parse_records,
    read_bounded,
    read_json,
)
from nsa_core.rundir.layout import RunDir


class Record(TolerantModel):
    step: int


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested"),
        (b"[" * 65 + b"]" * 65, "nested"),
        (b'"\xff"', "not JSON"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"NaN", "not finite"),
        (b"[-Infinity]", "not finite"),
        (b"1e999", "not finite"),
        (b"1" * 5000, "digits"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'[{"a": {"b": 1, "b": 2}}]', "twice"),
        (b"[" + b"1," * 1_000_001 + b"1]", "values"),
        (b" " * (DOCUMENT.max_bytes + 1), "bytes"),
    ],
)
def test_content_over_a_limit_is_refused_with_a_reason(content: bytes, reason: str) -> None:
    with pytest.raises(JsonError, match=reason):
        parse_json(content)


@pytest.mark.parametrize(
    "content", [b'{"step": ' + b"9" * 400 + b"}", b'{"step": 1, "\\"": -' + b"9" * 101 + b"}"]
)
def test_a_number_that_no_float_holds_is_in_no_record_either(content: bytes) -> None:
    """pydantic takes thousands of digits, and a division of such a number is an OverflowError."""
    with pytest.raises(JsonError, match="digits, and the limit is 100"):
        parse_model(Record, content)


def test_digits_in_a_string_are_no_number() -> None:
    text = '\\"' + "9" * 400
    assert parse_json(f'["{text}", 1]'.encode()) == ['"' + "9" * 400, 1]
    assert parse_model(Record, f'{{"{text}": 1, "step": {"9" * 100}}}'.encode()).step > 1


def test_ordinary_content_is_read() -> None:
    content = b'{"a": [1, -2.5, true, null, "\\u00e9"], "b": {}}'
    assert parse_json(content) == {"a": [1, -2.5, True, None, "é"], "b": {}}
    assert parse_json(b"[" * 64 + b"]" * 64)
    assert parse_json(b"1" * 39) == int("1" * 39)
    assert parse_json(b"[NaN]", is_nan_allowed=True) != [0]


def test_brackets_in_strings_are_no_depth() -> None:
    assert parse_json(b'["' + b"[" * 1000 + b'\\"{{{"]') == ["[" * 1000 + '"{{{']


@pytest.mark.parametrize("content", [b'"' + b'\\"[' * 100_000, b'"' * 300_001 + b"[" * 99])
def test_a_string_without_an_end_costs_no_time(content: bytes) -> None:
    began_s = time.process_time()
    with pytest.raises(JsonError):
        parse_json(content)
    assert time.process_time() - began_s < 1


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"step": ' + b"1" * 5000 + b"}", b'{"step": NaN}', b'{"step": "\\ud800"}'],
)
def test_a_record_that_cannot_be_read_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):
        parse_model(Record, content)


def test_a_line_over_a_limit_is_torn_and_the_others_count() -> None:
    deep = b'{"step": 2, "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    long = b'{"step": 2, "x": "' + b"y" * 2_000_000 + b'"}'
    found = parse_records(b'{"step": 1}\n' + deep + b"\n" + long + b'\n{"step": 3}\n', Record)
    assert ([one.step for one in found.records], found.torn) == ([1, 3], 2)


def test_a_file_is_read_up_to_its_limit_only(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(JsonError, match="10737418240 bytes, and the limit is 1000"):
        read_json(path, JsonLimits(max_bytes=1000))


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(JsonError, match="no regular file"):
        read_bounded(tmp_path / "fifo", 10)
    with pytest.raises((JsonError, OSError)):
        read_bounded(tmp_path, 10)


def test_only_lines_that_may_be_of_the_kind_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    for step in range(40):
        events.record(run, kind="saved", by="trainer", attempt=1, message=f"step {step}")
        if step % 20 == 0:
            events.record(run, kind="signal", by="runner", attempt=1, message=f"at {step}")
    events.record(run, kind="note", by="trainer", attempt=1, facts={"word": "signal"})
    with run.events.open("a") as file:
        file.write('{"ts": 1.0, "iso": "", "attempt": 1, "kind": "signal", "by": "tor')
    parsed = []
    parse = bounded_json.parse_model
    monkeypatch.setattr(
        bounded_json, "parse_model", lambda *given: parsed.append(given) or parse(*given)
    )
    found = events.find_events(run, "signal", "halt_asked")
    assert [event.message for event in found] == ["at 0", "at 20"]
    assert len(parsed) == 3
    assert events.find_events(RunDir(tmp_path / "none"), "signal") == []
