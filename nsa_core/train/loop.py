"""The training loop: fetch, step, judge, log, evaluate, save, until the end or a stop."""

import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from nsa_core.config.run import RunConfig
from nsa_core.data.batch import TokenBatch
from nsa_core.data.prefetch import STALL_HINT, LoaderStalled
from nsa_core.data.reporting import DataError
from nsa_core.evaluate.perplexity import measure_perplexity
from nsa_core.model.statistics import AttentionStatistics
from nsa_core.train.card import read_memory
from nsa_core.train.failure import NonFiniteError
from nsa_core.train.optimizer import learning_rate_scale
from nsa_core.train.run_files import write_summary
from nsa_core.train.session import TrainingSession
from nsa_core.train.step import StepResult, find_breach, recent
from nsa_core.train.stop import StopAskedError, StopRequest
from nsa_core.train.telemetry import TrainerFigures
from nsa_core.train.timing import Rate

#: Good steps after which a loss scale has found its place: from then on it may not fall for long.
SETTLED_STEPS = 20
#: A rank without data says so itself before the others give up waiting for it.
DATA_GRACE_S = 30.0


def train(session: TrainingSession) -> StopRequest | None:
    """Train to the end of the schedule; a stop or an error leaves a checkpoint of the last step.

    Returns:
        The stop that was asked for, or None if the schedule is done.

    Raises:
        NonFiniteError: If too many steps had no usable loss; nothing is saved then, because the
            weights are suspect.
        DataError: If no batch comes; saved first, unless one rank of several is alone with it, as
            in an evaluation.
        DiskFullError: If checkpoints cannot be written any more.
    """
    try:
        _run_steps(session)
    except StopAskedError as stop:
        if stop.request.save_checkpoint:
            session.keeper.save(session.snapshot, session.step, wait=True)
        return stop.request
    except DataError:
        if session.context.group.has_agreed or session.context.group.size == 1:
            session.keeper.save(session.snapshot, session.step, wait=True)
        raise
    session.keeper.save(session.snapshot, session.step, wait=True)
    session.context.group.has_agreed = True
    return None


def _run_steps(session: TrainingSession) -> None:
    last_step = session.config.schedule.steps
    while True:
        session.stop.check()
        _evaluate_if_due(session)
        _save_if_due(session)
        if session.step >= last_step:
            return
        _enter_training(session)
        began = time.monotonic()
        batches, fault = _fetch(session)
        fetched = time.monotonic()
        num_valid = _count_valid(session, batches, fault)
        session.sync_s = time.monotonic() - fetched
        result, learning_rate = _step(session, batches, num_valid)
        num_tokens = session.config.batch.tokens_per_step
        if session.meter.is_last_warmup:  # no rank compiles any more
            session.context.group.tighten(_collective_limit_s(session.config))
        session.meter.add(num_tokens, time.monotonic() - fetched, fetched - began)
        _judge(session, result, num_tokens)
        log_step(session, result, learning_rate)


def _enter_training(session: TrainingSession) -> None:
    """The first steps of an attempt may compile; that is a phase and a bucket of its own."""
    watchdog = session.config.watchdog
    if session.config.runtime.compile and session.meter.is_warming_up:
        session.context.beats.enter("compile", watchdog.compile_limit_s)
        session.clock.switch("compile")
    else:
        session.context.beats.enter("train", watchdog.stall_min_s)
        session.clock.switch("step")


def _fetch(session: TrainingSession) -> tuple[list[TokenBatch], DataError | None]:
    """All micro-batches of this rank in one step, or why it has none.

    Several ranks have one deadline for all of a step, after which the others give up.
    """
    beats, deadline_s = session.context.beats, session.config.data.loader_timeout_s
    num_ranks, end = session.context.group.size, time.monotonic() + deadline_s
    num_calls = session.config.batch.accumulation // num_ranks

    def poll() -> None:
        session.stop.check_alone()
        if num_ranks > 1 and time.monotonic() > end:
            message = f"the {num_calls} batches of a step were not read within {deadline_s:g} s"
            raise LoaderStalled(message, STALL_HINT)

    with session.clock.within("data_wait"), beats.within("data_wait", deadline_s):
        try:
            return [session.loader.next_batch(poll) for _ in range(num_calls)], None
        except DataError as error:
            return [], error


