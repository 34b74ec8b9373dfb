# noqa: INP001 - a script that nobody imports
"""Turn JUnit files of `pytest -m gpu` into one JSON: card, versions, commit, counts by file.

python tools/record_gpu_tests.py OUT.json --commit SHA --command "..." JUNIT.xml ...
"""

import argparse
import collections
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

import torch
import triton

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def count_outcomes(cases: Iterable[ET.Element]) -> dict[str, dict[str, int]]:
    """{file: {passed, failed, skipped}}; the file is the test's dotted module."""
    counts: dict[str, collections.Counter[str]] = {}
    for case in cases:
        module = case.attrib["classname"]
        found = [OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES]
        counts.setdefault(module, collections.Counter())[found[0] if found else "passed"] += 1
    order = ("passed", "failed", "skipped")
    return {module: {name: counts[module][name] for name in order} for module in sorted(counts)}


def main() -> None:
    """Read, count, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("junit", type=Path, nargs="+")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--command", required=True, help="the command that ran the tests")
    options = parser.parse_args()
    # The files are pytest's own, written a moment ago on this machine.
    roots = [ET.parse(path).getroot() for path in options.junit]  # noqa: S314 - see above
    document = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": options.commit,
        "command": options.command,
        "files": count_outcomes(case for root in roots for case in root.iter("testcase")),
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
