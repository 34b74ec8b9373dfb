"""What the rules say about a run at one moment, and which findings are reported again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from nsa_core.config.base import TolerantModel

Level = Literal["healthy", "warn", "halt"]
SEVERITY: dict[str, int] = {"healthy": 0, "warn": 1, "halt": 2}
#: More findings than rules: those of all pods of a run go together.
MAX_FINDINGS = 64
#: A rule that keeps finding the same is summed up after so long, then after twice as long, up to
#: the longest: 9 lines in 24 hours. One that found nothing for so long is reported at once again.
FIRST_SUMMARY_S = 600.0
LONGEST_SUMMARY_S = 6 * 3600.0


class Finding(TolerantModel):
    """What one rule found.

    Attributes:
        rule: Stable id of the rule, such as `loss_nonfinite`.
        level: `warn` only reports, `halt` stops the run.
        stage: How bad it is within its level, from 0; a worse one is reported again.
        subject: What it is about, where one rule can find several things, each reported by itself.
    """

    rule: str
    level: Literal["warn", "halt"]
    sentence: str
    facts: dict[str, Any] = {}
    stage: int = 0
    subject: str = ""


class Verdict(TolerantModel):
    """The worst finding, and all others behind it."""

    level: Level
    rule: str = ""
    sentence: str = "no rule found anything"
    facts: dict[str, Any] = {}
    findings: list[Finding] = Field([], max_length=MAX_FINDINGS)


def conclude(findings: list[Finding]) -> Verdict:
    """The verdict over findings; of equals the first one, and of very many the worst."""
    if not findings:
        return Verdict(level="healthy")
    ordered = sorted(findings, key=lambda finding: -SEVERITY[finding.level])
    worst = ordered[0]
    return Verdict(
        level=worst.level,
        rule=worst.rule,
        sentence=worst.sentence,
        facts=worst.facts,
        findings=ordered[:MAX_FINDINGS],
    )


@dataclass
class _Rule:
    """What was reported of one rule and subject, and what it has found since."""

    worst: tuple[int, int]
    reported_at_s: float
    wait_s: float = FIRST_SUMMARY_S
    found_at_s: float = 0.0
    num_looks: int = 0
    num_found: int = 0


@dataclass
class ReportedFindings:
    """Remembers which findings of one attempt were reported; a new attempt needs a new one."""

    _rules: dict[tuple[str, str], _Rule] = field(default_factory=dict)

    def take(self, findings: Sequence[Finding], at_s: float) -> list[Finding]:
        """The findings to report after one look; repeated ones with a summary in their sentence.

        `at_s`: when that was, on a clock that only moves forward.
        """
        for rule in self._rules.values():
            rule.num_looks += 1
        return [one for finding in findings for one in self._judge(finding, at_s)]

    def _judge(self, finding: Finding, at_s: float) -> Iterator[Finding]:
        key, badness = (finding.rule, finding.subject), (SEVERITY[finding.level], finding.stage)
        known = self._rules.get(key)
        if known is None or badness > known.worst or at_s - known.found_at_s > LONGEST_SUMMARY_S:
            self._rules[key] = _Rule(badness, at_s, found_at_s=at_s)
            yield finding
            return
        known.num_found += 1
        known.found_at_s = at_s
        if at_s - known.reported_at_s >= known.wait_s:
            yield finding.model_copy(update={"sentence": _summarize(finding, known, at_s)})
            known.reported_at_s, known.num_looks, known.num_found = at_s, 0, 0
            known.wait_s = min(2 * known.wait_s, LONGEST_SUMMARY_S)


def _summarize(finding: Finding, known: _Rule, at_s: float) -> str:
    share = known.num_found / max(1, known.num_looks)
    minutes = (at_s - known.reported_at_s) / 60
    looks = f"{100 * share:.0f} % of the looks of the last {minutes:.0f} min"
    return f"{finding.sentence} (found by {looks})"
