"""The report's Markdown twin: the same words and numbers for a pull request or a mail, no plots."""

import re
from collections.abc import Iterable, Sequence

from nsa_ops.printable import printable_lines
from nsa_ops.report import summary
from nsa_ops.report.rank_history import COLUMNS, describe_spread, rank_cells
from nsa_ops.report.record import RecordedRun

#: First words of every twin; a file that begins otherwise is not ours and is not replaced.
OPENING = "# Training run "

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")


def render_markdown(record: RecordedRun) -> str:
    """The report as Markdown text."""
    outcome = summary.describe_outcome(record)
    parts = [
        f"{OPENING}{escape_markdown(record.run_id)}",
        f"**{outcome.word}.** {escape_markdown(outcome.sentence)}",
        _facts(("number", "value", "remark"), summary.headline(record)),
        "## What was run",
        _facts(("fact", "value", "remark"), summary.describe_run(record)),
        *_validation(record),
        *_ranks(record),
        *_time(record),
        *_checkpoints(record),
        *_samples(record),
        *_configuration(record),
        *_reproduce(record),
        *_missing(record),
    ]
    return "\n\n".join(parts) + "\n"


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line; HTML in it stays text."""
    return _SPECIAL.sub(r"\\\1", " ".join(printable_lines(text).split()))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([escape_markdown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _facts(head: Sequence[str], facts: Iterable[summary.Fact]) -> str:
    return _table(head, [(fact.name, fact.value, fact.remark) for fact in facts])


def _fence(text: str) -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{printable_lines(text)}\n{fence}"


def _validation(record: RecordedRun) -> list[str]:
    points = summary.validation_points(record)
    if not points:
        return []
    rows = [(f"{step:,.0f}", f"{bits:.4f}") for step, bits in points]
    return ["## Held-out text", _table(("step", "bits per byte"), rows)]


def _ranks(record: RecordedRun) -> list[str]:
    rows = rank_cells(record.ranks)
    if not rows:
        return []
    spread = escape_markdown(describe_spread(record.ranks))
    return ["## Ranks", *([spread] if spread else []), _table(COLUMNS, rows)]


def _time(record: RecordedRun) -> list[str]:
    parts = ["## Time"] if record.goodput_s or record.events else []
    if record.goodput_s:
        rows = summary.goodput_rows(record.goodput_s)
        parts.append(_table(("bucket", "time", "share"), rows))
    if record.events:
        happened = [cells for _, cells in summary.event_rows(record)]
        parts.append(_table(("after", "attempt", "event", "by", "message"), happened))
    remark = summary.replay_remark(record)
    return [*parts, remark] if remark else parts


def _checkpoints(record: RecordedRun) -> list[str]:
    facts = [fact for _, fact in summary.describe_checkpoints(record)]
    if not facts:
        return ["## Checkpoints", "This directory holds no whole checkpoint."]
    return ["## Checkpoints", _facts(("checkpoint", "size", "state"), facts)]


def _samples(record: RecordedRun) -> list[str]:
    texts = [
        f"{escape_markdown(sample.drawn)}\n\n{_fence(sample.prompt + sample.text)}".lstrip()
        for sample in record.samples
    ]
    return ["## Generated text", *texts] if texts else []


def _configuration(record: RecordedRun) -> list[str]:
    if record.manifest is None:
        return []
    facts = summary.describe_configuration(record.manifest)
    return ["## Configuration", _facts(("key", "value", "origin"), facts)]


def _reproduce(record: RecordedRun) -> list[str]:
    commands = summary.reproduce_commands(record)
    return ["## Reproduce", _fence("\n".join(commands))] if commands else []


def _missing(record: RecordedRun) -> list[str]:
    lines = [f"- {escape_markdown(line)}" for line in record.missing]
    return ["## Missing pieces", "\n".join(lines)] if lines else []
