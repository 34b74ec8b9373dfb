"""What the cards of a running attempt show: asked now and then, each tool with its deadline.

A tool that hangs is neither waited for nor started a second time while it hangs: a process that is
blocked in the driver ignores signals.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.layout import RunDir
from nsa_ops.gpu.card import GPU
from nsa_ops.gpu.kernel_log import DriverEvent, parse_kernel_log
from nsa_ops.gpu.smi_records import parse_csv
from nsa_ops.pod.rules.verdict import Verdict

TOOL_S = 10.0
#: Rules after which a card, and with it the pod, is not to be trusted.
FATAL_RULES = frozenset({"card_lost", "card_ecc", "card_xid"})
_POLL_S = 0.05
_MAX_BYTES = 4 * 2**20
_SMI = (
    "nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,ecc.errors.uncorrected.volatile.total",
    "--format=csv",
)  # fmt: skip
_KERNEL_LOG = ("dmesg",)


#: In the root of a pod: its cards have failed a run.
MARK_NAME = "suspect.json"


class PodMark(TolerantModel):
    """Content of suspect.json."""

    schema_version: int = 1
    run_id: str
    rule: str
    sentence: str
    at: float


def mark_pod(run: RunDir, verdict: Verdict) -> None:
    """Leave a mark for whoever would start a run on this pod next, if a card is at fault."""
    if verdict.rule not in FATAL_RULES:
        return
    mark = PodMark(run_id=run.run_id, rule=verdict.rule, sentence=verdict.sentence, at=time.time())
    with suppress(OSError):  # the disk may be full; the run is stopped all the same
        write_text(run.pod_root / MARK_NAME, mark.model_dump_json(indent=2) + "\n")


class NewXid(TolerantModel):
    """A driver error that came after the attempt began.

    Attributes:
        bus: PCI address of the card.
        text: The first of them, as the driver wrote it.
    """

    code: int
    bus: str
    count: int
    text: str


class CardEvidence(TolerantModel):
    """Content of cards.json: what changed about the cards since the attempt began.

    Attributes:
        lost: Cards that were there and are not, or answer that they are lost.
        problem: Why the cards could not be asked; empty if they could.
        kernel_log_problem: The same of the kernel log, which many containers may not read.
    """

    schema_version: int = 1
    attempt: int
    at: float
    num_cards: int = 0
    xids: list[NewXid] = []
    ecc: dict[str, int] = {}
    lost: list[str] = []
    problem: str = ""
    kernel_log_problem: str = ""


@dataclass(frozen=True)
class Reading:
    """One look: cards and driver errors; the problems say what could not be read."""

    cards: tuple[GPU, ...] = ()
    xids: tuple[DriverEvent, ...] = ()
    problem: str = ""
    kernel_log_problem: str = ""


def compare(before: Reading, now: Reading, *, attempt: int, at_unix_s: float) -> CardEvidence:
    """What changed between the first look and this one; pure.

    An error of a card that is not ours does not count: a kernel log is the whole machine's.
    """
    known = Counter({(event.bus, event.code): event.count for event in before.xids})
    ours = {card.bus for card in before.cards if card.bus}
    xids = [
        NewXid(code=event.code or 0, bus=event.bus, count=grown, text=event.text)
        for event in now.xids
        if (grown := event.count - known[event.bus, event.code]) > 0
        and (not ours or not event.bus or event.bus in ours)
    ]
    ecc, lost = {}, []
    for card in before.cards:
        here = next((one for one in now.cards if one.is_same(card)), None)
        if here is None or here.answers_badly:
            lost.append(card.label)
        elif (here.ecc_uncorrected or 0) > (card.ecc_uncorrected or 0):
            ecc[card.label] = (here.ecc_uncorrected or 0) - (card.ecc_uncorrected or 0)
    return CardEvidence(
        attempt=attempt, at=at_unix_s, num_cards=len(before.cards), xids=xids, ecc=ecc,
        lost=[] if now.problem else lost, problem=now.problem,
        kernel_log_problem=now.kernel_log_problem,
    )  # fmt: skip


@dataclass
class _Tool:
    """One command that is asked again and again."""

    argv: Sequence[str]
    timeout_s: float = TOOL_S
    _left: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def ask(self) -> tuple[str, str]:
        """What it printed, and why it is not to be used; one of the two is empty."""
        if self._left is not None and self._left.poll() is None:
            return "", f"{self.argv[0]} still hangs (process {self._left.pid})"
        self._left = None
        with tempfile.TemporaryFile() as out:
            try:
                code = self._run(out)
            except OSError as error:
                return "", f"{self.argv[0]} cannot be started: {error.strerror}"
            if code is None:
                return "", f"{self.argv[0]} did not answer within {self.timeout_s:g} s"
            out.seek(0)
            text = out.read(_MAX_BYTES).decode(errors="replace")
        if code == 0 or "is lost" in text:
            return text, ""
        last = (text.strip().splitlines() or [""])[-1]
        return "", f"{self.argv[0]} ended with code {code}: {last.strip()}"

    def _run(self, out: IO[bytes]) -> int | None:
        """Its exit code; None if it was late, and then it is left to the kernel."""
        process = subprocess.Popen(
            list(self.argv), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + self.timeout_s
        while process.poll() is None:
            if time.monotonic() >= end:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                self._left = process
                return None
            time.sleep(_POLL_S)
        return process.returncode


class CardWatch:
    """Looks at the cards of one attempt; the first look is what later ones are compared with."""

    def __init__(self, run: RunDir, attempt: int, *, every_s: float) -> None:
        self._run = run
        self._every_s = every_s
        self._attempt = attempt
        self._smi = _Tool(_SMI)
        self._kernel_log = _Tool(_KERNEL_LOG)
        self._first: Reading | None = None
        self._looked_s: float | None = None
        self._evidence: CardEvidence | None = None

    def look(self) -> CardEvidence | None:
        """What is known now, asked again after a while; None on a machine without cards."""
        now_s = time.monotonic()
        is_fresh = self._looked_s is not None and now_s - self._looked_s < self._every_s
        if is_fresh or (self._first is None and shutil.which(_SMI[0]) is None):
            return self._evidence
        self._looked_s = now_s
        reading = self._read()
        if self._first is None:
            self._first = None if reading.problem else reading
        first = self._first or Reading()
        self._evidence = compare(first, reading, attempt=self._attempt, at_unix_s=time.time())
        with suppress(OSError):  # the disk may be full; the rules have it all the same
            write_text(self._run.cards, self._evidence.model_dump_json(indent=2) + "\n")
        return self._evidence

    def _read(self) -> Reading:
        cards, problem = self._smi.ask()
        kernel, kernel_problem = self._kernel_log.ask()
        events = [one for one in parse_kernel_log(kernel).events if one.kind == "xid"]
        return Reading(parse_csv(cards), tuple(events), problem, kernel_problem)


def read_card_evidence(run: RunDir, attempt: int) -> CardEvidence | None:
    """What the watchdog last saw of the cards in this attempt; None if it wrote nothing."""
    try:
        found = read_model(CardEvidence, run.cards)
    except (OSError, ValueError):
        return None
    return found if found.attempt == attempt else None
