"""What staging the data of a run takes before step 1: tokens, shards on the disk, time; pure."""

import re
from dataclasses import dataclass

from nsa_core.config.run import RunConfig
from nsa_ops.quantities import format_bytes, format_count, format_duration

#: Ids below this take two bytes in a shard, others four.
_TWO_BYTE_IDS = 2**16
#: Bytes of English text that a token stands for: GPT-2 on FineWeb-Edu, a trained BPE of 8,192 ids.
BYTES_PER_TOKEN = {"byte": 1.0, "gpt2": 4.5, "bpe": 3.5}
#: Tokens a second of one staging process, to say hours from minutes. `byte` and `bpe` were measured
#: on two cores (2026-11-28); `gpt2` and the hub are assumed.
TOKENS_PER_S = {"byte": 5e6, "gpt2": 1e6, "bpe": 2e5}
#: A sample of FineWeb-Edu is named after its GPT-2 tokens in billions; the whole has 1.3 trillion.
_SAMPLE = re.compile(r"sample-([0-9]{1,6})BT")
_WHOLE_TOKENS = 1.3e12
_STDLIB_BYTES = 30e6
LONG_S = 60.0
_SYNTHETIC_TOKENS = 1e6


@dataclass(frozen=True)
class StagingNeed:
    """What a staging takes; None where the configuration alone cannot tell.

    Attributes:
        tokens: Tokens that are staged before step 1.
        shard_bytes: Their shards.
        seconds: How long that takes, roughly.
    """

    tokens: int | None
    shard_bytes: int | None
    seconds: float | None

    @property
    def is_long(self) -> bool:
        """Whether somebody who waits for step 1 should know."""
        return self.seconds is None or self.seconds >= LONG_S

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
    return StagingNeed(int(tokens), int(tokens * width), tokens / TOKENS_PER_S[tokenizer])


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
        source_bytes = gpt2_tokens * BYTES_PER_TOKEN["gpt2"]
    return source_bytes / BYTES_PER_TOKEN[data.tokenizer] if source_bytes is not None else None
