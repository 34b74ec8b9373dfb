"""The rules of the watchdog: `judge(evidence, limits)` is pure and the only judge there is."""

from collections.abc import Callable
from dataclasses import dataclass

from nsa_core.config.training import WatchdogLimits
from nsa_ops.pod.evidence import HealthEvidence
from nsa_ops.pod.rules import cards as rules_cards
from nsa_ops.pod.rules import gates as rules_gates
from nsa_ops.pod.rules import learning as rules_learning
from nsa_ops.pod.rules import loss as rules_loss
from nsa_ops.pod.rules import machine as rules_machine
from nsa_ops.pod.rules import process as rules_process
from nsa_ops.pod.rules.verdict import Finding, Verdict, conclude

Judgement = Callable[[HealthEvidence, WatchdogLimits], Finding | None]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: Stable name; what it finds carries it.
        level: The worst level it can give.
        about: What it looks at, in one sentence.
        apply: Evidence in, a finding or None out.
    """

    id: str
    level: str
    about: str
    apply: Judgement


RULES: tuple[Rule, ...] = (
    Rule(
        "process_gone", "halt",
        "The trainer's process is gone, or ended on an error.",
        rules_process.process_gone,
    ),
    Rule(
        "heartbeat_stale", "halt",
        "Nothing in the process moves: alive_seq stands still.",
        rules_process.heartbeat_stale,
    ),
    Rule(
        "stall", "halt",
        "The loop stands still for longer than its phase may take.",
        rules_process.stall,
    ),
    Rule(
        "card_lost", "halt",
        "A card that was there when the attempt began is not any more.",
        rules_cards.card_lost,
    ),
    Rule(
        "card_ecc", "halt",
        "A card had new memory errors that could not be corrected.",
        rules_cards.card_ecc,
    ),
    Rule(
        "card_xid", "halt",
        "The driver reported an error of a card; some only warn.",
        rules_cards.card_xid,
    ),
    Rule(
        "card_unread", "warn",
        "The cards cannot be asked: the driver's tool gives no answer.",
        rules_cards.card_unread,
    ),
    Rule(
        "loss_nonfinite", "halt",
        "A loss or gradient is not finite, missing or exactly 0; one is a warning.",
        rules_loss.loss_nonfinite,
    ),
    Rule(
        "loss_missing", "halt",
        "The loss vanished from the records and nothing says that a step was skipped.",
        rules_loss.loss_missing,
    ),
    Rule(
        "loss_jump", "halt",
        "The loss is far above its median: one record warns, a row of them halts.",
        rules_loss.loss_jump,
    ),
    Rule(
        "loss_exploded", "halt",
        "The loss of a run that had learnt is above that of random weights, with a huge gradient.",
        rules_loss.loss_exploded,
    ),
    Rule(
        "loss_climbing", "halt",
        "The median of the loss has left its best behind and does not come back.",
        rules_loss.loss_climbing,
    ),
    Rule(
        "causality_broken", "halt",
        "The causality probe, run when a loss was too good, has failed.",
        rules_learning.causality_broken,
    ),
    Rule(
        "loss_too_good", "halt",
        "The loss is lower than any text allows this early: the model sees its targets.",
        rules_learning.loss_too_good,
    ),
    Rule(
        "loss_fall", "warn",
        "The loss fell faster than learning does: run the causality probe.",
        rules_learning.loss_fall,
    ),
    Rule(
        "validation_rising", "halt",
        "The validation loss is above its best; halts only where a limit says so.",
        rules_learning.validation_rising,
    ),
    Rule(
        "gates_collapsed", "halt",
        "The gates of the worst layer use one branch only, on several new records.",
        rules_gates.gates_collapsed,
    ),
    Rule(
        "not_learning", "halt",
        "Learning rate 0 before the schedule ends, or gradient norm 0 after the warm-up.",
        rules_learning.not_learning,
    ),
    Rule(
        "loss_scale_falling", "halt",
        "Steps in a row are skipped while the loss scale falls.",
        rules_learning.loss_scale_falling,
    ),
    Rule(
        "throughput_low", "warn",
        "The run is slower than its own median for a long time.",
        rules_machine.throughput_low,
    ),
    Rule("data_slow", "warn", "Batches take long to come.", rules_machine.data_slow),
    Rule(
        "grad_spike", "warn",
        "The gradient norm is many times its median.",
        rules_learning.grad_spike,
    ),
    Rule(
        "loss_plateau", "warn",
        "The median of the loss has not improved for a long time.",
        rules_learning.loss_plateau,
    ),
    Rule(
        "memory_creep", "warn",
        "The memory in use grows with the steps.",
        rules_machine.memory_creep,
    ),
    Rule(
        "disk_low", "warn",
        "The disk has no room for the next checkpoints.",
        rules_machine.disk_low,
    ),
    Rule(
        "host_memory_high", "warn",
        "The pod's memory is nearly used up.",
        rules_machine.host_memory_high,
    ),
)  # fmt: skip


def judge(evidence: HealthEvidence, limits: WatchdogLimits) -> Verdict:
    """What the rules say about the evidence; what is worst comes first."""
    found = (rule.apply(evidence, limits) for rule in RULES)
    return conclude([finding for finding in found if finding is not None])
