"""Parameters, FLOPs and device memory of a configuration, counted without making the model."""

from dataclasses import dataclass
from typing import Literal

from nsa_core.config.model import ModelConfig
from nsa_core.config.training import OptimizerConfig, Precision

MIB = 2**20
#: Logits of a chunk of the loss: of the Triton kernel, and of torch's passes.
TRITON_CHUNK, TORCH_CHUNK = 2**29, 2**26
_FLOAT32 = 4
#: Blocks whose weights are whole at once under `fsdp`: one computes while the next is gathered.
_BLOCKS_GATHERED = 2

#: How a run of several ranks keeps its state, once `auto` has been settled.
Sharding = Literal["ddp", "fsdp"]


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
    """FLOPs of one token in the forward pass, averaged over a sequence (2 per multiply-add)."""

    matrices: float  # projections, MLPs, gates and the head
    compression: float  # phi
    attention: float  # scores and weighted sums over the keys that are visible; no masked work
    scoring: float  # the second pass over compressed scores that chooses the blocks; never trained

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


@dataclass(frozen=True)
class MemoryEstimate:
    """MiB (2^20 bytes) of device memory at the peak of a step, by part; an estimate."""

    weights: float  # float32 master weights
    gradients: float  # float32 gradients, as far as they are there at the peak
    optimizer: float  # moments of AdamW, or the momentum of Muon where it applies
    autocast: float  # half-precision copies of the weights
    activations: float  # tensors kept for the backward pass
    #: The loss: its chunk, hidden states with their gradient, the gradient of the head.
    logits: float
    #: Under `fsdp`: weights that other cards gave, as far as they are there at the peak.
    gathered: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class StepShape:
    """How a step is computed, as far as its memory depends on it."""

    tokens: int  # of one micro-batch: micro_batch * seq_len
    #: Micro-batches of a step on one rank; from the second on, gradients are in memory already.
    accumulation: int = 1
    activation_checkpointing: str = "none"  # as in `RuntimeConfig`
    #: The compiler recomputes in the backward pass everything but matrix products.
    is_compiled: bool = False
    has_half_residual: bool = False  # as in `RuntimeConfig`
    num_ranks: int = 1  # that share the step, each with a card of its own
    #: With `ddp` every rank keeps the whole state, with `fsdp` its share of it.
    sharding: Sharding = "ddp"


def estimate_memory(
    config: ModelConfig, optimizer: OptimizerConfig, precision: Precision, shape: StepShape
) -> MemoryEstimate:
    """Memory of one training step on one card, at its peak.

    That is where the loss has been computed, or where the last block is recomputed after it.

    With several ranks it is that of one of them. NCCL's own buffers are not counted.

    For the Triton kernels, or torch's attention for dense. Within 6 % of 15 peaks of compiled
    steps on H100 and H200 (bench/results); no peak of a step as written was measured. What is kept
    was counted on a processor: tensors saved by autograd, and by the compiler's partitioner.

    Args:
        config: The model.
        optimizer: AdamW keeps two moments a parameter, Muon one for the matrices of the blocks.
        precision: Half precisions keep 2-byte copies of weights and most activations.
        shape: Tokens, and how they are computed.
    """
    counts = count_parameters(config)
    blocks = counts.attention + counts.mlp
    moments = 2 * counts.total - (blocks if optimizer.kind == "muon" else 0)
    is_half = precision != "fp32"
    kept = _kept_bytes(config, 2 if is_half else 4, shape)
    loss = _loss_bytes(config, shape, is_half=is_half)
    again = _recomputed_bytes(config, 2 if is_half else 4, shape)
    is_sharded = shape.sharding == "fsdp" and shape.num_ranks > 1
    share = 1 / shape.num_ranks if is_sharded else 1.0
    return MemoryEstimate(
        weights=share * _FLOAT32 * counts.total / MIB,
        gradients=_gradient_bytes(counts, shape, kept + loss, share) / MIB,
        optimizer=share * _FLOAT32 * moments / MIB,
        autocast=2 * counts.total / MIB if is_half else 0.0,
        activations=(kept + max(0.0, again - loss)) / MIB,
        logits=loss / MIB,
        gathered=_gathered_bytes(config, counts) / MIB if is_sharded else 0.0,
    )


