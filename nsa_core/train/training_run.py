"""One attempt from the first line to the last, once torch may be loaded."""

import torch

from nsa_core.model.stored_tensors import read_weights
from nsa_core.model.transformer import LanguageModel
from nsa_core.model.weights import load_model_tensors
from nsa_core.recall.by_depth import measure_recall
from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.goodput import read_goodput
from nsa_core.train.failure import AttemptEnd
from nsa_core.train.loop import train
from nsa_core.train.run_files import (
    write_environment,
    write_final_model,
    write_samples,
    write_summary,
)
from nsa_core.train.session import TrainingSession, prepare
from nsa_core.train.stop import StopAskedError, StopRequest, StopWatch
from nsa_core.train.telemetry import AttemptContext, TrainerFigures
from nsa_core.train.timing import start_clock


def run_training(context: AttemptContext, last_alive_unix_s: float | None) -> AttemptEnd:
    """Prepare, train, and finish or acknowledge the stop.

    Args:
        context: The attempt.
        last_alive_unix_s: Time of the last heartbeat of an earlier attempt.

    Raises:
        TrainerError: See `prepare` and `train`.
        DataError: Likewise.
    """
    manifest, telemetry = context.manifest, context.telemetry
    if context.run.goodput.exists() and read_goodput(context.run) is None:
        telemetry.event("unreadable", "goodput.json cannot be used: counting begins again")
    clock = start_clock(context.run, attempt=manifest.attempt, last_alive_unix_s=last_alive_unix_s)
    stop = StopWatch(
        context.run,
        manifest,
        context.signals,
        report_stale=lambda what: telemetry.event(
            "stale_halt", f"a .HALT that does not mean this attempt is ignored: {what}"
        ),
        group=context.group,
    )
    if context.group.place.is_leader:
        write_environment(context)
    try:
        session = prepare(context, stop, clock)
    except StopAskedError as asked:
        return acknowledge(context, asked.request)
    try:
        write_summary(session)
        session.loader.warm_up(stop.check_alone)
        asked_for = train(session)
        if asked_for is not None:
            return acknowledge(context, asked_for)
        return finish(session)
    except StopAskedError as asked:
        return acknowledge(context, asked.request)
    finally:
        close(session)


def close(session: TrainingSession) -> None:
    """Wait for a write that is under way, and put the last numbers on the disk."""
    session.keeper.drain()
    session.loader.close()
    write_summary(session, is_final=True)


def acknowledge(context: AttemptContext, request: StopRequest) -> AttemptEnd:
    """Report that the stop was seen and what is saved; the end itself follows at once.

    What is saved rank 0 alone can say: others need not wait for its write, or have another disk.
    """
    telemetry = context.telemetry
    step = context.beats.step
    found = list_checkpoints(context.run) if context.group.is_first else []
    saved = found[0].step if found else None
    where = f"at step {step}"
    if context.group.is_first:
        where += ", no checkpoint" if saved is None else f", checkpoint of step {saved}"
    context.beats.enter("shutdown")
    if request.halt is None:
        telemetry.event("signal", f"{request.reason}, stopped {where}", step=step)
        return AttemptEnd(TrainerExit.RESUMABLE, f"{request.reason}, stopped {where}")
    telemetry.event(
        "halt_ack",
        f"halt asked by {request.halt.by} ({request.reason}), stopped {where}",
        step=step,
        checkpoint_step=saved,
    )
    context.beats.write("halt_ack", TrainerFigures(checkpoint_step=saved))
    return AttemptEnd(TrainerExit.HALTED, f"halted by {request.halt.by}: {request.reason}")


def finish(session: TrainingSession) -> AttemptEnd:
    """The schedule is done: the final weights beside the checkpoints, samples, and recall."""
    session.context.beats.enter("shutdown", session.config.watchdog.phase_limit_s)
    if not session.context.group.is_first:
        return AttemptEnd(TrainerExit.FINISHED, f"finished {session.step} steps")
    model = whole_model(session)
    write_final_model(session.context.run, model)
    with torch.compiler.set_stance("force_eager"):  # shapes that will not come again
        write_samples(session, model)
        session.recall = measure_recall(
            model,
            session.config.runtime.precision,
            max_context=session.config.batch.seq_len,
            poll=session.context.beats.advance,
        )
    return AttemptEnd(TrainerExit.FINISHED, f"finished {session.step} steps")


def whole_model(session: TrainingSession) -> LanguageModel:
    """The model as one rank needs it to draw from it; of shards, from the checkpoint just saved."""
    learner = session.learner
    if learner.shards is None:
        return learner.model
    model = LanguageModel(session.config.model, learner.model.backends, seed=session.config.seed)
    model.has_half_residual = learner.model.has_half_residual
    load_model_tensors(model, read_weights(session.context.run.checkpoint(session.step)))
    return model.to(session.device)


#: What torch says where the host has no memory left, also for the driver to pin: it has no type.
_NO_HOST_MEMORY = ("DefaultCPUAllocator: ", "CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a card or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error) for w in _NO_HOST_MEMORY)
