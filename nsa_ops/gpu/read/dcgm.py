"""Results of `dcgmi diag`, from its drawn table (versions 2 to 4) and from its JSON."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_core.rundir.bounded_json import JsonError, parse_json

_ROW = re.compile(r"^\s*\|(.{27})[|+](.*?)\|?\s*$")
_RESULT = re.compile(
    r"^(Pass|Fail|Warn|Skip)(?:ed|ing)?(?:\s*-\s*(.*))?$|^GPUs?\s*:?\s*([\d, ]+):\s*(Pass|Fail"
    r"|Warn|Skip)",
    re.IGNORECASE,
)
_TOLD = re.compile(r"^(Warning|Error|Info)\b", re.IGNORECASE)
_NUMBERS = re.compile(r"\d+")
_GPU = re.compile(r"\bGPU[: ]*(\d+)")


@dataclass(frozen=True)
class Diagnosis:
    """One result of one test.

    Attributes:
        test: Name of the test.
        status: `pass`, `fail`, `warn` or `skip`.
        gpus: Cards it holds for; empty for all of them.
        told: What the test said.
    """

    test: str
    status: str
    gpus: tuple[int, ...] = ()
    told: str = ""


def parse_diagnoses(text: str) -> tuple[Diagnosis, ...]:
    """Results in a text, whichever form they have; empty if there are none."""
    return _from_json(text) or _from_table(text)


def _from_table(text: str) -> tuple[Diagnosis, ...]:
    found: list[Diagnosis] = []
    told: list[tuple[int, str]] = []
    test, is_telling = "", False
    for line in text.splitlines():
        row = _ROW.match(line)
        if row is None:
            is_telling = False
            continue
        name, cell = row[1].strip(), row[2].removeprefix(" ")
        if _TOLD.match(name):
            told.append((len(found) - 1, cell))
            is_telling = True
        elif name:
            test, is_telling = name, False
        result = None if is_telling else _RESULT.match(cell.strip())
        if result:
            found.append(_result(test, result))
        elif is_telling and not name and told:
            told[-1] = (told[-1][0], _wrapped(told[-1][1], cell))
    return tuple(
        _with_words(one, [words for place, words in told if place == number], found)
        for number, one in enumerate(found)
    )


def _wrapped(above: str, below: str) -> str:
    """Text that the table broke after its column's width, often within a word."""
    return above.removesuffix("  ") + below


def _result(test: str, found: re.Match[str]) -> Diagnosis:
    status = (found[1] or found[4]).lower()
    where = found[2] or found[3] or ""
    return Diagnosis(test, status, tuple(int(number) for number in _NUMBERS.findall(where)))


def _with_words(one: Diagnosis, words: Sequence[str], found: Sequence[Diagnosis]) -> Diagnosis:
    text = " ".join(" ".join(words).split())
    if not text:
        # What a test says stands below its last result, and may be about an earlier one.
        return one
    if one.status == "pass" and any(o.test == one.test and o.status != "pass" for o in found):
        return one
    return Diagnosis(one.test, one.status, one.gpus or _named(text), text)


def _named(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(number) for number in _GPU.findall(text)}))


def _from_json(text: str) -> tuple[Diagnosis, ...]:
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or "DCGM" not in text:
        return ()
    try:
        document = parse_json(text[start : end + 1].encode())
    except JsonError:
        return ()
    return tuple(_tests(document))


def _tests(node: object) -> Iterator[Diagnosis]:
    """Every test below a node, wherever a version of the tool keeps it."""
    if isinstance(node, list):
        for item in node:
            yield from _tests(item)
    elif isinstance(node, dict):
        results = node.get("results")
        if isinstance(node.get("name"), str) and isinstance(results, list):
            for result in results:
                if isinstance(result, dict) and isinstance(result.get("status"), str):
                    yield _from_result(node["name"], result)
        else:
            for item in node.values():
                yield from _tests(item)


def _from_result(test: str, result: Mapping[str, Any]) -> Diagnosis:
    where = next(
        (str(result[key]) for key in ("gpu_ids", "gpu_id", "entity_id") if key in result), ""
    )
    told = [
        _words(result[key]) for key in ("warnings", "warning", "error", "info") if key in result
    ]
    status = result["status"].lower()
    short = next(
        (word for word in ("pass", "fail", "warn", "skip") if status.startswith(word)), status
    )
    gpus = tuple(int(number) for number in _NUMBERS.findall(where))
    return Diagnosis(test, short, gpus, " ".join(" ".join(told).split()))


def _words(node: object) -> str:
    if isinstance(node, str):
        return node
    if isinstance(node, list):
        return " ".join(_words(item) for item in node)
    if isinstance(node, dict):
        return " ".join(_words(node[key]) for key in ("warning", "error", "message") if key in node)
    return ""
