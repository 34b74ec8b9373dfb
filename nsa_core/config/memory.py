"""Device memory of a training step, counted by what autograd and the compiler keep."""

from dataclasses import dataclass

from nsa_core.config.counts import count_parameters
from nsa_core.config.model import ModelConfig
from nsa_core.config.training import OptimizerConfig, Precision

MIB = 2**20
#: Logits of a chunk of the loss: of the Triton kernel, and of torch's passes.
TRITON_CHUNK, TORCH_CHUNK = 2**29, 2**26
_FLOAT32 = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """MiB (2^20 bytes) of device memory at the peak of a step, by part; an estimate.

    Attributes:
        weights: float32 master weights.
        gradients: float32 gradients, as far as they are there at the peak.
        optimizer: Moments of AdamW, or the momentum of Muon where it applies.
        autocast: Half-precision copies of the weights.
        activations: Tensors kept for the backward pass.
        logits: The loss: its chunk, hidden states with their gradient, the gradient of the head.
    """

    weights: float
    gradients: float
    optimizer: float
    autocast: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class StepShape:
    """How a step is computed, as far as its memory depends on it.

    Attributes:
        tokens: Tokens of one micro-batch: micro_batch * seq_len.
        accumulation: Micro-batches of a step; from the second on, gradients lie there already.
        activation_checkpointing: As in `RuntimeConfig`.
        is_compiled: The compiler makes again in the backward pass what is no matrix product.
    """

    tokens: int
    accumulation: int = 1
    activation_checkpointing: str = "none"
    is_compiled: bool = False


def estimate_memory(
    config: ModelConfig, optimizer: OptimizerConfig, precision: Precision, shape: StepShape
) -> MemoryEstimate:
    """Memory of one training step on one device, at its peak: where the loss has been computed.

    For the Triton kernels, or torch's attention for dense. Within 5 % of ten peaks of compiled
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
    loss = _loss_bytes(config, shape.tokens, is_half=is_half)
    gradients = float(_FLOAT32 * counts.total)
    if shape.accumulation == 1:  # they come to be while activations go away
        gradients = max(0.0, gradients - kept - loss)
    return MemoryEstimate(
        weights=_FLOAT32 * counts.total / MIB,
        gradients=gradients / MIB,
        optimizer=_FLOAT32 * moments / MIB,
        autocast=2 * counts.total / MIB if is_half else 0.0,
        activations=kept / MIB,
        logits=loss / MIB,
    )


def _loss_bytes(config: ModelConfig, tokens: int, *, is_half: bool) -> float:
    """The last stream and norm in float32, the product's input and its gradient, chunk and head."""
    size = 2 if is_half else 4
    hidden = tokens * config.dim * (2 * _FLOAT32 + 2 * size)
    head = _FLOAT32 * config.vocab_size * config.dim
    logits = tokens * config.vocab_size
    chunk = 2 * min(TRITON_CHUNK, logits) if is_half else 3 * 4 * min(TORCH_CHUNK, logits)
    return hidden + head + chunk


def _kept_bytes(config: ModelConfig, size: int, shape: StepShape) -> float:
    """Bytes of all layers; what is computed again is there for one layer at a time."""
    stream = _FLOAT32 * config.dim
    mlp = stream + _mlp_bytes(config, size, is_compiled=shape.is_compiled)
    attention = _attention_bytes(config, size)
    if shape.is_compiled:  # the stream between attention and MLP is made from what was added to it
        mlp += size * config.dim - stream
    layer = {"none": stream + mlp + attention, "selective": stream + mlp, "full": stream}
    every = layer[shape.activation_checkpointing]
    return shape.tokens * (config.num_layers * every + layer["none"] - every)


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
