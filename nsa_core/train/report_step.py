"""Log a step: heartbeat, table, TensorBoard and one line for people."""

from dataclasses import asdict
from typing import Any

from nsa_core.train.card import read_memory
from nsa_core.train.gates import gates_are_due, read_gate_fields
from nsa_core.train.session import Session
from nsa_core.train.step import StepResult
from nsa_core.train.telemetry import StepRecord


def report_progress(session: Session, result: StepResult, learning_rate: float) -> None:
    """Log the step that was just done if it is its turn; a skipped one is on record already."""
    if session.step == session.keeper.begin_step + 1:
        session.telemetry.event("first_step", f"step {session.step}: loss {result.loss:.4f}")
    if result.fault is not None or session.step % session.config.telemetry.log_every:
        return
    rate = session.meter.take()
    row = StepRecord(
        step=session.step,
        tokens=session.position.tokens_seen,
        loss=result.loss,
        lr=learning_rate,
        grad_norm=result.grad_norm,
        tokens_per_s=_rounded(rate.tokens_per_s, 1),
        mfu=_rounded(rate.mfu, 5),
        step_s=round(rate.step_s, 5),
        data_s=round(rate.data_s, 5),
        skipped=session.num_skipped,
        extra=_extra_fields(session, result),
    )
    session.telemetry.progress(row)
    speed = "" if rate.tokens_per_s is None else f", {rate.tokens_per_s:,.0f} tokens/s"
    session.telemetry.log.tell(
        f"step {row.step}/{session.config.schedule.steps}: loss {row.loss:.4f}, "
        f"lr {row.lr:.3g}, grad norm {row.grad_norm:.3g}{speed}"
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _extra_fields(session: Session, result: StepResult) -> dict[str, Any]:
    fetch = session.loader.statistics()
    gates = read_gate_fields(session.model) if gates_are_due(session.config, session.step) else {}
    return {
        "dt_fetch_s": round(fetch.last_s, 5),
        "fetch_p50_ms": round(fetch.p50_ms, 3),
        "fetch_p95_ms": round(fetch.p95_ms, 3),
        "loss_scale": result.loss_scale,
        **asdict(read_memory(session.device)),
        **asdict(session.card.state),
        **gates,
        "kernel_paths": session.kernel_paths,
        "kernel_reasons": {choice.branch: choice.reason for choice in session.kernels},
    }
