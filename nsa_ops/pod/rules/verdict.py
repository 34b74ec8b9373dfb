"""Verdict: what the rules say about a run at one moment."""

from typing import Any, Literal

from nsa_core.config.base import TolerantModel

Level = Literal["healthy", "warn", "halt"]
SEVERITY: dict[str, int] = {"healthy": 0, "warn": 1, "halt": 2}


class Finding(TolerantModel):
    """What one rule found.

    Attributes:
        rule: Stable id of the rule, such as `loss_nonfinite`.
        level: `warn` tells, `halt` stops the run.
        sentence: What was found and what to do, for people.
        facts: The numbers behind it.
        stage: How bad it is within its level, from 0; a worse one is told again.
        subject: What it is about, where a rule can speak of several things, each told by itself.
    """

    rule: str
    level: Literal["warn", "halt"]
    sentence: str
    facts: dict[str, Any] = {}
    stage: int = 0
    subject: str = ""


class Verdict(TolerantModel):
    """The worst finding, and all others behind it.

    Attributes:
        level: `healthy` if no rule found anything.
        rule: Rule of the worst finding; empty when healthy.
        sentence: Its sentence.
        facts: Its facts.
        findings: All findings, the worst first.
    """

    level: Level
    rule: str = ""
    sentence: str = "no rule found anything"
    facts: dict[str, Any] = {}
    findings: list[Finding] = []


def conclude(findings: list[Finding]) -> Verdict:
    """The verdict over findings; among equals the first one speaks."""
    if not findings:
        return Verdict(level="healthy")
    ordered = sorted(findings, key=lambda finding: -SEVERITY[finding.level])
    worst = ordered[0]
    return Verdict(
        level=worst.level,
        rule=worst.rule,
        sentence=worst.sentence,
        facts=worst.facts,
        findings=ordered,
    )
