"""Ask a pod's tools about its cards, each with a deadline: a tool that hangs is a finding."""

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_ops.errors import DeadlineError, NotFoundError, StateConflictError
from nsa_ops.gpu.card import GPU, join_cards
from nsa_ops.gpu.read.evidence import Evidence, parse_evidence
from nsa_ops.remote.transport import Transport

#: nvidia-smi hangs on a sick driver; it answers within two seconds on a healthy one.
SMI_S = 20.0
KERNEL_LOG_S = 10.0
#: The full record rather than a list of fields: an older driver refuses a query with a new field.
CARDS = ("nvidia-smi", "-q", "-x")
LINKS = (
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "nvlink", "-s"),
    ("lspci", "-D", "-d", "10de:"),
)
KERNEL_LOG = ("dmesg",)
MODULE = ("cat", "/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Unread:
    """A tool that gave no answer.

    Attributes:
        command: What was asked.
        reason: Why there is no answer.
        is_hung: It did not end within its deadline.
    """

    command: str
    reason: str
    is_hung: bool = False


@dataclass(frozen=True)
class HardwareFacts:
    """What a pod's tools said of its cards.

    Attributes:
        evidences: One answer each.
        unread: Tools that gave none.
        problem: Why there is no card; empty if there is one.
    """

    evidences: tuple[Evidence, ...] = ()
    unread: tuple[Unread, ...] = ()
    problem: str = ""

    @property
    def gpus(self) -> tuple[GPU, ...]:
        """Cards, joined over all answers."""
        return join_cards(card for evidence in self.evidences for card in evidence.cards)


def read_hardware(transport: Transport) -> HardwareFacts:
    """Ask for the cards, then for how they are joined and what the kernel logged about them.

    A machine without nvidia-smi has no cards; after it hung it is not asked again.
    """
    cards = _ask(transport, CARDS, SMI_S)
    answers = [cards]
    if isinstance(cards, Evidence):
        if len(cards.cards) > 1:
            answers += [_ask(transport, command, SMI_S) for command in LINKS]
        elif not cards.cards:
            answers.append(_ask(transport, MODULE, KERNEL_LOG_S))
    elif not cards.is_hung:
        return HardwareFacts(unread=(cards,), problem=cards.reason)
    answers.append(_ask(transport, KERNEL_LOG, KERNEL_LOG_S))
    return HardwareFacts(
        evidences=tuple(one for one in answers if isinstance(one, Evidence)),
        unread=tuple(one for one in answers if isinstance(one, Unread)),
        problem=_problem(cards),
    )


def read_cards(transport: Transport) -> HardwareFacts:
    """Ask for the cards only; for what may change between a preflight and a launch."""
    cards = _ask(transport, CARDS, SMI_S)
    if isinstance(cards, Unread):
        return HardwareFacts(unread=(cards,), problem=cards.reason)
    return HardwareFacts(evidences=(cards,), problem=_problem(cards))


def _problem(cards: Evidence | Unread) -> str:
    if isinstance(cards, Unread):
        return cards.reason
    return "" if cards.cards else f"nvidia-smi said: {cards.first_line or 'nothing'}"


def _ask(transport: Transport, command: Sequence[str], timeout_s: float) -> Evidence | Unread:
    words = " ".join(command)
    try:
        done = transport.run(tuple(command), timeout_s=timeout_s)
    except NotFoundError:
        return Unread(words, f"{command[0]} is not there")
    except StateConflictError as error:
        return Unread(words, error.message)
    except DeadlineError:
        return Unread(words, f"`{words}` did not answer within {timeout_s:g} s", is_hung=True)
    if done.exit_code != 0 and command[0] != CARDS[0]:
        return Unread(words, done.last_error_line or f"exit code {done.exit_code}")
    said = done.text if done.exit_code == 0 else f"{done.text}\n{done.last_error_line}"
    return parse_evidence(said, words)
