"""Estimate: what a run needs before anything is launched; pure arithmetic on the configuration."""

import re
from dataclasses import dataclass, replace

from nsa_core.config.compare import differing_values
from nsa_core.config.counts import (
    FlopCounts,
    MemoryEstimate,
    ParameterCounts,
    Sharding,
    count_flops,
    count_parameters,
)
from nsa_core.config.profile import HardwareProfile
from nsa_core.config.ranks import OfferedCards
from nsa_core.config.run import RunConfig, find_sharding_obstacle
from nsa_core.config.step_memory import MEMORY_SHARE, MIB_PER_GIB, estimate_step, fit_batch
from nsa_ops.configure import RunChoice, load_hardware, resolve_choice
from nsa_ops.errors import RefusedError
from nsa_ops.quantities import format_bytes, format_count, format_duration
from nsa_ops.settings import Settings

GIB = 2**30
_BYTES_PER_PARAMETER = 4
_ADAMW_MOMENTS = 2
#: One checkpoint more than is kept exists while the oldest is being replaced.
_CHECKPOINTS_IN_FLIGHT = 1
#: Share of the dense peak that training at this size reaches at best; only bounds the estimate.
_BEST_UTILIZATION = 0.4
#: Ids below this take two bytes in a shard, others four.
_TWO_BYTE_IDS = 2**16
#: Bytes of English text in one token: GPT-2 on FineWeb-Edu, a trained BPE of 8,192 ids.
_BYTES_PER_TOKEN = {"byte": 1.0, "gpt2": 4.5, "bpe": 3.5}
#: Tokens a second of one staging process, to say hours from minutes. `byte` and `bpe` were measured
#: on two cores (2026-11-28); `gpt2` and the hub are assumed.
_TOKENS_PER_S = {"byte": 5e6, "gpt2": 1e6, "bpe": 2e5}
#: A sample of FineWeb-Edu is named after its GPT-2 tokens in billions; the whole has 1.3 trillion.
_SAMPLE = re.compile(r"sample-([0-9]{1,6})BT")
_WHOLE_TOKENS = 1.3e12
_STDLIB_BYTES = 30e6
_LONG_S = 60.0
_SYNTHETIC_TOKENS = 1e6
#: `runtime.activation_checkpointing` by the memory that it saves, and the time that it costs.
_CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class StagingNeed:
    """What a staging takes; None where the configuration alone does not say.

    Attributes:
        tokens: Tokens that are staged before step 1.
        seconds: How long that takes, roughly.
    """

    tokens: int | None
    shard_bytes: int | None
    seconds: float | None

    @property
    def is_long(self) -> bool:
        """Whether somebody who waits for step 1 should know."""
        return self.seconds is None or self.seconds >= _LONG_S

    def sentence(self) -> str:
        """What happens before step 1, for a plan."""
        if self.tokens is None or self.shard_bytes is None or self.seconds is None:
            return (
                "before step 1 the whole of data.path is staged, unless it was before; preflight "
                "says how much that is"
            )
        return (
            f"before step 1 up to {format_count(self.tokens)} tokens are staged, unless they were "
            f"before: {format_bytes(self.shard_bytes)} of shards, roughly "
            f"{format_duration(self.seconds)}; data.max_tokens stages less"
        )


def estimate_staging(config: RunConfig, source_bytes: float | None = None) -> StagingNeed:
    """What staging takes.

    Args:
        config: Which data and tokenizer.
        source_bytes: Bytes of text of a local source, where they are known.
    """
    data = config.data
    tokenizer = "byte" if data.source == "synthetic" else data.tokenizer
    tokens = _source_tokens(config, source_bytes)
    if data.max_tokens:
        tokens = data.max_tokens if tokens is None else min(tokens, data.max_tokens)
    if tokens is None:
        return StagingNeed(None, None, None)
    num_ids = data.bpe_vocab_size if tokenizer == "bpe" else config.model.vocab_size
    width = 2 if num_ids <= _TWO_BYTE_IDS else 4
    return StagingNeed(int(tokens), int(tokens * width), tokens / _TOKENS_PER_S[tokenizer])


def _source_tokens(config: RunConfig, source_bytes: float | None) -> float | None:
    data = config.data
    if data.source == "synthetic":
        return _SYNTHETIC_TOKENS
    if data.source == "stdlib":
        source_bytes = _STDLIB_BYTES
    if data.source == "fineweb_edu":
        if data.path:
            return None
        sample = _SAMPLE.fullmatch(data.subset)
        gpt2_tokens = float(sample.group(1)) * 1e9 if sample else _WHOLE_TOKENS
        source_bytes = gpt2_tokens * _BYTES_PER_TOKEN["gpt2"]
    return source_bytes / _BYTES_PER_TOKEN[data.tokenizer] if source_bytes is not None else None


