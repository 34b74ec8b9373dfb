"""Remove old checkpoints of a backup or of a pod; the last verified one is always kept."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nsa_core.rundir.checkpoint import list_checkpoints, plan_removal
from nsa_core.rundir.events import read_beginnings
from nsa_core.rundir.layout import RunDir
from nsa_ops.backup.disk import ask
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.kept_aside import (
    KeptAside,
    bytes_of,
    clear_removed,
    list_kept_aside,
    remove_from,
)
from nsa_ops.backup.receipts import newest_held, still_ahead
from nsa_ops.backup.survey import RemoteCheckpoint, Survey, read_survey
from nsa_ops.backup.verification import is_whole_at
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import ConfigurationError, NotFoundError, StateConflictError
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.quantities import format_bytes, sentence_case
from nsa_ops.store import Receipt

REMOVE_TIMEOUT_S = 300.0

# First one rename, to a name that the trainer also clears away, and only then the deletion.
_REMOVE = """
cd -- "$1" || exit 1
[ "$(sha256sum < "$2/checkpoint.json")" = "$3  -" ] || { echo "$2 has changed" >&2; exit 1; }
mv -T -- "$2" ".writing_removed_$2" && rm -rf -- ".writing_removed_$2"
"""
# The name of the trainer's last known good checkpoint, if it has one; what is there and cannot be
# read is an error, because that checkpoint would be removed.
_KNOWN_GOOD = '[ ! -e "$1/checkpoints/known_good" ] || cat -- "$1/checkpoints/known_good"'


@dataclass(frozen=True)
class RetentionPolicy:
    """How many of the newest checkpoints are kept, and each at a multiple of `keep_every` steps."""

    keep_last: int
    keep_every: int = 0

    @property
    def words(self) -> str:
        """The policy as a sentence without its end."""
        every = f" and every one at a multiple of step {self.keep_every}" if self.keep_every else ""
        return f"keep the last {self.keep_last}{every}"


def choose_policy(keep_last: int | None, keep_every: int) -> RetentionPolicy | None:
    """The policy of two flags; None keeps everything.

    Raises:
        ConfigurationError: If only the second flag is given.
    """
    if keep_last is None and keep_every:
        message = f"`--keep-every {keep_every}` only adds to the newest checkpoints that are kept"
        raise ConfigurationError(message, hint="Give their number with `--keep K`, too")
    return None if keep_last is None else RetentionPolicy(keep_last, keep_every)


@dataclass(frozen=True)
class Pruned:
    """What was removed.

    Attributes:
        where: The backup, or the run directory on its pod.
        unproven_steps: Checkpoints of a pod that are kept only because no verified copy is here.
        freed_bytes: Size of all that was removed.
        removed_aside: What pulls had kept aside in a backup.
        kept_aside: The same where nobody asked for its removal.
    """

    run_id: str
    where: str
    removed_steps: list[int]
    kept_steps: list[int]
    unproven_steps: list[int]
    freed_bytes: int
    removed_aside: list[KeptAside] = field(default_factory=list)
    kept_aside: list[KeptAside] = field(default_factory=list)


@dataclass(frozen=True)
class PrunePlan:
    """What will be removed.

    Attributes:
        pruned: The outcome, once it is done.
        hashes: Hash of checkpoint.json of each checkpoint to remove from a pod, by step.
    """

    pruned: Pruned
    hashes: dict[int, str]
    plan: Plan


def removable_here(
    folder: BackupFolder, steps: Sequence[int], policy: RetentionPolicy, receipts: Sequence[Receipt]
) -> list[int]:
    """Steps of a backup that may be removed; never the newest one with a verified receipt.

    Also never the newest of the steps that the run still builds on: a checkpoint that a rollback
    abandoned may have a higher step.
    """
    ours = [one for one in receipts if Path(one.path).parent == folder.run.checkpoints]
    ahead = still_ahead(ours, read_beginnings(folder.run))
    protected = {one.step for one in map(newest_held, (ours, ahead)) if one is not None}
    protected = protected or set(steps)
    return plan_removal(
        steps, keep_last=policy.keep_last, keep_every=policy.keep_every, protected=protected
    )


def plan_prune_here(
    operator: Operator,
    folder: BackupFolder,
    run_id: str,
    policy: RetentionPolicy | None,
    *,
    aside: bool = False,
) -> PrunePlan:
    """What would be removed from the backup on this machine.

    Args:
        operator: Who asks.
        folder: The backup.
        run_id: Its run.
        policy: Which checkpoints are kept; None keeps all.
        aside: Remove what pulls have kept aside: it is evidence, and goes for no other reason.

    Raises:
        NotFoundError: If the folder holds neither a checkpoint nor a backup record.
    """
    found = {one.step: one for one in list_checkpoints(folder.run)}
    if not found and not folder.record.exists():
        message = f"`{folder.root}` holds no backup: no {folder.record.name} and no checkpoint"
        raise NotFoundError(message, hint="See `nsa-ops backup ls`")
    receipts = operator.store.receipts(run_id)
    going = removable_here(folder, list(found), policy, receipts) if policy is not None else []
    kept = list_kept_aside(folder)
    freed = sum(found[step].manifest.total_bytes for step in going)
    pruned = Pruned(
        run_id=run_id,
        where=str(folder.root),
        removed_steps=going,
        kept_steps=sorted(found.keys() - going),
        unproven_steps=[],
        freed_bytes=freed + (bytes_of(kept) if aside else 0),
        removed_aside=kept if aside else [],
        kept_aside=[] if aside else kept,
    )
    return PrunePlan(pruned, {}, _describe(pruned, policy))


def _describe(pruned: Pruned, policy: RetentionPolicy | None) -> Plan:
    steps = [Step("remove", f"checkpoint of step {step}") for step in pruned.removed_steps]
    steps += [Step("remove", f"{one.words}, kept aside") for one in pruned.removed_aside]
    notes = [f"step {step} stays: it has no verified copy here" for step in pruned.unproven_steps]
    notes += [f"{one.words} is kept aside; `--aside` removes it" for one in pruned.kept_aside]
    what = policy.words if policy is not None else "remove what is kept aside"
    title = f"{what} in `{pruned.where}`, which frees {format_bytes(pruned.freed_bytes)}"
    return plan_of(sentence_case(title), steps, notes)


def prune_here(operator: Operator, folder: BackupFolder, planned: PrunePlan) -> Pruned:
    """Remove old checkpoints of a backup, with their receipts.

    Raises:
        StateConflictError: If another command writes this backup, or has removed some of it since
            the plan was made; nothing is removed then.
    """
    pruned = planned.pruned
    steps, aside = pruned.removed_steps, [one.name for one in pruned.removed_aside]
    intent = operator.store.intent(
        "backup prune", pruned.run_id, folder=pruned.where, steps=steps, aside=aside
    )
    with intent, folder.locked():
        _require_held(folder, [*(folder.run.checkpoint(step).name for step in steps), *aside])
        clear_removed(folder)
        for step in steps:
            path = folder.run.checkpoint(step)
            remove_from(folder, path.name)
            operator.store.remove_receipt(pruned.run_id, step, str(path))
        for name in aside:
            remove_from(folder, name)
    return pruned


def _require_held(folder: BackupFolder, names: Sequence[str]) -> None:
    """A plan may wait for its answer while another command prunes."""
    gone = [name for name in names if not os.path.lexists(folder.run.checkpoints / name)]
    if gone:
        message = f"The backup `{folder.root}` no longer holds {', '.join(gone)}: another command "
        message += "removed it after this plan was made"
        raise StateConflictError(message, hint="Nothing was removed; repeat it for a new plan")


def plan_prune_there(
    operator: Operator, link: PodLink, run_id: str, folder: BackupFolder, policy: RetentionPolicy
) -> PrunePlan:
    """What would be removed from the pod: only checkpoints with a receipt and a whole copy here.

    The pod's newest checkpoint and the last known good one are kept, because a resume needs them.

    Raises:
        PartialError: If the pod cannot say which one is the last known good one.
    """
    run_dir = link.run_dir(run_id)
    survey = read_survey(link.transport, run_dir)
    going = _removable_there(link, survey, policy, run_dir)
    proven = {
        one.step: one
        for one in survey.checkpoints
        if one.step in going and _is_proven(operator, folder, run_id, one)
    }
    steps = sorted(proven, reverse=True)
    freed = sum(proven[step].manifest.total_bytes for step in steps)
    kept = sorted(one.step for one in survey.checkpoints if one.step not in proven)
    unproven = [step for step in going if step not in proven]
    pruned = Pruned(run_id, str(run_dir), steps, kept, unproven, freed)
    hashes = {step: proven[step].sha256 for step in steps}
    return PrunePlan(pruned, hashes, _describe(pruned, policy))


def _removable_there(
    link: PodLink, survey: Survey, policy: RetentionPolicy, run_dir: PurePosixPath
) -> list[int]:
    good = ask(link.transport, "sh", "-c", _KNOWN_GOOD, "sh", str(run_dir)).strip()
    steps = [one.step for one in survey.checkpoints]
    protected = {one.step for one in survey.checkpoints if one.folder.name == good}
    return plan_removal(
        steps, keep_last=policy.keep_last, keep_every=policy.keep_every, protected=protected
    )


def _is_proven(
    operator: Operator, folder: BackupFolder, run_id: str, remote: RemoteCheckpoint
) -> bool:
    """A receipt names this very checkpoint, and every hash of the copy agrees now."""
    path = folder.run.checkpoint(remote.step)
    named = any(
        one.path == str(path) and one.manifest_sha256 == remote.sha256
        for one in operator.store.receipts(run_id)
    )
    return named and is_whole_at(path, remote)


def prune_there(operator: Operator, link: PodLink, planned: PrunePlan) -> Pruned:
    """Remove checkpoints from a pod, each only if it is still what its receipt says.

    Raises:
        PartialError: If one has changed meanwhile; those before it are gone.
    """
    pruned = planned.pruned
    where = str(PurePosixPath(pruned.where) / "checkpoints")
    steps = pruned.removed_steps
    with operator.store.intent("pod prune", pruned.run_id, pod=link.record.name, steps=steps):
        for step in steps:
            name = RunDir(Path(pruned.where)).checkpoint(step).name
            argv = ("sh", "-c", _REMOVE, "sh", where, name, planned.hashes[step])
            ask(link.transport, *argv, timeout_s=REMOVE_TIMEOUT_S)
    return pruned
