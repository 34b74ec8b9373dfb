"""Heartbeat: one JSON line per interval and rank that says the run is alive and how it does."""

from typing import Literal

from nsa_core.config.base import TolerantModel

SCHEMA_VERSION = 1

Message = Literal["boot", "beat", "progress", "checkpoint", "eval", "anomaly", "halt_ack", "end"]
Phase = Literal["init", "data", "compile", "train", "data_wait", "eval", "checkpoint", "shutdown"]


class BeatHead(TolerantModel):
    """What every line says: who writes it, when, in which phase, and how far the loop is.

    `alive_seq` moves every few seconds from a thread; `progress_seq` moves with the loop.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str
    attempt: int
    rank: int
    pid: int
    ts: float
    iso: str
    msg: Message
    phase: Phase
    phase_deadline_s: float | None = None
    alive_seq: int
    progress_seq: int
    step: int
    micro_step: int = 0


class BeatFigures(TolerantModel):
    """What was measured; None on lines that do not carry it and where the machine cannot say.

    Loss is in nats per token, memory in MiB (base 2), power in watt, temperature in degrees
    Celsius. Lines of the phase `data` say in `staging` what it is doing, and in `staging_share` how
    much of it is done, where its end is known.

    Where a run has several ranks, `work_s` is what the rank computed by itself in a step, before it
    waited for the others, and `sync_s` what it waited for them: a straggler works longer than the
    others, and waits less.
    """

    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    step_s: float | None = None
    data_s: float | None = None
    work_s: float | None = None
    sync_s: float | None = None
    dt_fetch_s: float | None = None
    fetch_p50_ms: float | None = None
    fetch_p95_ms: float | None = None
    tokens_seen: int | None = None
    finite: bool | None = None
    skipped: int | None = None
    loss_scale: float | None = None
    gpu_mem_alloc: int | None = None
    gpu_mem_reserved: int | None = None
    gpu_mem_peak: int | None = None
    gpu_mem_total: int | None = None
    gpu_util: float | None = None
    power_w: float | None = None
    temp_c: float | None = None
    throttle: str | None = None
    host_rss_mib: int | None = None
    gate_entropy_mean: float | None = None
    gate_entropy_min: float | None = None
    gate_max_gate: float | None = None
    gate_collapse_frac: float | None = None
    gate_branch_shares: list[float] | None = None
    gate_worst_layer: int | None = None
    kernel_paths: dict[str, str] | None = None
    kernel_reasons: dict[str, str] | None = None

    val_loss: float | None = None
    bits_per_byte: float | None = None

    staging: str | None = None
    staging_share: float | None = None


class Heartbeat(BeatFigures, BeatHead):
    """One line of heartbeat_rank{r}.jsonl; fields that a reader does not know are kept."""