def _count_valid(
    session: TrainingSession, batches: list[TokenBatch], fault: DataError | None
) -> int:
    """Valid targets of the step on all ranks.

    Raises:
        DataError: On every rank, if one of them has no data.
    """
    group = session.context.group
    own = sum(batch.num_targets for batch in batches)
    num_valid, num_faults = group.add_up([own, fault is not None])
    if not num_faults:
        return num_valid
    group.has_agreed = True
    messages = [found.decode() for found in group.gather((fault.message if fault else "").encode())]
    if fault is not None:
        raise fault
    rank = next(rank for rank, found in enumerate(messages) if found)
    message = f"rank {rank} has no data: {messages[rank]}"
    raise DataError(message, "look at the data of that rank, then resume")


def _collective_limit_s(config: RunConfig) -> float:
    """How long a rank waits for the others, which may be waiting for their data."""
    return max(config.runtime.collective_timeout_s, config.data.loader_timeout_s + DATA_GRACE_S)


def _step(
    session: TrainingSession, batches: list[TokenBatch], num_valid: int
) -> tuple[StepResult, float]:
    """One optimizer step at the learning rate of its number."""
    scale = learning_rate_scale(session.step, session.config.schedule)
    learning_rate = session.steps.optimizers.set_scale(scale)

    def poll(micro_step: int) -> None:
        session.context.beats.advance(micro_step=micro_step)
        session.stop.check()

    session.model.train()
    recording = session.model.recording_statistics() if _records_gates(session) else nullcontext()
    with recording:
        result = session.steps.run(batches, poll, num_valid)
    return result, learning_rate


def _records_gates(session: TrainingSession) -> bool:
    """Where the figures will be logged, and once before: a step that records is compiled apart.

    The compiler works in the last warm-up step then, not in a step that is timed and logged.
    """
    is_rehearsal = session.config.runtime.compile and session.meter.is_last_warmup
    return is_rehearsal or _gates_are_due(session.config, session.step + 1)


def _judge(session: TrainingSession, result: StepResult, num_tokens: int) -> None:
    """Move to the next boundary; a step without a usable loss counts, and too many end the run."""
    step = session.step + 1
    unusable = recent(session.position.unusable_steps, step)
    session.overflows_in_row = session.overflows_in_row + 1 if result.is_overflow else 0
    if result.fault is None or result.is_overflow:
        session.num_skipped += result.is_overflow
        session.num_good += not result.is_overflow
        session.advance(num_tokens, tuple(unusable))
        _end_if(session, _overflow_breach(session, result), step - session.overflows_in_row + 1)
        return
    session.num_skipped += 1
    unusable.append(step)
    session.keeper.last_anomaly_step = step
    session.advance(num_tokens, tuple(unusable))
    session.telemetry.anomaly(  # after the step has moved, so that its heartbeat names this step
        step, result.fault, result.loss, result.grad_norm, session.num_skipped
    )
    limits = session.config.watchdog
    breach = find_breach(
        unusable, step, in_row=limits.nonfinite_in_row, in_100=limits.nonfinite_in_100
    )
    _end_if(session, breach, unusable[0])


def _overflow_breach(session: TrainingSession, result: StepResult) -> str | None:
    """A scale that falls step after step, once it was settled or has nowhere left to fall."""
    limit = session.config.watchdog.skipped_in_row
    at_floor = result.loss_scale is not None and result.loss_scale <= 1
    if session.overflows_in_row < limit or not (session.num_good >= SETTLED_STEPS or at_floor):
        return None
    return f"{session.overflows_in_row} steps in a row were skipped for a falling loss scale"


def _end_if(session: TrainingSession, breach: str | None, first_bad_step: int) -> None:
    """End the run for a breach, naming a checkpoint from before the first of its bad steps."""
    if breach is None:
        return
    session.telemetry.mark_anomaly("nonfinite")
    session.keeper.drain()  # a checkpoint that is still being written is one to go back to
    good = session.keeper.find_good(first_bad_step)
    have = f"the last good checkpoint is step {good}"
    if good is None:
        have = f"there is no checkpoint from before step {first_bad_step}"
    message = f"{breach}, up to step {session.step}; {have}"
    raise NonFiniteError(
        message,
        hint="Lower the learning rate or look at the data, then resume from the good checkpoint",
    )


