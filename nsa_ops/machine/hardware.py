"""Ask a pod's tools about its cards, each with a deadline, and judge the answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_core.config.profile import HardwareProfile
from nsa_core.rundir.report import CheckResult, checked
from nsa_ops.errors import DeadlineError, NotFoundError, StateConflictError
from nsa_ops.gpu.card import GPU, join_cards
from nsa_ops.gpu.judge_outputs import judge_outputs
from nsa_ops.gpu.tool_output import ToolOutput, parse_output
from nsa_ops.remote.transport import Transport

#: nvidia-smi hangs on a sick driver; it answers within two seconds on a healthy one.
SMI_S = 20.0
KERNEL_LOG_S = 10.0
#: The full record rather than a list of fields: an older driver refuses a query with a new field.
CARDS = ("nvidia-smi", "-q", "-x")
LINKS = (
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "topo", "-p2p", "r"),
    ("nvidia-smi", "nvlink", "-s"),
    ("lspci", "-D", "-d", "10de:"),
)
KERNEL_LOG = ("dmesg",)
MODULE = ("cat", "/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Unread:
    """A tool that gave no answer, and why."""

    command: str
    reason: str
    is_hung: bool = False  # it did not end within its deadline


@dataclass(frozen=True)
class HardwareFacts:
    """What a pod's tools said of its cards."""

    outputs: tuple[ToolOutput, ...] = ()  # one an answer
    unread: tuple[Unread, ...] = ()
    problem: str = ""  # why there is no card; empty if there is one

    @property
    def gpus(self) -> tuple[GPU, ...]:
        """Cards, joined over all answers."""
        return join_cards(card for output in self.outputs for card in output.cards)


def read_hardware(transport: Transport) -> HardwareFacts:
    """Ask for the cards, then for how they are joined and what the kernel logged about them.

    A machine without nvidia-smi has no cards; after it hung it is not asked again.
    """
    cards = _ask(transport, CARDS, SMI_S)
    answers = [cards]
    if isinstance(cards, ToolOutput):
        if len(cards.cards) > 1:
            answers += [_ask(transport, command, SMI_S) for command in LINKS]
        elif not cards.cards:
            answers.append(_ask(transport, MODULE, KERNEL_LOG_S))
    elif not cards.is_hung:
        return HardwareFacts(unread=(cards,), problem=cards.reason)
    answers.append(_ask(transport, KERNEL_LOG, KERNEL_LOG_S))
    return HardwareFacts(
        outputs=tuple(one for one in answers if isinstance(one, ToolOutput)),
        unread=tuple(one for one in answers if isinstance(one, Unread)),
        problem=_problem(cards),
    )


def read_cards(transport: Transport) -> HardwareFacts:
    """Ask for the cards only; for what may change between a preflight and a launch."""
    cards = _ask(transport, CARDS, SMI_S)
    if isinstance(cards, Unread):
        return HardwareFacts(unread=(cards,), problem=cards.reason)
    return HardwareFacts(outputs=(cards,), problem=_problem(cards))


def _problem(cards: ToolOutput | Unread) -> str:
    if isinstance(cards, Unread):
        return cards.reason
    return "" if cards.cards else f"nvidia-smi said: {cards.first_line or 'nothing'}"


def _ask(transport: Transport, command: Sequence[str], timeout_s: float) -> ToolOutput | Unread:
    words = " ".join(command)
    try:
        done = transport.run(tuple(command), timeout_s=timeout_s)
    except NotFoundError:
        return Unread(words, f"{command[0]} is missing")
    except StateConflictError as error:
        return Unread(words, error.message)
    except DeadlineError:
        return Unread(words, f"`{words}` did not answer within {timeout_s:g} s", is_hung=True)
    if done.exit_code != 0 and command[0] != CARDS[0]:
        return Unread(words, done.last_error_line or f"exit code {done.exit_code}")
    said = done.text if done.exit_code == 0 else f"{done.text}\n{done.last_error_line}"
    return parse_output(said, words)


def judge_hardware(
    facts: HardwareFacts, profile: HardwareProfile, others: Sequence[HardwareProfile] = ()
) -> list[CheckResult]:
    """Judge what a pod's own tools said."""
    if not profile.needs_card:
        return [checked("gpu.cards", "skipped", f"profile {profile.name} uses no card")]
    results = [_unread(one) for one in facts.unread]
    if facts.problem:
        hint = "Restart the pod or its driver, or take another one"
        results.append(checked("gpu.cards", "fail", facts.problem, command="nvidia-smi", hint=hint))
    known = [one for one in facts.outputs if one.kinds]
    return results + judge_outputs(known, profile, others)


def _unread(one: Unread) -> CheckResult:
    name = f"tool.{one.command.partition(' ')[0]}"
    if one.is_hung and one.command.startswith("nvidia-smi"):
        message = f"driver not answering: {one.reason}"
        hint = "See `dmesg | grep -i xid`; the card needs a reset or a reboot, or take another pod"
        return checked(name, "fail", message, command=one.command, hint=hint)
    return checked(name, "skipped", f"could not be asked: {one.reason}", command=one.command)