@dataclass(frozen=True)
class CardFit:
    """Whether a step fits a card.

    Attributes:
        need_mib: What a step needs, roughly.
        limit_mib: What it may need of the card's memory.
        memory_mib: Memory of the card.
        advice: What to change where it does not fit; empty where it does.
    """

    need_mib: float
    limit_mib: float
    memory_mib: float
    advice: str

    @property
    def is_fitting(self) -> bool:
        """Whether it does."""
        return self.need_mib <= self.limit_mib

    @property
    def sentence(self) -> str:
        """Need and limit."""
        return (
            f"a step needs about {self.need_mib:,.0f} MiB, and {self.limit_mib:,.0f} of the "
            f"card's {self.memory_mib:,.0f} MiB may be used"
        )


def judge_fit(config: RunConfig, memory_mib: float) -> CardFit:
    """Whether a step fits a card of this memory, and with which change it would; pure."""
    need_mib = _step_mib(config, memory_mib)
    limit_mib = MEMORY_SHARE * memory_mib
    advice = "" if need_mib <= limit_mib else _advise_fit(config, memory_mib)
    return CardFit(need_mib, limit_mib, memory_mib, advice)


def _step_mib(config: RunConfig, memory_mib: float) -> float:
    return estimate_step(config, choose_sharding(config, memory_mib / MIB_PER_GIB)[0]).total


def _advise_fit(config: RunConfig, memory_mib: float) -> str:
    """Settings that make the same step fit, the faster ones first; else what to take instead."""
    kinds = _CHECKPOINTING[_CHECKPOINTING.index(config.runtime.activation_checkpointing) :]
    for kind in kinds:
        kept = _with_checkpointing(config, kind)
        smaller = fit_batch(kept, memory_mib / MIB_PER_GIB)
        if (need_mib := _step_mib(smaller, memory_mib)) <= MEMORY_SHARE * memory_mib:
            return f"Set {_settings(config, smaller)}: a step needs about {need_mib:,.0f} MiB then"
    rows = config.batch.micro_batch * config.batch.accumulation
    least = _with_checkpointing(config, kinds[-1]).model_copy(
        update={"batch": config.batch.model_copy(update={"micro_batch": 1, "accumulation": rows})}
    )
    changed, need_mib = _settings(config, least), _step_mib(least, memory_mib)
    even = f"; a step needs about {need_mib:,.0f} MiB even with {changed}" if changed else ""
    if find_sharding_obstacle(config) is not None:
        return f"Take a card with more memory or a smaller model{even}"
    return (
        "Take a card with more memory, more cards with `runtime.sharding=fsdp`, or a smaller "
        f"model{even}"
    )


def _with_checkpointing(config: RunConfig, kind: str) -> RunConfig:
    runtime = config.runtime.model_copy(update={"activation_checkpointing": kind})
    return config.model_copy(update={"runtime": runtime})


def _settings(before: RunConfig, now: RunConfig) -> str:
    """The values that differ, as `--set` takes them."""
    return ", ".join(f"`{one.key}={one.now}`" for one in differing_values(before, now))


@dataclass(frozen=True)
class Estimate:
    """What a run needs.

    Attributes:
        parameters: Trained numbers by part.
        tokens_per_step: Tokens of one optimizer step on all cards together.
        num_ranks: Processes that share a step, each with a card of its own where it has cards.
        sharding: How they keep the state, and why.
        flops: Per token, forward; NSA's own work.
        memory: MiB on one card by part.
        fits: Whether a step fits each card of the profile, resolved for that one, the smallest
            first; empty without a card, or where nobody knows its memory.
        staging: What staging its data takes, as far as the configuration can tell.
        disk_bytes: All checkpoints that are kept, one in flight, the final model, and the shards.
        best_tokens_per_s: Upper bound of all cards from the profile's peak; None without one.
        shortest_hours: Hours of the run at that bound.
    """

    parameters: ParameterCounts
    tokens_per_step: int
    total_tokens: int
    num_ranks: int
    sharding: tuple[Sharding, str]
    flops: FlopCounts
    memory: MemoryEstimate
    checkpoint_bytes: int
    staging: StagingNeed
    disk_bytes: int
    best_tokens_per_s: float | None
    shortest_hours: float | None
    fits: tuple[CardFit, ...] = ()


