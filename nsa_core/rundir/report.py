"""What preflight and the probes on the card found: one result per check, one verdict."""

from collections.abc import Sequence
from typing import Literal

from nsa_core.config.base import TolerantModel

Status = Literal["pass", "warn", "fail", "unknown", "skipped"]


class CheckResult(TolerantModel):
    """One check.

    Attributes:
        name: Stable id such as `causality.perturbation`.
        status: `unknown` is not `pass`; `skipped` says why in `message`.
        message: What was found, in one line.
        measured: The measured value with its unit.
        limit: What it was held against.
        command: How to see it yourself.
        hint: What to do about it.
        seconds: How long the check took.
    """

    name: str
    status: Status
    message: str
    measured: str = ""
    limit: str = ""
    command: str = ""
    hint: str = ""
    seconds: float = 0.0


def checked(
    name: str,
    status: Status,
    message: str,
    *,
    measured: str = "",
    limit: str = "",
    command: str = "",
    hint: str = "",
) -> CheckResult:
    """One check, whose hint is kept only where there is something to do."""
    return CheckResult(
        name=name, status=status, message=message, measured=measured, limit=limit, command=command,
        hint=hint if status in {"fail", "warn", "unknown"} else "",
    )  # fmt: skip


class ProbeBegun(TolerantModel):
    """Said before each probe of a card: how many are done, how many there are, and which begins."""

    done: int
    total: int
    probe: str


class Report(TolerantModel):
    """All checks of one preflight, bound to the pod, the code and the profile they hold for."""

    schema_version: int = 1
    at: float
    tier: str = "quick"
    pod_id: str = ""
    code_id: str = ""
    profile: str = ""
    checks: list[CheckResult]

    @property
    def verdict(self) -> Literal["pass", "warn", "fail"]:
        """`fail` if a check failed, `warn` if one warned or could not tell, else `pass`."""
        return verdict_of(self.checks)


def verdict_of(checks: Sequence[CheckResult]) -> Literal["pass", "warn", "fail"]:
    """The verdict over several checks; see `Report.verdict`."""
    found = {check.status for check in checks}
    if "fail" in found:
        return "fail"
    return "warn" if found & {"warn", "unknown"} else "pass"
