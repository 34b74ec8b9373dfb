"""One attempt from the first line to the last, once torch may be loaded."""

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from nsa_core.model.weights import model_tensors
from nsa_core.recall.by_depth import measure_recall
from nsa_core.rundir.atomic import fsync_dir, fsync_file
from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.goodput import read_goodput
from nsa_core.rundir.layout import RunDir
from nsa_core.train.checkpoint import advise, is_disk_full, to_host
from nsa_core.train.context import AttemptContext
from nsa_core.train.environment import write_environment
from nsa_core.train.failure import DiskFullError
from nsa_core.train.goodput import start_clock
from nsa_core.train.loop import train
from nsa_core.train.prepare import prepare
from nsa_core.train.samples import write_samples
from nsa_core.train.session import Session
from nsa_core.train.stop import StopAskedError, StopRequest, StopWatch
from nsa_core.train.summary import write_summary
from nsa_core.train.telemetry import Telemetry


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended in good order."""

    code: TrainerExit
    reason: str


def run_training(
    context: AttemptContext, telemetry: Telemetry, last_alive: float | None
) -> Outcome:
    """Prepare, train, and finish or acknowledge the stop.

    Args:
        context: The attempt.
        telemetry: Where it says things.
        last_alive: Time of the last heartbeat of an earlier attempt.

    Raises:
        TrainerError: See `prepare` and `train`.
        DataError: Likewise.
    """
    manifest = context.manifest
    if context.run.goodput.exists() and read_goodput(context.run) is None:
        telemetry.event("unreadable", "goodput.json cannot be used: the account begins anew")
    clock = start_clock(context.run, attempt=manifest.attempt, last_alive_unix_s=last_alive)
    stop = StopWatch(
        context.run,
        manifest,
        context.signals,
        report_stale=lambda what: telemetry.event(
            "stale_halt", f"a .HALT that does not mean this attempt is ignored: {what}"
        ),
    )
    write_environment(context, telemetry.writes)
    try:
        session = prepare(context, telemetry, stop, clock)
    except StopAskedError as asked:
        return acknowledge(context, telemetry, asked.request)
    try:
        write_summary(session)
        session.loader.warm_up(stop.check)
        asked_for = train(session)
        if asked_for is not None:
            return acknowledge(context, telemetry, asked_for)
        return finish(session)
    except StopAskedError as asked:
        return acknowledge(context, telemetry, asked.request)
    finally:
        close(session)


def close(session: Session) -> None:
    """Wait for a write that is under way, and put the last numbers on the disk."""
    session.keeper.drain()
    session.loader.close()
    write_summary(session, is_final=True)


def acknowledge(context: AttemptContext, telemetry: Telemetry, request: StopRequest) -> Outcome:
    """Say that the stop was seen and what is saved; the end itself follows at once."""
    step = context.beats.step
    found = list_checkpoints(context.run)
    saved = found[0].step if found else None
    where = f"at step {step}, " + (
        "no checkpoint" if saved is None else f"checkpoint of step {saved}"
    )
    context.beats.enter("shutdown")
    if request.halt is None:
        telemetry.event("signal", f"{request.reason}, stopped {where}", step=step)
        return Outcome(TrainerExit.RESUMABLE, f"{request.reason}, stopped {where}")
    telemetry.event(
        "halt_ack",
        f"halt asked by {request.halt.by} ({request.reason}), stopped {where}",
        step=step,
        checkpoint_step=saved,
    )
    context.beats.write("halt_ack", checkpoint_step=saved)
    return Outcome(TrainerExit.HALTED, f"halted by {request.halt.by}: {request.reason}")


def finish(session: Session) -> Outcome:
    """The schedule is done: the final weights beside the checkpoints, samples, and recall."""
    session.context.beats.enter("shutdown", session.config.watchdog.phase_limit_s)
    write_final_model(session.context.run, session)
    with torch.compiler.set_stance("force_eager"):  # shapes that will not come again
        write_samples(session)
        session.recall = measure_recall(
            session.model,
            session.config.runtime.precision,
            max_context=session.config.batch.seq_len,
            poll=session.context.beats.advance,
        )
    return Outcome(TrainerExit.FINISHED, f"finished {session.step} steps")


def write_final_model(run: RunDir, session: Session) -> None:
    """model.safetensors, whole or not at all, also after a power cut.

    Raises:
        DiskFullError: If the disk refuses; the checkpoint of the last step is whole.
    """
    temporary = run.final_model.with_name(f".{run.final_model.name}.writing")
    try:
        save_file(to_host(model_tensors(session.model)), temporary)
        temporary.chmod(0o644)
        fsync_file(temporary)
        temporary.replace(run.final_model)
        fsync_dir(run.root)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        full = " (the disk is full)" if is_disk_full(error) else ""
        message = f"{run.final_model.name} could not be written{full}: {error}"
        raise DiskFullError(
            message,
            has_checkpoint=True,
            hint=f"{advise(error)}, then `nsa-ops resume`: the last step is saved",
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a card or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError)
