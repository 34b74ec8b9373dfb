"""When a finding is told: at once, again when it gets worse, and then only summed up; pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nsa_ops.pod.rules.verdict import SEVERITY, Finding

#: A rule that goes on finding the same is summed up after so long, then after twice as long, up to
#: the longest: 9 lines in 24 hours. One that was silent for the longest speaks anew.
FIRST_SUM_S = 600.0
LONGEST_SUM_S = 6 * 3600.0


@dataclass
class _Rule:
    """What was told of one rule and subject, and what it has found since."""

    worst: tuple[int, int]
    told_at_s: float
    wait_s: float = FIRST_SUM_S
    found_at_s: float = 0.0
    num_looks: int = 0
    num_found: int = 0


@dataclass
class Telling:
    """Remembers what was told of one attempt; a new attempt needs a new one."""

    _rules: dict[tuple[str, str], _Rule] = field(default_factory=dict)

    def take(self, findings: Sequence[Finding], at_s: float) -> list[Finding]:
        """Those that are to be told after one look, sums in their sentences.

        Args:
            findings: Everything that this look has found.
            at_s: When that was, on a clock that only moves forward.
        """
        for rule in self._rules.values():
            rule.num_looks += 1
        return [told for finding in findings for told in self._judge(finding, at_s)]

    def _judge(self, finding: Finding, at_s: float) -> Iterator[Finding]:
        key, badness = (finding.rule, finding.subject), (SEVERITY[finding.level], finding.stage)
        known = self._rules.get(key)
        if known is None or badness > known.worst or at_s - known.found_at_s > LONGEST_SUM_S:
            self._rules[key] = _Rule(badness, at_s, found_at_s=at_s)
            yield finding
            return
        known.num_found += 1
        known.found_at_s = at_s
        if at_s - known.told_at_s >= known.wait_s:
            yield finding.model_copy(update={"sentence": _summed(finding, known, at_s)})
            known.told_at_s, known.num_looks, known.num_found = at_s, 0, 0
            known.wait_s = min(2 * known.wait_s, LONGEST_SUM_S)


def _summed(finding: Finding, known: _Rule, at_s: float) -> str:
    share = known.num_found / max(1, known.num_looks)
    minutes = (at_s - known.told_at_s) / 60
    return f"{finding.sentence} (found by {share:.0%} of the looks of the last {minutes:.0f} min)"
