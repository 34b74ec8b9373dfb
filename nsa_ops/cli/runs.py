"""Commands that change a run or show it live: `launch`, `watch`, `halt`, `resume`."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_ops.cli.arguments import (
    OnPodOption,
    OverrideOption,
    PodOption,
    PodsOption,
    PortOption,
    ProfileOption,
    RecipeOption,
    RunArgument,
    SetOption,
    choice_of,
    complete_pod,
)
from nsa_ops.cli.command import command
from nsa_ops.cli.console import cell_text, envelope, facts, line
from nsa_ops.cli.session import Session
from nsa_ops.cli.several_pods import (
    halt_all,
    launch_on,
    refuse_both,
    refuse_port,
    resume_on,
)
from nsa_ops.errors import ConfigurationError
from nsa_ops.quantities import count_of

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_core.rundir.heartbeat import Heartbeat
    from nsa_ops.report.prove import ProvenResume
    from nsa_ops.runs.halt import Halted
    from nsa_ops.runs.launch import Launched
    from nsa_ops.runs.resume import Resumed
    from nsa_ops.runs.watch import Frame


TrainerOption = Annotated[
    str, typer.Option("--trainer", metavar="MODULE", help="Python module that trains", hidden=True)
]
_TRAINER = "nsa_core.train"


#: Off a terminal the state of a run without news is reported every 10 s.
_SILENT_FRAMES = 5
#: Of the past so many records and events are shown.
_NEWEST = 10

commands = typer.Typer()


@command(commands, "launch", changes=True)
def launch(
    session: Session,
    profile: ProfileOption = None,
    pod: PodOption = None,
    pods: PodsOption = None,
    port: PortOption = None,
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
    """Launch a run, on one pod or on several that train together; returns when it trains."""
    from nsa_ops.preflight.guardrails import parse_overrides
    from nsa_ops.runs.launch import LaunchRequest, execute_launch, make_ready, plan_launch
    from nsa_ops.runs.lease import OLD_POD

    choice = choice_of(recipe, profile, sets)
    overrides = parse_overrides(override or (), (OLD_POD,))
    request = LaunchRequest(choice, pod, run_id, resume_from, overrides, sys.argv, trainer)
    if pods is not None:
        launched = launch_on(session, request, pods, port, is_provisioned=provision)
        session.show(launched, draw_launched)
        return
    refuse_port(port)
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
    from nsa_ops.runs.choose import LIVE, choose_record
    from nsa_ops.runs.halt import execute_halt, plan_halt

    record = choose_record(session.operator, run, among=LIVE) if pod is None else None
    if record is not None and record.others:
        stopped = halt_all(session, record, reason)
        session.show(stopped.halted, draw_halted, failure=stopped.partial)
        return
    run = record.run_id if record is not None else run
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
    pods: PodsOption = None,
    port: PortOption = None,
    override: OverrideOption = None,
    trainer: TrainerOption = "",
) -> None:
    """Resume a run from its newest verified checkpoint, on its pods or on others."""
    from nsa_ops.fleet.move import is_elsewhere
    from nsa_ops.fleet.source import FleetResumeRequest
    from nsa_ops.preflight.guardrails import parse_overrides
    from nsa_ops.report.prove import await_replay, find_replay
    from nsa_ops.runs.choose import RESUMABLE, choose_record
    from nsa_ops.runs.lease import OLD_POD
    from nsa_ops.runs.resume import execute_resume, plan_resume

    refuse_both(pod, pods)
    overrides, changed = parse_overrides(override or (), (OLD_POD,)), tuple(sets or ())
    record = choose_record(session.operator, run, among=RESUMABLE) if pods is None else None
    run = record.run_id if record is not None else run
    is_moved = (
        record is not None and pod is not None and is_elsewhere(session.operator, record, pod)
    )
    if record is None or record.others or is_moved:
        names = pods if pods is not None else pod
        request = FleetResumeRequest(
            run, tuple(names.split(",")) if names is not None else (), port, path, afresh,
            changed, overrides, trainer,
        )  # fmt: skip
        session.show(resume_on(session, request, prove=prove), draw_resumed)
        return
    refuse_port(port)
    if afresh and (path or prove):
        message = "`--afresh` begins at the first step, but `--from` and `--prove` at a checkpoint"
        raise ConfigurationError(message, hint="Leave out one of them")
    if override and pod is None:
        message = "`--override` only works with `--pod`, for a resume on another pod"
        raise ConfigurationError(message, hint="Leave it out")
    if prove:
        path = find_replay(session.operator, run, path=path, sets=changed)
    planned = plan_resume(
        session.operator, run, path=path, afresh=afresh, sets=changed, trainer_module=trainer
    )
    session.agree(planned.plan)
    session.interrupt_note = "see `nsa-ops status` for whether it started"
    resumed = execute_resume(session.operator, planned)
    if prove:
        session.show(await_replay(session.operator, planned, resumed), draw_proven)
    else:
        session.show(resumed, draw_resumed)


def draw_launched(console: "Console", launched: "Launched") -> None:
    """A run that is there now."""
    from nsa_ops.cli.render_run import data_text

    after = launched.first_beat_after_s
    come = "launched before" if after is None else f"first heartbeat after {after:.0f} s"
    where = f"pods {', '.join(launched.pods)}" if launched.pods else f"pod {launched.pod}"
    line(console, f"{launched.run_id} on {where}: {come}")
    pairs = [
        ("state", f"{launched.state} ({launched.why})"),
        ("attempt", launched.attempt),
        ("directory", launched.run_dir),
        ("data", data_text(launched.data)),
        ("next", f"nsa-ops watch {launched.run_id}"),
    ]
    facts(console, pairs)


def draw_halted(console: "Console", halted: "Halted") -> None:
    """A run that does not run, and what it left."""
    after = f" after {' and '.join(halted.signals)}" if halted.signals else ""
    line(console, f"{halted.run_id} is {halted.state}{after}: {halted.why}")
    for damage in halted.damaged:
        line(console, f"not whole: {damage}")
    checkpoint = halted.checkpoint
    if halted.node_rank:
        line(console, f"this is pod {halted.node_rank} of its pods; pod 0 has the checkpoints")
        return
    if checkpoint is None:
        line(console, "there is no whole checkpoint; a resume begins with the first step")
        return
    behind = f", {count_of(halted.lost_steps, 'step')} behind" if halted.lost_steps else ""
    line(console, f"verified checkpoint: step {checkpoint.step}{behind}, {checkpoint.path}")
    if halted.state != "finished":
        line(console, f"continue with `nsa-ops resume {halted.run_id}`")


def draw_resumed(console: "Console", resumed: "Resumed") -> None:
    """A run that continues."""
    after = f"first heartbeat after {resumed.first_beat_after_s:.0f} s"
    where = f"from step {resumed.from_step}" if resumed.checkpoint else "from the first step"
    moved = f" on pod {resumed.pod}, not on {resumed.moved_from}" if resumed.moved_from else ""
    moved = f" on pods {', '.join(resumed.pods)}" if resumed.pods else moved
    line(console, f"{resumed.run_id} attempt {resumed.attempt} {where}{moved}: {after}")
    for one in resumed.differences:
        line(console, f"differs: {one.key} {cell_text(one.before)} -> {cell_text(one.now)}")
    if not resumed.differences:
        line(console, "configuration: the same as before")
    facts(console, [("state", f"{resumed.state} ({resumed.why})")])


def draw_proven(console: "Console", proven: "ProvenResume") -> None:
    """A resume and the steps that were done twice."""
    draw_resumed(console, proven.resumed)
    replay = proven.replay
    line(
        console,
        f"exact: {count_of(replay.num_compared, 'loss', 'losses')} of steps {replay.first_step} to "
        f"{replay.last_step}, the same to the last digit",
    )


def show_frames(
    session: Session, frames: "Iterator[Frame]", *, once: bool = False, whole: bool = False
) -> None:
    """JSON lines with `--json`, a live view on a terminal, else a line for each new record.

    `once`: there is one frame: its summary and the newest records are drawn.
    `whole`: the records of the past are wanted from the first one on.
    """
    from nsa_ops.cli.render_run import draw_frame

    if session.options.json:
        for frame in frames:
            typer.echo(envelope(session.command, _without_history(frame)))
    elif once:
        for frame in frames:
            records = _records(frame)
            draw_frame(session.console, frame, records if whole else records[-_NEWEST:])
    elif session.console.is_terminal:
        _live(session, frames)
    else:
        _lines(session, frames, whole=whole)


def _without_history(frame: "Frame") -> "Frame":
    """Each record goes out once: as news of its frame, neither as history nor in the report."""
    report = frame.report.model_copy(update={"beats": [], "events": []})
    return replace(frame, report=report, progress=[])


def _records(frame: "Frame") -> "list[Heartbeat]":
    return [beat for beat in frame.beats if beat.loss is not None]


def _live(session: Session, frames: "Iterator[Frame]") -> None:
    from rich.live import Live

    from nsa_ops.cli.render_run import frame_view

    with Live(console=session.console, auto_refresh=False) as live:
        for frame in frames:
            live.update(frame_view(frame, session.console.encoding), refresh=True)


def _lines(session: Session, frames: "Iterator[Frame]", *, whole: bool) -> None:
    """The past in its newest lines, unless all of it is wanted; then everything that is new."""
    from nsa_ops.cli.render_run import draw_frame, progress_line

    last, num_silent = None, 0
    for frame in frames:
        records, events = _records(frame), frame.events
        if last is None and not whole:
            records, events = records[-_NEWEST:], events[-_NEWEST:]
        for beat in records:
            typer.echo(progress_line(beat))
        for event in events:
            session.tell(f"event: {event.kind} by {event.by}: {event.message}")
        num_silent = 0 if records or events else num_silent + 1
        if num_silent and num_silent % _SILENT_FRAMES == 0:
            session.tell(f"{frame.report.state}: {frame.report.why}")
        last = frame
    if last is not None:
        draw_frame(session.console, last)
