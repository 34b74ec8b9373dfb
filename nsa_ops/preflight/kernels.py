"""Which attention backends a preflight has proven for a configuration; pure."""

from nsa_core.config.backend_policy import (
    Branch,
    RowLayout,
    branch_policy,
    branches_of,
    policy_text,
)
from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import KernelChoice
from nsa_core.rundir.report import Report
from nsa_ops.errors import RefusedError

_CHECK = "kernels."


def proven_kernels(config: RunConfig, report: Report | None) -> dict[str, KernelChoice]:
    """By branch, the backend that a report proved, where this configuration asks for the same.

    Args:
        config: What would be launched.
        report: Newest report of that pod, code and profile; None without one.
    """
    probed = {check.name: check for check in report.checks} if report is not None else {}
    proven = {}
    for branch in branches_of(config.model.attention):
        check = probed.get(_CHECK + branch)
        if check is not None and check.limit == policy_text(config, branch):
            proven[str(branch)] = KernelChoice(name=check.measured, reason=check.message)
    return proven


def unproven_branches(config: RunConfig, proven: dict[str, KernelChoice]) -> list[Branch]:
    """Branches of the model whose backend was never compared with the reference on that pod."""
    return [branch for branch in branches_of(config.model.attention) if branch not in proven]


def require_proven(config: RunConfig, proven: dict[str, KernelChoice]) -> None:
    """Refuse kernels that are named and were not proven; SDPA is torch's own and needs no proof.

    Raises:
        RefusedError: Names the first one.
    """
    for branch in unproven_branches(config, proven):
        policy = branch_policy(config.runtime, branch, RowLayout.of(config))
        if policy.is_named and policy.backends != ("sdpa",):
            message = (
                f"{policy.backends[0]} for the {branch} branch was not compared with the reference "
                "on that pod"
            )
            hint = "Run `nsa-ops preflight` with the same recipe and the same `--set`"
            raise RefusedError(message, hint=hint)
