"""The rule about the gates: a layer that uses one branch only has lost its sparse attention."""

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.pod.evidence import HealthEvidence
from nsa_ops.pod.rules.verdict import Finding


def gates_collapsed(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """The worst layer on several new records that carry gate figures, all of them agreeing."""
    records = [record for record in evidence.records if has_gates(record)][-limits.gate_records :]
    if len(records) < limits.gate_records:
        return None
    limit_sets = (
        ("halt", limits.gate_entropy_halt, limits.gate_collapse_halt, limits.gate_max_halt),
        ("warn", limits.gate_entropy_warn, limits.gate_collapse_warn, limits.gate_max_warn),
    )
    for level, entropy, collapse, highest in limit_sets:
        for words in (
            _all_below(records, "gate_entropy_mean", entropy),
            _all_above(records, "gate_collapse_frac", collapse),
            _all_above(records, "gate_max_gate", highest),
        ):
            if words:
                return _finding("halt" if level == "halt" else "warn", words, records)
    return None


def has_gates(record: Heartbeat) -> bool:
    """Whether a record carries gate figures."""
    return record.gate_entropy_mean is not None or record.gate_max_gate is not None


def _all_below(records: list[Heartbeat], name: str, limit: float) -> str:
    values = [getattr(record, name) for record in records]
    if all(value is not None and value < limit for value in values):
        return f"{name} {values[-1]:.3f} < {limit:g}"
    return ""


def _all_above(records: list[Heartbeat], name: str, limit: float) -> str:
    values = [getattr(record, name) for record in records]
    if all(value is not None and value > limit for value in values):
        return f"{name} {values[-1]:.3f} > {limit:g}"
    return ""


def _finding(level: str, words: str, records: list[Heartbeat]) -> Finding:
    last = records[-1]
    layer = "the worst layer" if last.gate_worst_layer is None else f"layer {last.gate_worst_layer}"
    return Finding(
        rule="gates_collapsed",
        level="halt" if level == "halt" else "warn",
        sentence=f"The gates of {layer} collapse: {words} on {len(records)} records up to step "
        f"{last.step}; gate_collapse_details.json has the figures",
        facts={
            "layer": last.gate_worst_layer,
            "steps": [record.step for record in records],
            "entropy_mean": [record.gate_entropy_mean for record in records],
            "collapse_frac": [record.gate_collapse_frac for record in records],
            "max_gate": [record.gate_max_gate for record in records],
            "branch_shares": last.gate_branch_shares,
        },
    )
