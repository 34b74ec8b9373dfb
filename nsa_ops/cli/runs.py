"""Commands that change a run or show it live: `launch`, `watch`, `halt`, `resume`."""

import sys
from typing import Annotated

import typer

from nsa_ops.cli.arguments import (
    OnPodOption,
    OverrideOption,
    PodOption,
    ProfileOption,
    RecipeOption,
    RunArgument,
    SetOption,
    choice_of,
    complete_pod,
)
from nsa_ops.cli.command import command
from nsa_ops.cli.session import Session
from nsa_ops.errors import ConfigurationError

TrainerOption = Annotated[
    str, typer.Option("--trainer", metavar="MODULE", help="Python module that trains", hidden=True)
]
_TRAINER = "nsa_core.train"


commands = typer.Typer()


@command(commands, "launch", changes=True)
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
        typer.Option("--provision", help="Run `provision` and `preflight` first"),
    ] = False,
    trainer: TrainerOption = _TRAINER,
) -> None:
    """Launch a run; returns when the trainer has opened its data and trains."""
    from nsa_ops.cli.render_runs import draw_launched
    from nsa_ops.preflight.guardrails import parse_overrides
    from nsa_ops.runs.launch import LaunchRequest, execute_launch, make_ready, plan_launch
    from nsa_ops.runs.lease import OLD_POD

    choice = choice_of(recipe, profile, sets)
    overrides = parse_overrides(override or (), (OLD_POD,))
    request = LaunchRequest(choice, pod, run_id, resume_from, overrides, sys.argv, trainer)
    if provision:
        session.interrupt_note = "repeat it to continue where it stopped"
        make_ready(session.operator, request, session.agree)
    planned = plan_launch(session.operator, request)
    session.agree(planned.plan)
    session.interrupt_note = (
        f"see `nsa-ops status {planned.manifest.run_id}` for whether it started"
    )
    session.show(execute_launch(session.operator, planned), draw_launched)


@command(commands, "watch", is_emergency=True)
def watch(
    session: Session,
    run: RunArgument = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show the current state once and exit")
    ] = False,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin with the first heartbeat")
    ] = False,
) -> None:
    """Show a run live until it ends; Ctrl-C does not stop the run."""
    from nsa_ops.cli.render_runs import show_frames
    from nsa_ops.runs.watch import watch as frames

    session.interrupt_note = "the run continues"
    found = frames(session.operator, run, once=once, from_start=from_start)
    show_frames(session, found, once=once, whole=from_start)


@command(commands, "halt", changes=True, is_emergency=True)
def halt(
    session: Session,
    run: RunArgument = None,
    reason: Annotated[
        str,
        typer.Option(
            "--reason", metavar="TEXT", help="Recorded with the run; must hold no secrets"
        ),
    ] = "asked by the operator",
    pod: OnPodOption = None,
) -> None:
    """Halt a run; returns when a verified checkpoint exists, or reports that there is none."""
    from nsa_ops.cli.render_runs import draw_halted
    from nsa_ops.runs.halt import execute_halt, plan_halt

    found, plan = plan_halt(session.operator, run, reason, pod)
    session.agree(plan)
    session.interrupt_note = "the stop request remains; see `nsa-ops status`"
    session.show(execute_halt(session.operator, found, reason), draw_halted)


@command(commands, "resume", changes=True)
def resume(
    session: Session,
    run: RunArgument = None,
    path: Annotated[
        str,
        typer.Option(
            "--from", metavar="PATH", help="Checkpoint on the pod; default: the newest verified one"
        ),
    ] = "",
    sets: SetOption = None,
    afresh: Annotated[
        bool,
        typer.Option("--afresh", help="Begin at the first step; old checkpoints are set aside"),
    ] = False,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Resume from an older checkpoint and compare the losses"),
    ] = False,
    pod: Annotated[
        str | None,
        typer.Option(
            "--pod",
            metavar="POD",
            help="Resume on another pod, from the backup",
            autocompletion=complete_pod,
        ),
    ] = None,
    override: OverrideOption = None,
    trainer: TrainerOption = "",
) -> None:
    """Resume a run from its newest verified checkpoint, on its pod or on another."""
    from nsa_ops.cli.render_runs import draw_proven, draw_resumed
    from nsa_ops.report.prove import await_replay, find_replay
    from nsa_ops.runs.move import is_elsewhere
    from nsa_ops.runs.resume import execute_resume, plan_resume

    if pod is not None and is_elsewhere(session.operator, run, pod):
        is_plain = not (path or prove or afresh)
        _move(session, run, pod, sets, override, trainer, is_plain=is_plain)
        return
    if afresh and (path or prove):
        message = "`--afresh` begins at the first step, but `--from` and `--prove` at a checkpoint"
        raise ConfigurationError(message, hint="Leave out one of them")
    if override and pod is None:
        message = "`--override` only works with `--pod`, for a resume on another pod"
        raise ConfigurationError(message, hint="Leave it out")
    if prove:
        path = find_replay(session.operator, run, path=path, sets=sets or ())
    planned = plan_resume(
        session.operator, run, path=path, afresh=afresh, sets=tuple(sets or ()),
        trainer_module=trainer,
    )  # fmt: skip
    session.agree(planned.plan)
    session.interrupt_note = "see `nsa-ops status` for whether it started"
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
    session.interrupt_note = "repeat it to continue where it stopped; nothing is started twice"
    session.show(execute_move(session.operator, planned), draw_resumed)
