"""Estimate: what a run needs before anything is launched; pure arithmetic on the configuration."""

from dataclasses import dataclass

from nsa_core.config.counts import (
    FlopCounts,
    MemoryEstimate,
    ParameterCounts,
    StepShape,
    count_flops,
    count_parameters,
    estimate_memory,
)
from nsa_core.config.profile import HardwareProfile
from nsa_core.config.run import RunConfig
from nsa_ops.configure import Choice, load_hardware, resolve_choice
from nsa_ops.settings import Settings
from nsa_ops.staging_need import StagingNeed, estimate_staging

GIB = 2**30
_BYTES_PER_PARAMETER = 4
_ADAMW_MOMENTS = 2
#: One checkpoint more than is kept exists while the oldest is being replaced.
_CHECKPOINTS_IN_FLIGHT = 1
#: Share of the dense peak that training at this size reaches at best; only bounds the estimate.
_BEST_UTILIZATION = 0.4


@dataclass(frozen=True)
class Estimate:
    """What a run needs.

    Attributes:
        parameters: Trained numbers by part.
        tokens_per_step: Tokens of one optimizer step on one card.
        total_tokens: Tokens of the whole run.
        flops: Per token, forward; NSA's own work.
        memory: MiB on the card by part.
        checkpoint_bytes: One checkpoint.
        staging: What staging its data takes, as far as the configuration can tell.
        disk_bytes: All checkpoints that are kept, one in flight, the final model, and the shards.
        best_tokens_per_s: Upper bound from the profile's peak; None without one.
        shortest_hours: Hours of the run at that bound.
    """

    parameters: ParameterCounts
    tokens_per_step: int
    total_tokens: int
    flops: FlopCounts
    memory: MemoryEstimate
    checkpoint_bytes: int
    staging: StagingNeed
    disk_bytes: int
    best_tokens_per_s: float | None
    shortest_hours: float | None


def estimate_run(config: RunConfig, profile: HardwareProfile | None) -> Estimate:
    """What this configuration needs on one card of this profile."""
    parameters = count_parameters(config.model)
    flops = count_flops(config.model, config.batch.seq_len)
    tokens_per_step = config.batch.tokens_per_step()
    total_tokens = tokens_per_step * config.schedule.steps
    peak_tflops = profile.expected.gemm_tflops if profile is not None else None
    best = peak_tflops * 1e12 * _BEST_UTILIZATION / flops.train if peak_tflops else None
    checkpoint_bytes = _checkpoint_bytes(config, parameters)
    staging = estimate_staging(config)
    model_bytes = _BYTES_PER_PARAMETER * parameters.total
    return Estimate(
        parameters=parameters,
        tokens_per_step=tokens_per_step,
        total_tokens=total_tokens,
        flops=flops,
        memory=estimate_memory(
            config.model,
            config.optimizer,
            config.runtime.precision,
            StepShape(
                tokens=config.batch.micro_batch * config.batch.seq_len,
                accumulation=config.batch.accumulation,
                activation_checkpointing=config.runtime.activation_checkpointing,
                is_compiled=config.runtime.compile,
            ),
        ),
        checkpoint_bytes=checkpoint_bytes,
        staging=staging,
        disk_bytes=(num_kept(config) * checkpoint_bytes + model_bytes + (staging.shard_bytes or 0)),
        best_tokens_per_s=best,
        shortest_hours=total_tokens / best / 3600 if best else None,
    )


def estimate_choice(settings: Settings, choice: Choice) -> Estimate:
    """What a choice of recipe, profile and values needs."""
    found = resolve_choice(settings, choice)
    profile = load_hardware(found.profile) if found.profile != "none" else None
    return estimate_run(found.config, profile)


def _checkpoint_bytes(config: RunConfig, parameters: ParameterCounts) -> int:
    """Weights and optimizer moments in float32; what else is in a checkpoint is small."""
    blocks = parameters.attention + parameters.mlp
    moments = _ADAMW_MOMENTS * parameters.total - (blocks if config.optimizer.kind == "muon" else 0)
    return _BYTES_PER_PARAMETER * (parameters.total + moments)


def num_kept(config: RunConfig) -> int:
    """Checkpoints on the disk at most: the newest, those kept for good, and one in flight."""
    rule = config.checkpoint
    saved = config.schedule.steps // rule.save_every if rule.save_every else 1
    forever = config.schedule.steps // rule.keep_every if rule.keep_every else 0
    return min(saved, rule.keep_last) + forever + _CHECKPOINTS_IN_FLIGHT
