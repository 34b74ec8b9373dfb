"""How an attempt with several ranks ended: which rank failed first, and its own last words.

Ranks that agreed on an end have written exit.json. After any other end the cause is one rank, and
the others only follow it: a collective fails, or torchrun ends them.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.ranks import RankEnd

#: What a rank says in C++ where it only waited for another one that is gone or stuck.
_WAITED = re.compile(
    r"collective operation timeout|connection (?:closed by peer|reset)|"
    r"remote process exited|communicator was aborted|socketPollConnect|broken pipe",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"collective operation timeout", re.IGNORECASE)
_MOST_WORDS = 300
#: How the reason of an end begins whose cause is a rank of another pod.
LOST_ELSEWHERE = "the ranks of this pod lost one of another pod"


@dataclass(frozen=True)
class RankTrace:
    """What is left of one rank of this pod after its attempt.

    Attributes:
        pid: Of its recorded process; None where it left no record.
        end: Its own record of its end.
        last_seen: Last time at which it was seen alive (Unix seconds); None where nobody looked.
        code: Exit code that torchrun reports, negative for a signal; None where it does not.
        is_first: torchrun saw it fail first.
        is_stuck: It outlived the others until it was killed for it.
        step: Step of its last heartbeat.
        phase: Phase of its last heartbeat; empty without one.
        words: The last line that it alone can have written to training.log; empty if none.
    """

    rank: int
    pid: int | None = None
    end: RankEnd | None = None
    last_seen: float | None = None
    code: int | None = None
    is_first: bool = False
    is_stuck: bool = False
    step: int = 0
    phase: str = ""
    words: str = ""

    @property
    def kind(self) -> Literal["own", "lost", "stuck", "follows"]:
        """Ended by itself, killed, left over, or because of another rank."""
        if self.end is not None:
            return "follows" if self.end.follows else "own"
        if self.is_stuck:
            return "stuck"
        return "follows" if _WAITED.search(self.words) else "lost"

    @property
    def at(self) -> tuple[bool, float, bool]:
        """Sorts by when it failed; what torchrun ended with TERM comes after what it saw fail."""
        if self.end is not None:
            return False, self.end.at, True
        seen = self.last_seen if self.last_seen is not None else float("inf")
        return self.code == -signal.SIGTERM, seen, not self.is_first


@dataclass(frozen=True)
class JudgedEnd:
    """The end of an attempt that its trainer has not recorded."""

    code: int
    reason: str


def judge_ranks(
    traces: Sequence[RankTrace], total: int, *, why_killed: str = "", hung: str = ""
) -> JudgedEnd | None:
    """Which rank failed first, with its code and its own words; None if no rank left a trace.

    Args:
        traces: Of the ranks of this pod.
        total: Ranks of the run, on all pods.
        why_killed: Who or what ends processes here, for a rank that was killed.
        hung: Who ended the attempt because nothing moved, and why; empty if nobody did.
    """
    known = [one for one in traces if one.end or one.pid is not None]
    if not known:
        return None
    ends = [one.end for one in known if one.end and not one.end.follows]
    if len(ends) == len(traces) and len({end.code for end in ends}) == 1:  # they had agreed
        return JudgedEnd(ends[0].code, ends[0].reason)
    first = _find_first(known, is_hang=bool(hung))
    is_killed = first.code is None or first.code < 0
    if first.kind == "stuck" or (hung and first.kind == "lost" and is_killed):
        return JudgedEnd(TrainerExit.HANG, _describe_stuck(first, total, hung))
    if first.kind == "follows":
        return _judge_followers(known, first, total)
    if first.end is not None:
        code, what = first.end.code, f"failed at step {first.end.step}: {first.end.reason}"
    else:
        code, what = first.code or TrainerExit.CRASHED, _describe_lost(first, why_killed)
    return JudgedEnd(code, f"rank {first.rank} of {total} {what}{_followed(total)}")


def _find_first(traces: Sequence[RankTrace], *, is_hang: bool) -> RankTrace:
    """The culprit; of a hang it is the rank that could not even be stopped."""
    stuck = [one for one in traces if one.kind == "stuck"]
    causes = [one for one in traces if one.kind in {"own", "lost"}]
    if stuck and (is_hang or all(one.end and one.end.code == TrainerExit.HANG for one in causes)):
        causes = stuck
    followers = [one for one in traces if one.kind == "follows"]
    return min(causes or stuck or followers, key=lambda one: one.at)


def _judge_followers(known: Sequence[RankTrace], first: RankTrace, total: int) -> JudgedEnd:
    """Nobody here is the cause: a rank of another pod, or collectives that do not fit together."""
    words = first.end.reason if first.end is not None else first.words
    code = first.end.code if first.end is not None else TrainerExit.CRASHED
    if first.end is None and all(_TIMED_OUT.search(one.words) for one in known):
        code = TrainerExit.HANG
    what = "all ranks waited in vain for one another; "
    if code in {TrainerExit.RESUMABLE, TrainerExit.HANG} and first.end is not None:
        what = ""  # it had to stop, and no step boundary came in time
    elif len(known) < total:
        what = f"{LOST_ELSEWHERE}; "
    return JudgedEnd(code, f"{what}rank {first.rank} of {total}: {words}")


def _describe_stuck(stuck: RankTrace, total: int, hung: str) -> str:
    where = _where(stuck)
    why = hung or "the others had gone"
    return f"rank {stuck.rank} of {total} was stuck{where} and had to be killed ({why})"


def _describe_lost(lost: RankTrace, why: str) -> str:
    if lost.code is None:
        what = f"ended without a record{_where(lost)}"
    elif lost.code < 0:
        what = f"was killed by {name_signal(-lost.code)} at step {lost.step}"
    else:
        what = f"ended with code {lost.code} and without a record at step {lost.step}"
    if lost.words:
        return f"{what}; its last words: {lost.words[:_MOST_WORDS]}"
    return what + (f" ({why})" if why and (lost.code is None or lost.code < 0) else "")


def _where(trace: RankTrace) -> str:
    phase = f" in phase {trace.phase}" if trace.phase else ""
    pid = f", pid {trace.pid}" if trace.pid is not None else ""
    return f" at step {trace.step}{phase}{pid}"


def _followed(total: int) -> str:
    others = total - 1
    return "; the other rank followed" if others == 1 else f"; the other {others} ranks followed"


def name_signal(number: int) -> str:
    """Name of a signal; most real-time signals have a number alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Anybody may write such lines into the log: longer numbers are none of a rank, a code or a process.
