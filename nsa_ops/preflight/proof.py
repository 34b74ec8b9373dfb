"""What allows a run on a pod: no mark of a watchdog, a green preflight, proven kernels."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_core.config.backend_policy import RowLayout, branch_policy, branches_of, policy_text
from nsa_core.config.run import RunConfig
from nsa_core.rundir.bounded_json import parse_model
from nsa_core.rundir.manifest import KernelChoice
from nsa_core.rundir.report import CheckResult, Report
from nsa_ops.configure import RunChoice
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import NotFoundError, RefusedError
from nsa_ops.pod.card_watch import MARK_NAME, PodMark
from nsa_ops.preflight.guardrails import PREFLIGHT
from nsa_ops.preflight.several_cards import num_cards
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.store import PodRecord

#: Key of the hash in a report, which binds pod, code and profile by itself.
PROBED = "probed_sha256"
_COMPUTED = (
    "device", "precision", "backend_compressed", "backend_selected", "backend_sliding",
    "backend_dense", "flash_min_len_compressed", "flash_min_len_sliding", "compile",
    "deterministic",
)  # fmt: skip
#: The causality and parity probes have no second chance: they must pass, not merely not fail.
_CORRECTNESS = ("causality.", "parity.", "decode.")
_MAX_MARK_BYTES = 65_536


@dataclass(frozen=True)
class Proof:
    """What the newest preflight of the pod, code and profile says.

    Attributes:
        sha256: Hash of the report that allows the run; empty if it was overridden.
        kernels: Backends that it proved for this configuration, by branch.
    """

    sha256: str
    pod_facts: dict[str, Any]
    kernels: dict[str, KernelChoice]
    report: Report | None


def find_proof(
    operator: Operator,
    link: PodLink,
    code_id: str,
    choice: RunChoice,
    config: RunConfig,
    overrides: Mapping[str, str],
) -> Proof:
    """The proof that a run needs; where the preflight is overridden, whatever there is.

    Raises:
        RefusedError: Without an override, if the preflight is missing or red, or a kernel that the
            configuration names was not proven.
    """
    pod = link.record
    is_overridden = PREFLIGHT in overrides
    sha256 = "" if is_overridden else require_green(operator, pod, code_id, choice)
    stored = operator.store.newest_report(pod.pod_id, code_id, choice.profile)
    report = stored[1] if stored else None
    kernels = proven_kernels(config, report)
    if not is_overridden:
        require_proven(config, kernels)
        require_summed(pod.name, choice, config, report)
    return Proof(sha256, _facts(report), kernels, report)


def require_green(operator: Operator, pod: PodRecord, code_id: str, choice: RunChoice) -> str:
    """Hash of the green report for a pod, a version of the code and the profile of a choice.

    Raises:
        RefusedError: If there is none; the hint names the command.
    """
    found = operator.store.newest_report(pod.pod_id, code_id, choice.profile)
    if found is None:
        message = (
            f"Pod `{pod.name}` has no preflight for code {code_id} and profile {choice.profile}"
        )
        command = f"`nsa-ops preflight {pod.name} --profile {choice.profile}{choice.flags}`"
        raise RefusedError(message, hint=f"Run {command}")
    sha256, report = found
    blocking = blocking_checks(report.checks)
    if blocking:
        raise red_preflight(pod.name, choice.profile, choice.flags, blocking)
    return sha256


def red_preflight(pod: str, profile: str, flags: str, blocking: Sequence[str]) -> RefusedError:
    """What a red preflight means for a launch; `flags` make the same choice again."""
    message = f"The preflight of pod `{pod}` is red: {', '.join(blocking)}"
    hint = f"Fix it, then run `nsa-ops preflight {pod} --profile {profile}{flags}` again"
    return RefusedError(message, hint=hint)


def blocking_checks(checks: Sequence[CheckResult]) -> list[str]:
    """Names of checks that forbid a launch: failures, and correctness that was not proven."""
    names = [
        check.name
        for check in checks
        if check.status == "fail"
        or (check.status == "unknown" and check.name.startswith(_CORRECTNESS))
    ]
    has_proof = any(
        check.status == "pass" and check.name.startswith("causality.") for check in checks
    )
    return names if has_proof else [*names, "causality (no probe passed)"]


def probed_sha256(config: RunConfig) -> str:
    """Hash of what the probes were about: sizes of the model, precision, kernels and compiler."""
    part = {
        "model": config.model.model_dump(mode="json"),
        "runtime": config.runtime.model_dump(mode="json", include=set(_COMPUTED)),
    }
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def note_another_probed(report: Report | None, config: RunConfig) -> list[str]:
    """A warning if the green report proved another model, or other kernels; pure."""
    probed = (report.model_extra or {}).get(PROBED) if report else None
    if probed is None or probed == probed_sha256(config):
        return []
    return [
        "the preflight proved another model or other kernels than this configuration has; prove "
        f"these with `nsa-ops preflight --recipe {config.recipe}` and the same `--set`"
    ]


def proven_kernels(config: RunConfig, report: Report | None) -> dict[str, KernelChoice]:
    """By branch, the backend that a report proved, where this configuration asks for the same."""
    probed = {check.name: check for check in report.checks} if report is not None else {}
    proven = {}
    for branch in branches_of(config.model.attention):
        check = probed.get(f"kernels.{branch}")
        if check is not None and check.limit == policy_text(config, branch):
            proven[str(branch)] = KernelChoice(name=check.measured, reason=check.message)
    return proven


def require_proven(config: RunConfig, proven: Mapping[str, KernelChoice]) -> None:
    """Refuse kernels that are named and were not proven; SDPA is torch's own and needs no proof."""
    for branch in branches_of(config.model.attention):
        policy = branch_policy(config.runtime, branch, RowLayout.of(config))
        if branch not in proven and policy.is_named and policy.backends != ("sdpa",):
            message = (
                f"{policy.backends[0]} for the {branch} branch was not compared with the reference "
                "on that pod"
            )
            hint = "Run `nsa-ops preflight` with the same recipe and the same `--set`"
            raise RefusedError(message, hint=hint)


