"""Rules about the cards: driver errors, memory errors and lost devices since the attempt began."""

from nsa_core.config.training import WatchdogLimits
from nsa_ops.gpu.xids import explain_xid
from nsa_ops.pod.evidence import HealthEvidence
from nsa_ops.pod.rules.loss import last_good_checkpoint
from nsa_ops.pod.rules.verdict import Finding
from nsa_ops.quantities import count_of

_ANOTHER_POD = "; go on on another pod: `nsa-ops resume --pod OTHER`"


def card_lost(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:  # noqa: ARG001 -- every rule is called alike
    """A card that was there when the attempt began, and is not any more."""
    cards = evidence.machine.cards
    if cards is None or not cards.lost:
        return None
    return Finding(
        rule="card_lost",
        level="halt",
        sentence=f"{', '.join(cards.lost)} of {count_of(cards.num_cards, 'card')} is lost"
        + last_good_checkpoint(evidence)
        + _ANOTHER_POD,
        facts={"lost": cards.lost},
        subject=",".join(cards.lost),
    )


def card_ecc(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:  # noqa: ARG001 -- every rule is called alike
    """Memory errors that could not be corrected: weights or gradients may be wrong."""
    cards = evidence.machine.cards
    if cards is None or not cards.ecc:
        return None
    told = ", ".join(f"{count} on {label}" for label, count in sorted(cards.ecc.items()))
    return Finding(
        rule="card_ecc",
        level="halt",
        sentence=f"New uncorrected memory errors: {told}"
        + last_good_checkpoint(evidence)
        + _ANOTHER_POD,
        facts={"ecc": cards.ecc},
        subject=told,
    )


def card_xid(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:  # noqa: ARG001 -- every rule is called alike
    """Driver errors; those after which a card needs a reset or service halt."""
    cards = evidence.machine.cards
    if cards is None or not cards.xids:
        return None
    worst = min(cards.xids, key=lambda xid: explain_xid(xid.code).status != "fail")
    known = explain_xid(worst.code)
    return Finding(
        rule="card_xid",
        level="halt" if known.status == "fail" else "warn",
        sentence=f"Xid {worst.code} on {worst.bus or 'a card'}: {known.meaning}. {known.advice}",
        facts={"xids": [{"code": one.code, "bus": one.bus} for one in cards.xids]},
        subject=",".join(sorted({f"{one.code}@{one.bus}" for one in cards.xids})),
    )


def card_unread(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:  # noqa: ARG001 -- every rule is called alike
    """A tool that gives no answer: the driver may hang, and nobody knows how the cards are."""
    cards = evidence.machine.cards
    if cards is None or not cards.problem:
        return None
    return Finding(
        rule="card_unread",
        level="warn",
        sentence=f"The cards cannot be asked: {cards.problem}",
        facts={"problem": cards.problem},
    )
