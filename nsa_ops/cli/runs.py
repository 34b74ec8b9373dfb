"""Commands of the everyday path: preflight, launch, watch, halt, resume."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from nsa_ops.cli.arguments import (
    OnPodOption,
    OverrideOption,
    PodArgument,
    PodOption,
    ProfileOption,
    RecipeOption,
    RunArgument,
    SetOption,
)
from nsa_ops.cli.command import command
from nsa_ops.cli.complete import complete_pod
from nsa_ops.cli.session import Session
from nsa_ops.errors import ConfigurationError

TrainerOption = Annotated[
    str, typer.Option("--trainer", metavar="MODULE", help="Python module that trains", hidden=True)
]
_TRAINER = "nsa_core.train"


def register(app: typer.Typer) -> None:
    """Add these commands to the root."""
    command(app, "preflight")(preflight)
    command(app, "launch", changes=True)(launch)
    command(app, "watch", is_emergency=True)(watch)
    command(app, "halt", changes=True, is_emergency=True)(halt)
    command(app, "resume", changes=True)(resume)


def preflight(
    session: Session,
    pod: PodArgument = None,
    profile: ProfileOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    override: OverrideOption = None,
    full: Annotated[bool, typer.Option("--full", help="Add the long tests")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only look, in seconds; no launch may follow it")
    ] = False,
    evidence: Annotated[
        list[Path] | None,
        typer.Option(
            "--evidence", metavar="FILE", help="Judge what tools printed elsewhere; may be repeated"
        ),
    ] = None,
) -> None:
    """Check a pod, the configuration and the model's correctness on that very card."""
    from nsa_ops.cli.render_checks import draw_judgement, draw_preflight
    from nsa_ops.configure import RunChoice
    from nsa_ops.preflight.guardrails import parse_overrides
    from nsa_ops.preflight.judge_files import judge_files, refusal_by_evidence
    from nsa_ops.preflight.preflight import refusal_of, run_preflight

    if evidence:
        judged = judge_files(evidence, profile or session.settings.values.profile, pod)
        session.show(judged, draw_judgement, failure=refusal_by_evidence(judged))
        return
    choice = RunChoice(recipe or "", profile or "", tuple(sets or ()))
    overrides = parse_overrides(override or ())
    if full and quick:
        message = "`--quick` and `--full` cannot go together"
        raise typer.BadParameter(message)
    tier: Literal["quick", "standard", "full"]
    tier = "full" if full else "quick" if quick else "standard"
    session.interrupt_note = "no verdict was recorded"
    found = run_preflight(session.operator, pod, choice, overrides, tier)
    session.show(found, draw_preflight, failure=refusal_of(found))


def launch(
    session: Session,
    profile: ProfileOption = None,
    pod: PodOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    run_id: Annotated[str, typer.Option("--run-id", metavar="ID", help="Name of the run")] = "",
    resume_from: Annotated[
        str, typer.Option("--resume-from", metavar="PATH", help="Checkpoint on the pod")
    ] = "",
    override: OverrideOption = None,
    provision: Annotated[
        bool,
        typer.Option("--provision", help="Make a bare pod ready first: set-up, then preflight"),
    ] = False,
    trainer: TrainerOption = _TRAINER,
) -> None:
    """Launch a run; returns when it has opened its data and trains."""
    from nsa_ops.cli.render_runs import draw_launched
    from nsa_ops.configure import RunChoice
    from nsa_ops.preflight.guardrails import parse_overrides
    from nsa_ops.runs.launch import LaunchRequest, execute_launch, make_ready, plan_launch
    from nsa_ops.runs.lease import OLD_POD

    choice = RunChoice(recipe or "", profile or "", tuple(sets or ()))
    overrides = parse_overrides(override or (), (OLD_POD,))
    request = LaunchRequest(choice, pod, run_id, resume_from, overrides, sys.argv, trainer)
    if provision:
        session.interrupt_note = "repeat it: it goes on where it stopped"
        make_ready(session.operator, request, session.agree)
    planned = plan_launch(session.operator, request)
    session.agree(planned.plan)
    session.interrupt_note = f"ask `nsa-ops status {planned.manifest.run_id}` whether it started"
    session.show(execute_launch(session.operator, planned), draw_launched)