_RANK = re.compile(r"^  rank +: (\d{1,9}) \(local_rank: \d{1,9}\)$", re.ASCII)
_CODE = re.compile(r"^  exitcode +: (-?\d{1,3}) \(pid: (\d{1,9})\)", re.ASCII)
_ROOT = "Root Cause (first observed failure):"


@dataclass(frozen=True)
class ReportedFailure:
    """What torchrun says about one rank that did not end with 0."""

    code: int
    pid: int
    is_first: bool


def parse_failures(log: str) -> dict[int, ReportedFailure]:
    """By rank, what torchrun wrote to the log when it ended."""
    found: dict[int, ReportedFailure] = {}
    rank, is_first = None, False
    for line in log.splitlines():
        is_first = is_first or line.startswith(_ROOT)
        if match := _RANK.match(line):
            rank = int(match[1])
        elif rank is not None and (match := _CODE.match(line)):
            found[rank] = ReportedFailure(int(match[1]), int(match[2]), is_first)
            rank = None
    return found


def parse_words(log: str, rank: int) -> str:
    """The last line that names this rank as its writer, as torch and the trainer begin theirs."""
    own = re.compile(rf"^(?:\d{{4}}-\d\d-\d\d [\d:]{{8}} )?(?:\[rank{rank}\]:|rank {rank}:) *(.*)$")
    words = ""
    for line in log.splitlines():
        match = own.match(line.rstrip())
        if match and match[1]:
            words = match[1]
    return words[:_MOST_WORDS]
