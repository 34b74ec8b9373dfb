"""Whether the watchdog may begin another attempt by itself: decided here, done elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_core.rundir.events import Event
from nsa_core.rundir.exit import ExitRecord, TrainerExit
from nsa_ops.quantities import count_of

RESTARTED = "restarted"
_RESTARTABLE = {code for code in TrainerExit if code.watchdog_may_restart}


@dataclass(frozen=True)
class Decision:
    """Restart or not, and why in one sentence."""

    restart: bool
    why: str


def decide_restart(
    ended: ExitRecord,
    *,
    stop_asked: str,
    steps_done: int,
    fruitless: int,
    budget: int,
) -> Decision:
    """Restart only what was preempted, or what crashed after it had trained.

    Args:
        ended: How the attempt ended.
        stop_asked: Who asked this attempt to stop and why; empty if nobody did.
        steps_done: Steps that this attempt told of.
        fruitless: Restarts in a row since the last new checkpoint; see `count_fruitless`.
        budget: So many of them end it.
    """
    if ended.code == TrainerExit.FINISHED:
        return Decision(restart=False, why="the run has finished")
    if stop_asked:
        return Decision(restart=False, why=f"it was asked to stop: {stop_asked}")
    was_killed = ended.code < 0
    if not was_killed and ended.code not in _RESTARTABLE:
        return Decision(restart=False, why=f"code {ended.code} is never restarted: {ended.reason}")
    preempted = ended.code == TrainerExit.RESUMABLE
    if not preempted and steps_done == 0:
        return Decision(restart=False, why=f"it crashed before its first step: {ended.reason}")
    if fruitless >= budget:
        restarts = count_of(fruitless, "restart")
        return Decision(
            restart=False, why=f"{restarts} brought no new checkpoint (budget {budget})"
        )
    what = "was preempted" if preempted else "crashed"
    return Decision(restart=True, why=f"it {what} at step {ended.step}: {ended.reason}")


def count_fruitless(events: Sequence[Event], checkpoint_step: int | None) -> int:
    """Restarts by the watchdog in a row that began from the checkpoint that is still the newest."""
    count = 0
    for event in reversed(events):
        if event.kind == "resumed" and event.by == "operator":
            break
        if event.kind == RESTARTED:
            if event.facts.get("checkpoint_step") != checkpoint_step:
                break
            count += 1
    return count