def require_summed(pod: str, choice: RunChoice, config: RunConfig, report: Report | None) -> None:
    """Refuse several cards that the preflight did not sum a tensor over, on one pod or on many.

    Raises:
        RefusedError: If so; the hint measures it.
    """
    wanted, command = num_cards(config), f"nsa-ops preflight {pod} --profile {choice.profile}"
    if config.num_ranks > 1 and config.runtime.device == "cuda" and not _facts(report).get("nccl"):
        message = (
            f"{config.num_ranks} ranks on cards need NCCL, and no preflight of pod `{pod}` found it"
        )
        raise RefusedError(message, hint=f"Run `{command}{choice.flags}`")
    found = num_summed(report)
    if wanted > max(1, found):
        did = f"summed over {found}" if found else "summed over none"
        message = f"The run takes {wanted} cards of pod `{pod}`, and its preflight {did}"
        raise RefusedError(message, hint=f"Run `{command}{choice.flags}`")


def _facts(report: Report | None) -> dict[str, Any]:
    """What a report keeps of its pod."""
    facts = (report.model_extra or {}).get("facts") if report else None
    return facts if isinstance(facts, dict) else {}


def num_summed(report: Report | None) -> int:
    """Cards over which a report proved a sum: NCCL is there, and the result was right."""
    facts, checks = _facts(report), report.checks if report else []
    count = facts.get("num_cards")
    is_summed = any(
        check.name == "gpus.all_reduce" and check.measured and check.status != "fail"
        for check in checks
    )
    return count if isinstance(count, int) and facts.get("nccl") and is_summed else 0


def refuse_marked(link: PodLink, overrides: Mapping[str, str]) -> None:
    """Refuse a pod that a watchdog has marked since the last green preflight.

    Raises:
        RefusedError: Unless the preflight itself is overridden; names the run and the rule.
    """
    mark = _read_mark(link)
    if mark is None or PREFLIGHT in overrides:
        return
    pod = link.record.name
    message = f"Pod `{pod}` was marked by the watchdog of `{mark.run_id}`: {mark.sentence}"
    hint = f"A green `nsa-ops preflight {pod}` removes the mark; else continue on another pod"
    raise RefusedError(message, hint=hint)


def clear_mark(link: PodLink) -> bool:
    """Remove a mark after a green preflight; whether there was one."""
    if _read_mark(link) is None:
        return False
    path = str(link.root / MARK_NAME)
    link.transport.run(("rm", "-f", "--", path), timeout_s=QUICK_S)
    return True


def _read_mark(link: PodLink) -> PodMark | None:
    path = str(link.root / MARK_NAME)
    try:
        content = link.transport.tail(path, 0, max_bytes=_MAX_MARK_BYTES, timeout_s=QUICK_S)
        return parse_model(PodMark, content)
    except NotFoundError:
        return None
    except ValueError:
        return PodMark(run_id="unknown", rule="unknown", sentence="its mark cannot be read", at=0.0)
