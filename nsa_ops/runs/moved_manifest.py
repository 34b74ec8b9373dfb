"""The manifest of a run that goes on on another pod, and how it differs from the one before."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa_core.config.profile import HardwareProfile
from nsa_core.config.recipe import list_recipes
from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import Parent, RunManifest
from nsa_ops.configure import Choice, load_hardware, require_profile
from nsa_ops.context import Operator, PodLink
from nsa_ops.estimate import estimate_run
from nsa_ops.pod.messages import NextAttemptAction
from nsa_ops.preflight.guardrails import PREFLIGHT, Subject, apply_overrides, check_guardrails
from nsa_ops.preflight.marked import refuse_marked
from nsa_ops.preflight.overlay import overlay
from nsa_ops.preflight.preflight import PodFacts
from nsa_ops.preflight.proof import find_proof
from nsa_ops.remote.snapshot import Snapshot
from nsa_ops.runs.launch import read_live_facts, refuse_failures, require_data
from nsa_ops.runs.resume import Difference, changed_config, differing_values
from nsa_ops.runs.session import require_tmux

#: Fields of the manifest whose change an operator wants to read, in this order.
_TOLD = ("pod_id", "profile", "code_id", "code_commit", "dirty_sha256", "lock_sha256")


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
    """The manifest of the next attempt, once nothing on the new pod stands against it.

    Args:
        operator: Who asks.
        link: The new pod.
        old: Manifest in the backup.
        code: Code that will be shipped; None where the pod has the run's own.
        step: Step that it goes on from.
        sets: Values to change.
        overrides: Guardrails that may be passed, with the reason.

    Raises:
        RefusedError: If a guardrail or the preflight of the new pod stands against it.
        LocalResourceError, NotFoundError: If the pod lacks tmux or the data.
    """
    pod = link.record
    profile = require_profile(operator, Choice(), pod.profile or old.profile)
    hardware = load_hardware(profile)
    config = overlay(old.config, sets)
    facts = read_live_facts(link, hardware)
    require_tmux(link, facts.host)
    refuse_marked(link, overrides)
    _check_guardrails(config, hardware, facts, {**old.overrides, **overrides})
    require_data(link, config.data)
    code_id = code.code_id if code else old.code_id
    recipe = config.recipe if config.recipe in list_recipes() else ""  # a file is not on this disk
    choice = Choice(recipe, hardware.name, tuple(sets))
    proof = find_proof(
        operator, link, code_id, choice, config, is_overridden=PREFLIGHT in overrides
    )
    values: dict[str, Any] = {
        "attempt": old.attempt + 1,
        "parent": Parent(run_id=old.run_id, step=step),
        "pod_id": pod.pod_id,
        "pod_facts": proof.pod_facts,
        "profile": hardware.name,
        "preflight_sha256": proof.sha256,
        "overrides": {**old.overrides, **overrides},
        "resume": "auto",
        "command": sys.argv,
        **_code_fields(code),
        **changed_config(old, config, differing_values(old.config, config)),
        "kernels": proof.kernels,
    }
    return RunManifest.model_validate({**old.model_dump(mode="python"), **values})


def _check_guardrails(
    config: RunConfig, hardware: HardwareProfile, facts: PodFacts, overrides: Mapping[str, str]
) -> None:
    subject = Subject(
        config=config,
        profile=hardware,
        estimate=estimate_run(config, hardware),
        disk_free_bytes=facts.host.disk_free_bytes,
        card_memory_mib=facts.card_memory_mib,
    )
    refuse_failures(apply_overrides(check_guardrails(subject), overrides))


def _code_fields(code: Snapshot | None) -> dict[str, str]:
    if code is None:
        return {}
    return {
        "code_id": code.code_id,
        "code_commit": code.commit,
        "dirty_sha256": code.dirty_sha256,
        "lock_sha256": code.lock_sha256,
    }


def differences_of(old: RunManifest, new: RunManifest) -> list[Difference]:
    """Pod, code, profile, facts and values that two attempts do not share; pure."""
    told = [
        Difference(name, getattr(old, name), getattr(new, name))
        for name in _TOLD
        if getattr(old, name) != getattr(new, name)
    ]
    facts = [
        Difference(f"pod_facts.{name}", old.pod_facts.get(name), new.pod_facts.get(name))
        for name in sorted(old.pod_facts.keys() | new.pod_facts.keys())
        if old.pod_facts.get(name) != new.pod_facts.get(name)
    ]
    return [*told, *facts, *differing_values(old.config, new.config)]


def action_of(link: PodLink, old: RunManifest, new: RunManifest) -> NextAttemptAction:
    """What the agent on the new pod is asked to change, field by field."""
    fixed = {"attempt", "created_unix_s"}
    now, before = new.model_dump(mode="json"), old.model_dump(mode="json")
    changes = {key: now[key] for key in now if key not in fixed and now[key] != before[key]}
    return NextAttemptAction(
        run_dir=Path(link.run_dir(old.run_id)), from_attempt=old.attempt, changes=changes
    )
