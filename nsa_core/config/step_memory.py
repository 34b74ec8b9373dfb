"""Memory of a step of a whole configuration, and the batch that fits a card; pure."""

from nsa_core.config.counts import MemoryEstimate, Sharding, StepShape, estimate_memory
from nsa_core.config.ranks import sizes_that_divide
from nsa_core.config.run import RunConfig, find_sharding_obstacle

#: Share of a card's memory that a step may need by the estimate.
MEMORY_SHARE = 0.85
MIB_PER_GIB = 1024


def estimate_step(config: RunConfig, sharding: Sharding | None = None) -> MemoryEstimate:
    """MiB on one card of the run by part, if its ranks keep the state like that.

    By default they keep it as configured; `auto` that was not settled is `ddp`.
    """
    configured = config.runtime.sharding
    return estimate_memory(
        config.model,
        config.optimizer,
        config.runtime.precision,
        StepShape(
            tokens=config.batch.micro_batch * config.batch.seq_len,
            accumulation=config.batch.accumulation // config.num_ranks,
            activation_checkpointing=config.runtime.activation_checkpointing,
            is_compiled=config.runtime.compile,
            has_half_residual=config.runtime.half_residual,
            num_ranks=config.num_ranks,
            sharding=sharding or ("ddp" if configured == "auto" else configured),
        ),
    )


def fit_batch(config: RunConfig, memory_gib: float) -> RunConfig:
    """The configuration in the largest micro-batch whose step fits, with the same rows a step.

    `ddp` with smaller micro-batches is preferred to `fsdp`; where no size fits, nothing changes.

    Args:
        config: With the number of cards settled.
        memory_gib: Memory of the smallest card.
    """
    batch, ranks = config.batch, config.num_ranks
    rows = batch.micro_batch * batch.accumulation
    limit_mib = MEMORY_SHARE * memory_gib * MIB_PER_GIB
    sizes = list(sizes_that_divide(rows, batch.micro_batch, ranks))
    for sharding in _shardings(config):
        for size in sizes:
            values = {"micro_batch": size, "accumulation": rows // size}
            fitted = config.model_copy(update={"batch": batch.model_copy(update=values)})
            if estimate_step(fitted, sharding).total <= limit_mib:
                return fitted
    return config


def _shardings(config: RunConfig) -> tuple[Sharding, ...]:
    """How the ranks may keep the state, the better way first."""
    if config.runtime.sharding != "auto":
        return (config.runtime.sharding,)
    can_share = config.num_ranks > 1 and find_sharding_obstacle(config) is None
    return ("ddp", "fsdp") if can_share else ("ddp",)
