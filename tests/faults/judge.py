"""From what the tests did to a verdict on each fault, and the table of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.faults.faults import Fault, FaultListError
from tests.faults.harness import Job, Ran

Status = Literal["noticed", "equivalent", "green", "error"]


@dataclass(frozen=True)
class Verdict:
    """What became of a fault.

    Attributes:
        fault: The fault.
        status: `green` is a fault that nothing noticed; `error` one that could not be judged.
        reason: The test that noticed it, why it is equivalent, or what went wrong.
        seconds: Wall time of its tests.
    """

    fault: Fault
    status: Status
    reason: str
    seconds: float = 0.0


def baseline_jobs(faults: Sequence[Fault]) -> list[Job]:
    """Jobs that run every named test without a fault, a job for each file of tests."""
    by_file: dict[tuple[str, bool], set[str]] = {}
    for fault in faults:
        for test in fault.tests:
            by_file.setdefault((test.partition("::")[0], fault.gpu), set()).add(test)
    return [
        Job(_baseline(file), tuple(sorted(tests)), options=_options(is_gpu=is_gpu))
        for (file, is_gpu), tests in by_file.items()
    ]


def _baseline(test: str) -> str:
    """Name of the job that runs a test without a fault."""
    return f"baseline {test.partition('::')[0]}"


def fault_jobs(faults: Sequence[Fault], root: Path) -> tuple[list[Job], list[Verdict]]:
    """A job for every fault that can be planted, and verdicts on the others."""
    jobs, verdicts = [], []
    for fault in faults:
        try:
            text = fault.apply((root / fault.file).read_text())
        except (OSError, FaultListError) as error:
            verdicts.append(Verdict(fault, "error", str(error)))
            continue
        if fault.equivalent:
            verdicts.append(Verdict(fault, "equivalent", fault.equivalent))
        else:
            options = ("-x", *_options(is_gpu=fault.gpu))
            jobs.append(Job(fault.id, fault.tests, (fault.file, text), options))
    return jobs, verdicts


def _options(*, is_gpu: bool) -> tuple[str, ...]:
    return ("-m", "gpu" if is_gpu else "not gpu")


def judge(fault: Fault, ran: dict[str, Ran]) -> Verdict:
    """The verdict on a planted fault, from the results of all jobs.

    A test that fails or is skipped without the fault proves nothing; nor does a run that ended
    before its tests, such as one that could not import them.
    """
    needed = [fault.id, *(_baseline(test) for test in fault.tests)]
    if any(name not in ran for name in needed):
        return Verdict(fault, "error", "interrupted before it was planted")
    for test in fault.tests:
        without = ran[_baseline(test)]
        if not without.passed(test):
            reason = f"without the fault, {test} does not pass: {without.tail[-300:]}"
            return Verdict(fault, "error", reason)
    found = ran[fault.id]
    if found.exit_code == 0:
        return Verdict(fault, "green", f"{', '.join(fault.tests)} passed", found.seconds)
    if found.exit_code == 1 and found.failed:
        return Verdict(fault, "noticed", found.failed[0], found.seconds)
    ended = "the time was up" if found.exit_code is None else f"pytest ended with {found.exit_code}"
    return Verdict(fault, "error", f"{ended}: {found.tail[-300:]}", found.seconds)


def count_by_kind(verdicts: Sequence[Verdict]) -> dict[str, dict[str, int]]:
    """For each kind, how many faults were planted, noticed, equivalent, green or in error."""
    counts: dict[str, dict[str, int]] = {}
    for verdict in verdicts:
        row = counts.setdefault(
            verdict.fault.kind,
            {"planted": 0, "noticed": 0, "equivalent": 0, "green": 0, "error": 0},
        )
        row["planted"] += verdict.status != "equivalent"
        row[verdict.status] += 1
    return dict(sorted(counts.items()))


def table(verdicts: Sequence[Verdict]) -> str:
    """The counts kind by kind, the sum, and a line for every fault that is not noticed."""
    counts = count_by_kind(verdicts)
    columns = ("planted", "noticed", "equivalent", "green", "error")
    sums = {name: sum(row[name] for row in counts.values()) for name in columns}
    lines = ["".join([f"{'kind':16}", *(f"{name:>11}" for name in columns)])]
    for kind, row in {**counts, "all": sums}.items():
        lines.append("".join([f"{kind:16}", *(f"{row[name]:11}" for name in columns)]))
    lines += [
        f"{verdict.status}: {verdict.fault.id} ({verdict.fault.file}): {verdict.reason}"
        for verdict in verdicts
        if verdict.status in ("green", "error")
    ]
    return "\n".join(lines)