def estimate_run(config: RunConfig, profile: HardwareProfile | None) -> Estimate:
    """What this configuration needs on cards of this profile."""
    parameters = count_parameters(config.model)
    flops = count_flops(config.model, config.batch.seq_len)
    tokens_per_step = config.batch.tokens_per_step
    total_tokens = tokens_per_step * config.schedule.steps
    peak_tflops = profile.expected.gemm_tflops if profile is not None else None
    ranks = config.num_ranks
    best = ranks * peak_tflops * 1e12 * _BEST_UTILIZATION / flops.train if peak_tflops else None
    sizes = profile.memory_gib if profile is not None else []
    sharding = choose_sharding(config, min(sizes, default=None))
    checkpoint_bytes = _checkpoint_bytes(config, parameters)
    staging = estimate_staging(config)
    model_bytes = _BYTES_PER_PARAMETER * parameters.total
    return Estimate(
        parameters=parameters,
        tokens_per_step=tokens_per_step,
        total_tokens=total_tokens,
        num_ranks=ranks,
        sharding=sharding,
        flops=flops,
        memory=estimate_step(config, sharding[0]),
        checkpoint_bytes=checkpoint_bytes,
        staging=staging,
        disk_bytes=(num_kept(config) * checkpoint_bytes + model_bytes + (staging.shard_bytes or 0)),
        best_tokens_per_s=best,
        shortest_hours=total_tokens / best / 3600 if best else None,
    )


def choose_sharding(config: RunConfig, memory_gib: float | None) -> tuple[Sharding, str]:
    """How the ranks of a run keep its state, and why: `fsdp` where `ddp` does not fit a card.

    Args:
        config: With the number of cards settled; what `runtime.sharding` names is kept.
        memory_gib: Memory of the smallest card; None where it is not known, or there is none.
    """
    wanted, ranks = config.runtime.sharding, config.num_ranks
    if wanted != "auto":
        return wanted, f"runtime.sharding is {wanted}"
    if ranks == 1:
        return "ddp", "one rank keeps the whole state"
    if memory_gib is None:
        return "ddp", "the memory of a card is not known"
    whole, limit = estimate_step(config, "ddp").total / MIB_PER_GIB, MEMORY_SHARE * memory_gib
    need = f"a step of ddp needs about {whole:.1f} GiB on each card"
    if whole <= limit:
        return "ddp", f"{need}, within {100 * MEMORY_SHARE:.0f} % of {memory_gib:.1f} GiB"
    obstacle = find_sharding_obstacle(config)
    if obstacle is not None:
        return "ddp", f"{need} of {memory_gib:.1f} GiB, and fsdp is impossible: {obstacle}"
    part = estimate_step(config, "fsdp").total / MIB_PER_GIB
    return "fsdp", f"{need} of {memory_gib:.1f} GiB, one of fsdp on {ranks} cards {part:.1f} GiB"


def settle_sharding(config: RunConfig, memory_gib: float | None) -> tuple[RunConfig, list[str]]:
    """The configuration with `runtime.sharding` settled where several ranks share the run, and why.

    Args:
        config: With the number of cards settled.
        memory_gib: As in `choose_sharding`.
    """
    if config.num_ranks == 1 or config.runtime.sharding != "auto":
        return config, []
    kind, why = choose_sharding(config, memory_gib)
    runtime = config.runtime.model_copy(update={"sharding": kind})
    note = f"runtime.sharding auto is {kind}: {why}"
    return config.model_copy(update={"runtime": runtime}), [note]


def estimate_choice(settings: Settings, choice: RunChoice) -> Estimate:
    """What a choice of recipe, profile and values needs; `auto` cards are all that it allows."""
    profile, config = _resolve_for_card(settings, choice, None)
    sizes = sorted(profile.memory_gib) if profile is not None else []
    fits = [
        judge_fit(_resolve_for_card(settings, choice, size)[1], MIB_PER_GIB * size)
        for size in sizes
    ]
    return replace(estimate_run(config, profile), fits=tuple(fits))


def _resolve_for_card(
    settings: Settings, choice: RunChoice, memory_gib: float | None
) -> tuple[HardwareProfile | None, RunConfig]:
    """The profile of a choice, None without one, and its configuration for a card."""
    found = resolve_choice(settings, choice, memory_gib=memory_gib)
    profile = load_hardware(found.profile) if found.profile != "none" else None
    if profile is not None and profile.max_gpus and found.config.runtime.num_gpus == "auto":
        offered = OfferedCards(profile.max_gpus, f"a pod with {profile.max_gpus} cards")
        found = resolve_choice(settings, choice, memory_gib=memory_gib, offered=offered)
    return profile, found.config


def refusal_of(estimate: Estimate) -> RefusedError | None:
    """What a step that fits no card of its profile means; None if it fits one, or nobody knows."""
    if not estimate.fits or any(one.is_fitting for one in estimate.fits):
        return None
    largest = estimate.fits[-1]
    message = f"This run fits no card of its profile: {largest.sentence}"
    return RefusedError(message, hint=largest.advice)


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