def log_step(session: TrainingSession, result: StepResult, learning_rate: float) -> None:
    """Log the step that was just done if it is due; a skipped one is on record already."""
    if session.step == session.keeper.begin_step + 1:
        session.telemetry.event("first_step", f"step {session.step}: loss {result.loss:.4f}")
    if result.fault is not None or session.step % session.config.telemetry.log_every:
        return
    rate = session.meter.take()
    if not session.context.group.is_first:
        session.telemetry.progress(
            session.step, TrainerFigures(**_own_figures(session, result, rate))
        )
        return
    figures = TrainerFigures(
        loss=result.loss,
        lr=learning_rate,
        grad_norm=result.grad_norm,
        tokens_per_s=_rounded(rate.tokens_per_s, 1),
        mfu=_rounded(rate.mfu, 5),
        tokens_seen=session.position.tokens_seen,
        finite=True,
        skipped=session.num_skipped,
        loss_scale=result.loss_scale,
        **_own_figures(session, result, rate),
        kernel_paths=session.model.kernel_paths,
        kernel_reasons={choice.branch: choice.reason for choice in session.kernels},
    )
    if _gates_are_due(session.config, session.step):
        figures = _with_gates(figures, session.model.gate_statistics())
    session.telemetry.progress(session.step, figures)
    speed = "" if rate.tokens_per_s is None else f", {rate.tokens_per_s:,.0f} tokens/s"
    session.telemetry.log.report(
        f"step {session.step}/{session.config.schedule.steps}: loss {result.loss:.4f}, "
        f"lr {learning_rate:.3g}, grad norm {result.grad_norm:.3g}{speed}"
    )


def _own_figures(session: TrainingSession, result: StepResult, rate: Rate) -> dict[str, Any]:
    """What a rank measured of itself."""
    fetch = session.loader.statistics()
    is_alone = session.context.group.size == 1
    return {
        "step_s": round(rate.step_s, 5),
        "data_s": round(rate.data_s, 5),
        "work_s": _rounded(result.work_s, 5),
        "sync_s": None if is_alone else round(session.sync_s, 5),
        "dt_fetch_s": round(fetch.last_s, 5),
        "fetch_p50_ms": round(fetch.p50_ms, 3),
        "fetch_p95_ms": round(fetch.p95_ms, 3),
        **asdict(read_memory(session.device)),
        **asdict(session.card.state),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _gates_are_due(config: RunConfig, step: int) -> bool:
    """Whether the gate figures of this step will be logged."""
    telemetry = config.telemetry
    has_gates = config.model.attention == "nsa"
    return has_gates and step % telemetry.log_every == 0 and step % telemetry.gate_every == 0


def _with_gates(figures: TrainerFigures, statistics: AttentionStatistics | None) -> TrainerFigures:
    """The same figures with those of the worst layer's gates, and of all layers beside them."""
    if statistics is None:
        return figures
    worst = statistics.worst
    return figures.model_copy(
        update={
            "gate_entropy_mean": worst.entropy_mean,
            "gate_entropy_min": worst.entropy_min,
            "gate_max_gate": worst.max_gate,
            "gate_collapse_frac": worst.collapse_frac,
            "gate_branch_shares": list(worst.branch_shares),
            "gate_worst_layer": worst.layer,
            "selected_blocks": worst.selected_blocks,
            "free_block_share": worst.free_block_share,
            "gate_layers": [asdict(layer) for layer in statistics.layers],
        }
    )


def _evaluate_if_due(session: TrainingSession) -> None:
    """Validate before the first step, every `eval_every` steps and at the end; once a step.

    As written, not compiled: a graph without gradients costs more seconds than it would save.
    """
    every, step = session.config.evaluation.eval_every, session.step
    is_due = every > 0 and step % every == 0
    is_end = step == session.config.schedule.steps
    if not (is_due or is_end):
        return
    is_new = step not in session.telemetry.validated_steps
    if not session.context.group.as_first(claim=is_new):
        return

    def poll() -> None:
        session.context.beats.advance()
        session.stop.check()

    session.context.beats.enter("eval", session.config.watchdog.phase_limit_s)
    with session.clock.within("eval"), torch.compiler.set_stance("force_eager"):
        found = measure_perplexity(
            session.model,
            session.validation(),
            session.config.runtime.precision,
            poll,
            session.context.group.sum_in_place,
        )
    session.telemetry.validation(step, found)


def _save_if_due(session: TrainingSession) -> None:
    """Save on schedule or on USR2, and take note of a write that has finished meanwhile.

    What is asked for before the first step of the attempt comes after it: nothing is new before.
    """
    session.keeper.settle()
    has_moved = session.step > session.keeper.begin_step
    if has_moved and (session.stop.take_save_request() or session.keeper.is_due(session.step)):
        session.keeper.save(session.snapshot, session.step)
        write_summary(session)
    session.keeper.mark_known_good(session.step)
