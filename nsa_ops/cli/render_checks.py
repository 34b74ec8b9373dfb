"""Draw checks: one table, what to do about each that is not well, one verdict."""

from collections.abc import Sequence

from rich.console import Console

from nsa_core.rundir.report import CheckResult
from nsa_ops.cli.render import cell, line, table
from nsa_ops.laptop.laptop_checks import Examined
from nsa_ops.preflight.judge_files import Judgement
from nsa_ops.preflight.preflight import Preflight

_MARKS = {"pass": "ok", "warn": "warn", "fail": "FAIL", "unknown": "?", "skipped": "-"}
_COLORS = {"pass": "green", "warn": "yellow", "fail": "red", "unknown": "yellow", "skipped": "dim"}


def draw_checks(console: Console, checks: Sequence[CheckResult]) -> None:
    """Checks in one table; each that is not well is followed by what to do."""
    drawn = table(["", "CHECK", "FOUND", "LIMIT"], [])
    drawn.columns[1].no_wrap = True
    for check in checks:
        drawn.add_row(
            f"[{_COLORS[check.status]}]{_MARKS[check.status]}[/]",
            cell(check.name),
            cell(found_text(check)),
            cell(check.limit),
        )
    console.print(drawn)
    for check in checks:
        if check.hint and check.status in {"warn", "fail", "unknown"}:
            line(console, f"{check.name}: {check.hint}")


def found_text(check: CheckResult) -> str:
    """The measured value before the words about it, unless they say it already."""
    if not check.measured or check.measured in check.message:
        return check.message
    return f"{check.measured}: {check.message}"


def draw_preflight(console: Console, found: Preflight) -> None:
    """The table of a preflight and its one verdict."""
    draw_checks(console, found.report.checks)
    profile = found.report.profile
    if found.is_green and found.report.tier == "quick":
        again = f"`nsa-ops preflight {found.pod} --profile {profile}{found.flags}`"
        line(console, f"verdict: nothing stands against it so far; {again} uses the card")
    elif found.is_green:
        warned = " with warnings" if found.verdict == "warn" else ""
        next_step = f"`nsa-ops launch --pod {found.pod} --profile {profile}{found.flags}`"
        line(console, f"verdict: green{warned}; {next_step}")
    else:
        line(console, f"verdict: red because of {', '.join(found.blocking)}")


def draw_examined(console: Console, found: Examined) -> None:
    """What a laptop is like, in one table, and its one verdict."""
    draw_checks(console, found.checks)
    words = {
        "pass": "fit to operate",
        "warn": "fit to operate, with warnings",
        "fail": "not fit to operate",
    }
    line(console, f"verdict: this laptop is {words[found.verdict]}")


def draw_judgement(console: Console, found: Judgement) -> None:
    """What files tell of a machine's cards, in one table, and its one verdict."""
    draw_checks(console, found.checks)
    words = {"pass": "OK", "warn": "WARN", "fail": "FAIL", "unknown": "UNKNOWN"}
    against = f" for profile {found.profile}" if found.profile else ", without a profile"
    line(console, f"verdict: {words[found.verdict]}{against}")
