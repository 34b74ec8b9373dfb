"""Pods that a run continues on, and those that it leaves: nothing of it may live on any of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nsa_ops.agents import ask_each, probe_run
from nsa_ops.context import Operator, PodLink, RunHandle
from nsa_ops.errors import DeadlineError, NotFoundError, PodUnreachableError, StateConflictError
from nsa_ops.runs.choose import LIVING
from nsa_ops.runs.lease import OLD_POD, Takeover, allow_leaving, look_at_old_pod
from nsa_ops.store import RunRecord

#: Characters; no sentence of ours is longer.
MOST_OF_A_PROBLEM = 400


def refuse_living_shares(record: RunRecord, links: Sequence[PodLink]) -> None:
    """Refuse to begin an attempt on pods where something of the last one lives.

    Raises:
        StateConflictError: If it does; a pod of the run that has no directory of it has nothing.
        OpsError: If a pod cannot be asked.
    """
    known = {one.pod for one in record.members}
    kept = [link for link in links if link.record.name in known]

    def look(link: PodLink) -> str:
        try:
            report = probe_run(RunHandle(link, record.code_id, record.run_id))
        except NotFoundError:
            return ""
        except (PodUnreachableError, DeadlineError) as error:
            rest = [one.record.name for one in links if one.record.name != link.record.name]
            command = f"nsa-ops resume {record.run_id} --pods {','.join(rest) or 'OTHERS'}"
            message = f"Pod `{link.record.name}` cannot be asked: {error.message}"
            hint = f"Wait for it, or continue without it: `{command}`"
            raise type(error)(message, hint=hint) from error
        is_living = report.state in LIVING
        return f"{report.state} on pod `{link.record.name}`: {report.why}" if is_living else ""

    living = next(filter(None, ask_each(kept, look)), "")
    if living:
        message = f"Run `{record.run_id}` is {living}"
        raise StateConflictError(message, hint=f"Stop it first with `nsa-ops halt {record.run_id}`")


def leave_pods(
    operator: Operator,
    record: RunRecord,
    names: Sequence[str],
    step: int,
    overrides: Mapping[str, str],
    *,
    more_steps: bool,
) -> list[Takeover]:
    """Prove that nothing of the run lives on the pods that it leaves.

    It continues on the pods `names` from `step`, also if it finished where its configuration
    changes (`more_steps`). Of the overrides only `old-pod` counts.

    Raises:
        StateConflictError: If something lives there, or may.
        RefusedError: If pod 0 has more than the backup, or answers and cannot tell.
    """
    left = []
    for rank, one in enumerate(record.members):
        if one.pod in names:
            continue
        there = replace(record, pod=one.pod, pod_id=one.pod_id)
        old = look_at_old_pod(operator, there)
        # Pods 1, 2 … have no checkpoints, and a finished share says nothing about the run.
        notes = allow_leaving(
            old, record.run_id, step, overrides, more_steps=more_steps or rank > 0
        )
        left.append(Takeover(there, old, tuple(notes), overrides.get(OLD_POD, "")))
    return left


def grounds_for(left: Sequence[Takeover]) -> dict[str, str]:
    """On what ground a run leaves pods that nobody could ask, for its manifest; pure.

    Each problem is cut: it may be what a pod said, and stays in every later manifest.
    """
    unproven = [one.old for one in left if one.old is not None and not one.old.is_proven]
    reasons = [
        f"nobody could ask pod {old.pod}: {old.problem[:MOST_OF_A_PROBLEM]}" for old in unproven
    ]
    return {OLD_POD: "; ".join(reasons)} if reasons else {}
