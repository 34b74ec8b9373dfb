"""What the kept preflight of a pod says for a configuration that is to run there."""

from dataclasses import dataclass
from typing import Any

from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import KernelChoice
from nsa_core.rundir.report import Report
from nsa_ops.configure import Choice
from nsa_ops.context import Operator, PodLink
from nsa_ops.preflight.kernels import proven_kernels, require_proven
from nsa_ops.preflight.preflight import require_green


@dataclass(frozen=True)
class Proof:
    """What the newest preflight of the pod, code and profile says.

    Attributes:
        sha256: Hash of the report that allows the run; empty if it was overridden.
        pod_facts: What was read of the pod.
        kernels: Backends that it proved for this configuration, by branch.
        report: The report itself; None if there is none.
    """

    sha256: str
    pod_facts: dict[str, Any]
    kernels: dict[str, KernelChoice]
    report: Report | None


def find_proof(
    operator: Operator,
    link: PodLink,
    code_id: str,
    choice: Choice,
    config: RunConfig,
    *,
    is_overridden: bool,
) -> Proof:
    """The proof that a run needs; with an override, whatever there is.

    Args:
        operator: Who asks.
        link: Pod that it is to be on.
        code_id: Version of the code.
        choice: What is to run, with its profile; a hint names the same.
        config: What that is resolved to.
        is_overridden: Go on without a proof.

    Raises:
        RefusedError: Without an override, if the preflight is missing or red, or a kernel that the
            configuration names was not proven.
    """
    pod = link.record
    sha256 = "" if is_overridden else require_green(operator, pod, code_id, choice)
    stored = operator.store.newest_report(pod.pod_id, code_id, choice.profile)
    report = stored[1] if stored else None
    kernels = proven_kernels(config, report)
    if not is_overridden:
        require_proven(config, kernels)
    facts = (report.model_extra or {}).get("facts", {}) if report else {}
    return Proof(sha256, facts, kernels, report)
