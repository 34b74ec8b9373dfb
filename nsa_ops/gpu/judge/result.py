"""How every judge words one check: the hint is kept only where there is something to do."""

from nsa_core.rundir.report import CheckResult, Status

#: Statuses that somebody should act on.
UNWELL = frozenset({"fail", "warn", "unknown"})


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
    """One check; see `CheckResult` for the parts."""
    return CheckResult(
        name=name,
        status=status,
        message=message,
        measured=measured,
        limit=limit,
        command=command,
        hint=hint if status in UNWELL else "",
    )