def watch(
    session: Session,
    run: RunArgument = None,
    once: Annotated[bool, typer.Option("--once", help="One look only")] = False,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin with the first heartbeat")
    ] = False,
) -> None:
    """Show a run live until it ends; Ctrl-C leaves the run alone."""
    from nsa_ops.cli.render_runs import show_frames
    from nsa_ops.runs.watch import watch as frames

    session.interrupt_note = "the run goes on"
    found = frames(session.operator, run, once=once, from_start=from_start)
    show_frames(session, found, once=once, whole=from_start)


def halt(
    session: Session,
    run: RunArgument = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; recorded with the run, no secrets")
    ] = "asked by the operator",
    pod: OnPodOption = None,
) -> None:
    """Halt a run; returns when a verified checkpoint exists, or says there is none."""
    from nsa_ops.cli.render_runs import draw_halted
    from nsa_ops.runs.halt import execute_halt, plan_halt

    found, plan = plan_halt(session.operator, run, reason, pod)
    session.agree(plan)
    session.interrupt_note = "the stop request stands; see `nsa-ops status`"
    session.show(execute_halt(session.operator, found, reason), draw_halted)


def resume(
    session: Session,
    run: RunArgument = None,
    path: Annotated[
        str, typer.Option("--from", metavar="PATH", help="Checkpoint on the pod; newest whole one")
    ] = "",
    sets: SetOption = None,
    afresh: Annotated[
        bool,
        typer.Option("--afresh", help="Begin at the first step; checkpoints are set aside"),
    ] = False,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Go on from an older checkpoint and compare the losses"),
    ] = False,
    pod: Annotated[
        str | None,
        typer.Option(
            "--pod",
            metavar="POD",
            help="Another pod: go on there from the backup",
            autocompletion=complete_pod,
        ),
    ] = None,
    override: OverrideOption = None,
    trainer: TrainerOption = "",
) -> None:
    """Go on with a run from its newest verified checkpoint, here or on another pod."""
    from nsa_ops.cli.render_runs import draw_proven, draw_resumed
    from nsa_ops.report.prove import await_replay, find_replay
    from nsa_ops.runs.move import is_elsewhere
    from nsa_ops.runs.resume import execute_resume, plan_resume

    if pod is not None and is_elsewhere(session.operator, run, pod):
        is_plain = not (path or prove or afresh)
        _move(session, run, pod, sets, override, trainer, is_plain=is_plain)
        return
    if afresh and (path or prove):
        message = "`--afresh` begins at the first step, and `--from` and `--prove` at a checkpoint"
        raise ConfigurationError(message, hint="Leave out one of them")
    if override and pod is None:
        message = "`--override` belongs to a resume on another pod, with `--pod`"
        raise ConfigurationError(message, hint="Leave it out")
    if prove:
        path = find_replay(session.operator, run, path=path, sets=sets or ())
    planned = plan_resume(
        session.operator, run, path=path, afresh=afresh, sets=tuple(sets or ()),
        trainer_module=trainer,
    )  # fmt: skip
    session.agree(planned.plan)
    session.interrupt_note = "see `nsa-ops status` whether it started"
    resumed = execute_resume(session.operator, planned)
    if prove:
        session.show(await_replay(session.operator, planned, resumed), draw_proven)
    else:
        session.show(resumed, draw_resumed)


def _move(
    session: Session,
    run: str | None,
    pod: str,
    sets: list[str] | None,
    override: list[str] | None,
    trainer: str,
    *,
    is_plain: bool,
) -> None:
    from nsa_ops.cli.render_runs import draw_resumed
    from nsa_ops.preflight.guardrails import parse_overrides
    from nsa_ops.runs.lease import OLD_POD
    from nsa_ops.runs.move import MoveRequest, execute_move, plan_move

    if not is_plain:
        message = "A resume on another pod begins at the newest verified backup"
        raise ConfigurationError(message, hint="Leave out `--from`, `--prove` and `--afresh`")
    overrides = parse_overrides(override or (), (OLD_POD,))
    request = MoveRequest(run, pod, tuple(sets or ()), overrides, trainer)
    planned = plan_move(session.operator, request)
    session.agree(planned.plan)
    session.interrupt_note = "repeat it: it goes on where it stopped, and starts nothing twice"
    session.show(execute_move(session.operator, planned), draw_resumed)
