"""Results of `dcgmi diag`, from its table (versions 2 to 4) and its JSON, and their causes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_core.rundir.bounded_json import JsonError, parse_json
from nsa_core.rundir.report import CheckResult, Status, checked
from nsa_ops.quantities import count_of

_ROW = re.compile(r"^\s*\|(.{27})[|+](.*?)\|?\s*$")
_RESULT = re.compile(
    r"^(Pass|Fail|Warn|Skip)(?:ed|ing)?(?:\s*-\s*(.*))?$|^GPUs?\s*:?\s*([\d, ]+):\s*(Pass|Fail"
    r"|Warn|Skip)",
    re.IGNORECASE,
)
_REASON = re.compile(r"^(Warning|Error|Info)\b", re.IGNORECASE)
_NUMBERS = re.compile(r"\d+")
_GPU = re.compile(r"\bGPU[: ]*(\d+)")

_RETEST = "Reset the card and run the test again; give the pod back if it fails"
#: Word in the reason of a failed test, what that is about, and what to do.
_CAUSES = (
    ("thermal", "cooling", "Check the cooling (fans, thermal paste, room), or take another pod"),
    ("remap", "memory", _RETEST),
    ("ecc", "memory", _RETEST),
    ("double-bit", "memory", _RETEST),
    ("nvlink", "NVLink", "Run `nvidia-smi nvlink -s` and `-e`; reset all cards together"),
    ("pcie", "PCIe", "See `nvidia-smi -q -d PCI`; reseat the card, or take another pod"),
    ("power", "power", "Check the power supply and the power limit (`nvidia-smi -q -d POWER`)"),
    ("persistence", "persistence mode", "Run `nvidia-smi -pm 1` as root"),
    ("in use", "another process", "End the program that uses the card, then run the test again"),
)
_STATUSES: Mapping[str, Status] = {"fail": "fail", "warn": "warn"}


@dataclass(frozen=True)
class Diagnosis:
    """One result of one test."""

    test: str
    status: str  # `pass`, `fail`, `warn` or `skip`
    gpus: tuple[int, ...] = ()  # cards it holds for; empty for all of them
    reason: str = ""  # what the test printed


def parse_diagnoses(text: str) -> tuple[Diagnosis, ...]:
    """Results in a text, whichever form they have; empty if there are none."""
    return _from_json(text) or _from_table(text)


def _from_table(text: str) -> tuple[Diagnosis, ...]:
    found: list[Diagnosis] = []
    reasons: list[tuple[int, str]] = []
    test, in_reason = "", False
    for line in text.splitlines():
        row = _ROW.match(line)
        if row is None:
            in_reason = False
            continue
        name, cell = row[1].strip(), row[2].removeprefix(" ")
        if _REASON.match(name):
            reasons.append((len(found) - 1, cell))
            in_reason = True
        elif name:
            test, in_reason = name, False
        result = None if in_reason else _RESULT.match(cell.strip())
        if result:
            found.append(_result(test, result))
        elif in_reason and not name and reasons:
            place, above = reasons[-1]
            reasons[-1] = place, above.removesuffix("  ") + cell  # broken at the column's width
    return tuple(
        _with_reason(one, [words for place, words in reasons if place == number], found)
        for number, one in enumerate(found)
    )


def _result(test: str, found: re.Match[str]) -> Diagnosis:
    status = (found[1] or found[4]).lower()
    where = found[2] or found[3] or ""
    return Diagnosis(test, status, tuple(int(number) for number in _NUMBERS.findall(where)))


def _with_reason(one: Diagnosis, words: Sequence[str], found: Sequence[Diagnosis]) -> Diagnosis:
    text = " ".join(" ".join(words).split())
    if not text:
        return one
    # The reason is printed below the last result of a test, and may be about an earlier one.
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
    reasons = [
        _words(result[key]) for key in ("warnings", "warning", "error", "info") if key in result
    ]
    status = result["status"].lower()
    short = next(
        (word for word in ("pass", "fail", "warn", "skip") if status.startswith(word)), status
    )
    gpus = tuple(int(number) for number in _NUMBERS.findall(where))
    return Diagnosis(test, short, gpus, " ".join(" ".join(reasons).split()))


def _words(node: object) -> str:
    if isinstance(node, str):
        return node
    if isinstance(node, list):
        return " ".join(_words(item) for item in node)
    if isinstance(node, dict):
        return " ".join(_words(node[key]) for key in ("warning", "error", "message") if key in node)
    return ""


def judge_diagnoses(diagnoses: Sequence[Diagnosis]) -> list[CheckResult]:
    """Tests of dcgmi that did not pass, by card; one line for all that did."""
    bad = [one for one in diagnoses if one.status in _STATUSES]
    named = {one.test for one in bad if one.gpus}
    bad = [one for one in bad if one.gpus or one.test not in named]
    good = {one.test for one in diagnoses if one.status == "pass"} - {one.test for one in bad}
    results = []
    if good:
        message = f"{count_of(len(good), 'test')} passed on every card"
        results.append(checked("dcgm", "pass", message, command="dcgmi diag -r 2"))
    return results + [result for one in bad for result in _diagnosis(one)]


def _diagnosis(one: Diagnosis) -> Iterator[CheckResult]:
    reason = one.reason.lower()
    cause = next((found for found in _CAUSES if found[0] in reason), None)
    area = f" ({cause[1]})" if cause else ""
    hint = cause[2] if cause else "Run `dcgmi diag -r 3` again; give the pod back if it fails again"
    words = "failed" if one.status == "fail" else "warned"
    for label in [f"gpu{number}" for number in one.gpus] or ["gpus"]:
        yield checked(
            f"{label}.dcgm", _STATUSES[one.status],
            f"dcgmi test `{one.test}` {words}{area}: {one.reason or 'it gives no reason'}",
            measured=one.status, limit="pass", command="dcgmi diag -r 2", hint=hint,
        )  # fmt: skip
