"""Parameters and FLOPs of a configuration, counted without making the model."""

from dataclasses import dataclass

from nsa_core.config.model import ModelConfig


def gate_hidden_width(dim: int) -> int:
    """Hidden units of the `mlp` gate."""
    return max(1, dim // 4)


@dataclass(frozen=True)
class ParameterCounts:
    """Trained numbers of each part, all layers together; a tied head counts as embedding."""

    embedding: int
    attention: int
    compression: int
    gate: int
    mlp: int
    norm: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(vars(self).values())


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """The exact number of parameters by part."""
    layers, table = config.num_layers, config.vocab_size * config.dim
    is_nsa = config.attention == "nsa"
    inner = config.mlp_width * (3 if config.activation == "swiglu" else 2)
    return ParameterCounts(
        embedding=table,
        attention=layers * _attention_parameters(config),
        compression=layers * _compression_parameters(config) if is_nsa else 0,
        gate=layers * _gate_parameters(config) if is_nsa else 0,
        mlp=layers * config.dim * inner,
        norm=(2 * layers + 1) * config.dim,
        head=0 if config.tie_embeddings else table,
    )


def _attention_parameters(config: ModelConfig) -> int:
    pairs = 3 if config.attention == "nsa" else 1
    kv_width = config.num_kv_groups * (config.head_dim_k + config.head_dim_v)
    heads = config.num_heads * (config.head_dim_k + config.head_dim_v)
    return config.dim * (heads + pairs * kv_width)


def _compression_parameters(config: ModelConfig) -> int:
    block, hidden = config.nsa.compress_block, config.head_dim_k
    widths = (config.head_dim_k, config.head_dim_v)
    if config.nsa.phi == "avg":
        return 0
    if config.nsa.phi == "linear":
        return sum(config.num_kv_groups * block * width * width for width in widths)
    return sum(block * width + block * width * hidden + hidden * width for width in widths)


def _gate_parameters(config: ModelConfig) -> int:
    outputs = 3 * (config.num_heads if config.gate.per == "head" else config.num_kv_groups)
    if config.gate.kind == "mlp":
        hidden = gate_hidden_width(config.dim)
        return (config.dim + 1) * hidden + (hidden + 1) * outputs
    return (config.dim + 1) * outputs


@dataclass(frozen=True)
class FlopCounts:
    """FLOPs of one token in the forward pass, averaged over a sequence (2 per multiply-add).

    Attributes:
        matrices: Projections, MLPs, gates and the head.
        compression: phi.
        attention: Scores and weighted sums over the keys that are visible; no masked work.
        scoring: The second pass over compressed scores that chooses the blocks; never trained.
    """

    matrices: float
    compression: float
    attention: float
    scoring: float

    @property
    def forward(self) -> float:
        """One token, forward only."""
        return self.matrices + self.compression + self.attention + self.scoring

    @property
    def train(self) -> float:
        """Forward and backward (twice the forward); nothing recomputed is counted."""
        return 3 * (self.matrices + self.compression + self.attention) + self.scoring


@dataclass(frozen=True)
class VisibleKeys:
    """Keys that a token sees in each branch, averaged over the positions of a sequence."""

    compressed: float
    selected: float
    sliding: float


def mean_visible_keys(config: ModelConfig, seq_len: int) -> VisibleKeys:
    """Average over positions 0 .. seq_len - 1 of one document."""
    sizes = config.nsa
    compressed = sum(sizes.num_compressed(position + 1) for position in range(seq_len))
    selected = sum(
        min(sizes.num_selected - 1, position // sizes.select_block) * sizes.select_block
        + position % sizes.select_block
        + 1
        for position in range(seq_len)
    )
    sliding = sum(min(sizes.window, position + 1) for position in range(seq_len))
    return VisibleKeys(compressed / seq_len, selected / seq_len, sliding / seq_len)


def count_flops(config: ModelConfig, seq_len: int) -> FlopCounts:
    """FLOPs per token of what this configuration computes: NSA's own work, or dense causal.

    Args:
        config: The model.
        seq_len: Tokens of one document.
    """
    parameters = count_parameters(config)
    table = config.vocab_size * config.dim
    matrices = 2.0 * (parameters.attention + parameters.gate + parameters.mlp + table)
    both_widths = config.head_dim_k + config.head_dim_v
    per_key = 2.0 * config.num_layers * config.num_heads
    if config.attention == "dense":
        return FlopCounts(matrices, 0.0, per_key * both_widths * (seq_len + 1) / 2, 0.0)
    keys = mean_visible_keys(config, seq_len)
    seen = keys.compressed + keys.selected + keys.sliding
    return FlopCounts(
        matrices=matrices,
        compression=_compression_flops(config, seq_len),
        attention=per_key * both_widths * seen,
        scoring=per_key * config.head_dim_k * keys.compressed,
    )


def _compression_flops(config: ModelConfig, seq_len: int) -> float:
    sizes, widths = config.nsa, (config.head_dim_k, config.head_dim_v)
    blocks_per_token = config.num_layers * sizes.num_compressed(seq_len) / seq_len
    per_block = float(sum(sizes.compress_block * width for width in widths))
    if sizes.phi == "linear":
        per_block = 2.0 * sum(sizes.compress_block * width * width for width in widths)
    if sizes.phi == "mlp":
        hidden = config.head_dim_k
        per_block += 2.0 * sum((sizes.compress_block + 1) * width * hidden for width in widths)
    flops: float = blocks_per_token * config.num_kv_groups * per_block
    return flops
