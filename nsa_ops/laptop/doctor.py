"""Doctor: look at this laptop, judge it, and say what to mend."""

from dataclasses import dataclass
from typing import Literal

from nsa_core.rundir.report import CheckResult, verdict_of
from nsa_ops.errors import RefusedError
from nsa_ops.laptop.facts import read_laptop
from nsa_ops.laptop.judge import judge_laptop
from nsa_ops.settings import Settings


@dataclass(frozen=True)
class Examined:
    """What was found.

    Attributes:
        checks: Every check.
        verdict: `pass`, `warn` or `fail`, by the worst of them.
    """

    checks: list[CheckResult]
    verdict: Literal["pass", "warn", "fail"]


def examine(settings: Settings, settings_problem: str = "") -> Examined:
    """Look at this laptop; see `read_laptop` for the arguments."""
    checks = judge_laptop(read_laptop(settings, settings_problem))
    return Examined(checks, verdict_of(checks))


def refusal_of(found: Examined) -> RefusedError | None:
    """What a laptop that is not fit means; None if it is."""
    failed = [check.name for check in found.checks if check.status == "fail"]
    if not failed:
        return None
    message = f"This laptop is not fit to operate: {', '.join(failed)}"
    return RefusedError(message, hint="Mend what is marked above, then run `nsa-ops doctor` again")
