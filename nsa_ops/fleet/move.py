"""What a run takes along to another pod: its newest backup, its code and its next manifest."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa_core.config.compare import ChangedValue, differing_values
from nsa_core.config.recipe import list_recipes
from nsa_core.rundir.manifest import AUTO, Parent, RunManifest
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.receipts import newest_ahead, receipts_of
from nsa_ops.configure import RunChoice, load_hardware, overlay, require_profile
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import NotFoundError
from nsa_ops.pods.known import choose_pod
from nsa_ops.preflight.guardrails import require_guardrails
from nsa_ops.preflight.preflight import offered_cards, subject_of
from nsa_ops.preflight.proof import find_proof
from nsa_ops.remote.snapshot import Snapshot, has_code, take_snapshot
from nsa_ops.runs.launch import read_startable_pod, require_data
from nsa_ops.runs.resume import settled, with_config
from nsa_ops.store import RunRecord

#: Fields of the manifest whose change an operator wants to read, in this order.
_SHOWN = ("pod_id", "profile", "code_id", "code_commit", "dirty_sha256", "lock_sha256")


def is_elsewhere(operator: Operator, record: RunRecord, pod: str) -> bool:
    """Whether a run would have to be moved to continue on this pod."""
    return record.pod != choose_pod(operator.store, pod).name


def newest_backup(operator: Operator, run_id: str) -> BackupFolder:
    """The backup that holds the newest checkpoint whose receipt is still valid."""
    run, receipts = operator.store.find_run(run_id), operator.store.receipts(run_id)
    if run is not None:  # a backup of another lineage of this run id is no backup of it
        receipts = receipts_of(receipts, run.attempt, run.attempt_id)
    receipt = newest_ahead(receipts)
    if receipt is None:
        message = f"Nothing of `{run_id}` is backed up here, so it cannot continue on another pod"
        hint = f"Only its own pod can: `nsa-ops resume {run_id}`, or `nsa-ops backup pull {run_id}`"
        raise NotFoundError(message, hint=hint)
    # A receipt names checkpoints/step_N inside the backup.
    return BackupFolder(Path(receipt.path).parent.parent)


def choose_code(link: PodLink, manifest: RunManifest) -> Snapshot | None:
    """The code of this checkout, unless the pod has the code that the run was made with."""
    if has_code(link.transport, link.record.python, link.code(manifest.code_id)):
        return None
    return take_snapshot()


def next_manifest(
    operator: Operator,
    link: PodLink,
    old: RunManifest,
    code: Snapshot | None,
    *,
    step: int,
    sets: Sequence[str],
    overrides: Mapping[str, str],
) -> RunManifest:
    """The manifest of the next attempt, once nothing on the new pod forbids it."""
    pod = link.record
    profile = require_profile(operator, RunChoice(), pod.profile or old.profile)
    hardware = load_hardware(profile)
    facts = read_startable_pod(link, hardware, overrides)
    offered = offered_cards(hardware, facts)
    changed = settled(overlay(old.config, sets, hardware, offered), facts.card_memory_gib)
    for note in changed.notes:
        operator.tell(f"pod {pod.name}: {note}")
    config = changed.config
    require_guardrails(subject_of(config, hardware, facts), {**old.overrides, **overrides})
    require_data(link, config.data)
    code_id = code.code_id if code else old.code_id
    recipe = config.recipe if config.recipe in list_recipes() else ""  # a file is not on this disk
    choice = RunChoice(recipe, hardware.name, tuple(sets))
    proof = find_proof(operator, link, code_id, choice, config, overrides)
    values: dict[str, Any] = {
        "attempt": old.attempt + 1,
        "parent": Parent(run_id=old.run_id, step=step),
        "pod_id": pod.pod_id,
        "pod_facts": proof.pod_facts,
        "profile": hardware.name,
        "preflight_sha256": proof.sha256,
        "overrides": {**old.overrides, **overrides},
        "resume": AUTO,
        "command": sys.argv,
        "kernels": proof.kernels,
        **_code_fields(code),
    }
    return with_config(old, config).model_copy(update=values)


def _code_fields(code: Snapshot | None) -> dict[str, str]:
    if code is None:
        return {}
    return {
        "code_id": code.code_id,
        "code_commit": code.commit,
        "dirty_sha256": code.dirty_sha256,
        "lock_sha256": code.lock_sha256,
    }


def differences_of(old: RunManifest, new: RunManifest) -> list[ChangedValue]:
    """Pod, code, profile, facts and values that two attempts do not share; pure."""
    fields = [
        ChangedValue(name, getattr(old, name), getattr(new, name))
        for name in _SHOWN
        if getattr(old, name) != getattr(new, name)
    ]
    facts = [
        ChangedValue(f"pod_facts.{name}", old.pod_facts.get(name), new.pod_facts.get(name))
        for name in sorted(old.pod_facts.keys() | new.pod_facts.keys())
        if old.pod_facts.get(name) != new.pod_facts.get(name)
    ]
    return [*fields, *facts, *differing_values(old.config, new.config)]