def _gradient_bytes(
    counts: ParameterCounts, shape: StepShape, going_away: float, share: float
) -> float:
    """Gradients at the peak; `going_away` are the bytes that the backward pass frees meanwhile.

    DDP's buckets hold them from step to step, and the micro-batches add them up there. FSDP sums
    those of a step on each rank, whole, and gives the others their shares once, after the last
    micro-batch.
    """
    whole = float(_FLOAT32 * counts.total)
    if shape.accumulation > 1 or (shape.num_ranks > 1 and share == 1.0):
        return whole
    return max(0.0, share * whole - going_away)


def _gathered_bytes(config: ModelConfig, counts: ParameterCounts) -> float:
    """Tables and last norm, whole from the first token to the last gradient, and some blocks."""
    outside = counts.embedding + counts.head + config.dim
    block = (counts.total - outside) / config.num_layers
    return _FLOAT32 * (outside + _BLOCKS_GATHERED * block)


def _loss_bytes(config: ModelConfig, shape: StepShape, *, is_half: bool) -> float:
    """The last stream and norm, the product's input and its gradient, chunk and head."""
    size = 2 if is_half else 4
    hidden = shape.tokens * (2 * _stream_bytes(config, shape) + 2 * size * config.dim)
    head = _FLOAT32 * config.vocab_size * config.dim
    logits = shape.tokens * config.vocab_size
    chunk = 2 * min(TRITON_CHUNK, logits) if is_half else 3 * 4 * min(TORCH_CHUNK, logits)
    return hidden + head + chunk


def _kept_bytes(config: ModelConfig, size: int, shape: StepShape) -> float:
    """What the layers keep for the backward pass."""
    layer = _layer_bytes(config, size, shape)
    return shape.tokens * config.num_layers * layer[shape.activation_checkpointing]


def _recomputed_bytes(config: ModelConfig, size: int, shape: StepShape) -> float:
    """What the last layer makes again, beside gradients of the stream and the head; 0 without."""
    layer, mode = _layer_bytes(config, size, shape), shape.activation_checkpointing
    if mode == "none":
        return 0.0
    again = layer["none"] - layer[mode] + _stream_bytes(config, shape)
    return shape.tokens * again + _FLOAT32 * config.vocab_size * config.dim


def _layer_bytes(config: ModelConfig, size: int, shape: StepShape) -> dict[str, float]:
    """What a layer keeps of a token, by `activation_checkpointing`."""
    stream = _stream_bytes(config, shape)
    mlp = stream + _mlp_bytes(config, size, is_compiled=shape.is_compiled)
    attention = _attention_bytes(config, size)
    if shape.is_compiled:  # the stream between attention and MLP is made from what was added to it
        mlp += size * config.dim - stream
    return {"none": stream + mlp + attention, "selective": stream + mlp, "full": stream}


def _stream_bytes(config: ModelConfig, shape: StepShape) -> int:
    """The residual stream of a token."""
    return (2 if shape.has_half_residual else _FLOAT32) * config.dim


def _mlp_bytes(config: ModelConfig, size: int, *, is_compiled: bool) -> float:
    """Normed input, the products, and what goes into the second; SiLU itself if not compiled."""
    is_gated = config.activation == "swiglu"
    widths = 3 if is_gated else 2
    if is_gated and not is_compiled:
        widths += 1
    return size * (config.dim + widths * config.mlp_width)


def _attention_bytes(config: ModelConfig, size: int) -> float:
    """Normed input, queries, keys and values, outputs, and float32 figures of the softmax."""
    heads, groups = config.num_heads, config.num_kv_groups
    key, value = config.head_dim_k, config.head_dim_v
    queries = config.dim + heads * key
    if config.attention == "dense":
        return size * (queries + heads * value + groups * (2 * key + value)) + _FLOAT32 * heads
    sizes = config.nsa
    outputs = 4 * heads * value  # of each branch, and their mixture
    pairs = 2 * groups * (key + value)  # selected and sliding; the compressed ones are few
    overlap = 0 if sizes.phi == "avg" else sizes.compress_block / sizes.compress_stride
    blocks = overlap * groups * (key + value)
    figures = _FLOAT32 * (9 * heads + groups * sizes.num_selected)  # gates twice, softmax; ids
    return size * (queries + outputs + pairs + blocks) + figures
