"""The rules of the watchdog: `judge(evidence, limits)` is pure and the only judge there is."""

from collections.abc import Callable
from dataclasses import dataclass

from nsa_core.config.training import WatchdogLimits
from nsa_ops.pod.rules import (
    learning_rules,
    loss_rules,
    machine_rules,
    process_rules,
    rank_rules,
)
from nsa_ops.pod.rules.verdict import Finding, Verdict, conclude
from nsa_ops.pod.tracker import HealthEvidence


@dataclass(frozen=True)
class Rule:
    """One rule: evidence in, a finding or None out; `level` is the worst that it can give."""

    level: str
    apply: Callable[[HealthEvidence, WatchdogLimits], Finding | None]

    @property
    def id(self) -> str:
        """Stable name of the rule, which its findings carry."""
        return self.apply.__name__


#: In this order: among findings of one level the first one becomes the verdict.
RULES: tuple[Rule, ...] = (
    Rule("halt", process_rules.process_gone),
    Rule("halt", process_rules.heartbeat_stale),
    Rule("halt", process_rules.stall),
    Rule("halt", machine_rules.card_lost),
    Rule("halt", machine_rules.card_ecc),
    Rule("halt", machine_rules.card_xid),
    Rule("warn", machine_rules.card_unread),
    Rule("halt", loss_rules.loss_nonfinite),
    Rule("halt", loss_rules.loss_missing),
    Rule("halt", loss_rules.loss_jump),
    Rule("halt", loss_rules.loss_exploded),
    Rule("halt", loss_rules.loss_climbing),
    Rule("halt", learning_rules.causality_broken),
    Rule("halt", learning_rules.loss_too_good),
    Rule("warn", learning_rules.loss_fall),
    Rule("halt", learning_rules.validation_rising),
    Rule("halt", learning_rules.gates_collapsed),
    Rule("halt", learning_rules.not_learning),
    Rule("halt", learning_rules.loss_scale_falling),
    Rule("warn", machine_rules.throughput_low),
    Rule("warn", rank_rules.straggler),
    Rule("warn", machine_rules.data_slow),
    Rule("warn", learning_rules.grad_spike),
    Rule("warn", learning_rules.loss_plateau),
    Rule("warn", machine_rules.memory_creep),
    Rule("warn", machine_rules.card_memory_high),
    Rule("warn", machine_rules.disk_low),
    Rule("warn", machine_rules.host_memory_high),
)


def judge(evidence: HealthEvidence, limits: WatchdogLimits) -> Verdict:
    """What the rules say about the evidence; what is worst comes first."""
    found = (rule.apply(evidence, limits) for rule in RULES)
    return conclude([finding for finding in found if finding is not None])
