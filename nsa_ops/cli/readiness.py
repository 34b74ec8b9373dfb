"""Commands that make a pod ready for a run and prove it: `provision` and `preflight`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nsa_ops.cli.arguments import (
    OverrideOption,
    PodArgument,
    ProfileOption,
    RecipeOption,
    SetOption,
    choice_of,
)
from nsa_ops.cli.command import command
from nsa_ops.cli.console import draw_checks, facts, line
from nsa_ops.cli.session import Session

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_ops.preflight.judge_files import Judgement
    from nsa_ops.preflight.preflight import Preflight
    from nsa_ops.provision.provisioning import Provisioned

commands = typer.Typer()


@command(commands, "preflight")
def preflight(
    session: Session,
    pod: PodArgument = None,
    profile: ProfileOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    override: OverrideOption = None,
    full: Annotated[bool, typer.Option("--full", help="Also run the long tests")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Only read facts, in seconds; not enough for a launch"),
    ] = False,
    evidence: Annotated[
        list[Path] | None,
        typer.Option(
            "--evidence",
            metavar="FILE",
            help="Judge saved output of GPU tools instead of a pod; may be repeated",
        ),
    ] = None,
) -> None:
    """Check a pod, the configuration, and that the model computes correctly on the pod's GPU."""
    from nsa_ops.preflight.guardrails import parse_overrides
    from nsa_ops.preflight.judge_files import judge_files, refusal_by_evidence
    from nsa_ops.preflight.preflight import refusal_of, run_preflight

    if evidence:
        judged = judge_files(evidence, profile or session.settings.values.profile, pod)
        session.show(judged, draw_judgement, failure=refusal_by_evidence(judged))
        return
    overrides = parse_overrides(override or ())
    if full and quick:
        message = "`--quick` and `--full` cannot go together"
        raise typer.BadParameter(message)
    tier: Literal["quick", "standard", "full"]
    tier = "full" if full else "quick" if quick else "standard"
    session.interrupt_note = "no verdict was recorded"
    choice = choice_of(recipe, profile, sets)
    found = run_preflight(session.operator, pod, choice, overrides, tier)
    session.show(found, draw_preflight, failure=refusal_of(found))


def draw_preflight(console: "Console", found: "Preflight") -> None:
    """The table of a preflight and its one verdict."""
    draw_checks(console, found.report.checks)
    profile = found.report.profile
    if found.is_green and found.report.tier == "quick":
        again = f"`nsa-ops preflight {found.pod} --profile {profile}{found.flags}`"
        line(console, f"verdict: no problem found so far; {again} tests the GPU itself")
    elif found.is_green:
        warned = " with warnings" if found.verdict == "warn" else ""
        next_step = f"`nsa-ops launch --pod {found.pod} --profile {profile}{found.flags}`"
        line(console, f"verdict: green{warned}; {next_step}")
    else:
        line(console, f"verdict: red because of {', '.join(found.blocking)}")


def draw_judgement(console: "Console", found: "Judgement") -> None:
    """What saved files show about a machine's GPUs, in one table, and its one verdict."""
    draw_checks(console, found.checks)
    words = {"pass": "OK", "warn": "WARN", "fail": "FAIL", "unknown": "UNKNOWN"}
    against = f" for profile {found.profile}" if found.profile else ", without a profile"
    line(console, f"verdict: {words[found.verdict]}{against}")


@command(commands, "provision", changes=True)
def provision(
    session: Session,
    pod: PodArgument = None,
    profile: ProfileOption = None,
    flash_attention: Annotated[
        Path | None,
        typer.Option("--with-flash-attn", metavar="WHEEL", help="flash-attn wheel to install"),
    ] = None,
) -> None:
    """Install what a run needs on a pod; if repeated, only what is still missing."""
    from nsa_ops.provision.provisioning import execute_provision, plan_provision

    planned = plan_provision(session.operator, pod, profile or "", flash_attention)
    session.agree(planned.plan)
    session.interrupt_note = "repeat it to continue where it stopped"
    session.show(execute_provision(session.operator, planned), draw_provisioned)


def draw_provisioned(console: "Console", found: "Provisioned") -> None:
    """The receipt, the machine's checks, and the next command."""
    receipt, installed = found.receipt, found.receipt.installed
    facts(
        console,
        [
            ("pod", found.pod.name),
            ("done", ", ".join(found.done) or "nothing: it was provisioned already"),
            ("python", receipt.python),
            ("torch", f"{installed.torch_version if installed else '?'}, {receipt.torch_build}"),
            ("packages", installed.num_packages if installed else ""),
            ("flash-attn", receipt.flash_attention),
            ("code", f"{receipt.code_id} of commit {receipt.code_commit[:12]}"),
            ("missing", ", ".join(receipt.missing)),
        ],
    )
    draw_checks(console, found.checks)
    line(console, f"next: `nsa-ops preflight {found.pod.name} --profile {receipt.profile}`")
