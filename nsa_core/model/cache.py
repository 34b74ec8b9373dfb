"""What a layer keeps between decode steps: preallocated buffers, written in place.

Legend: B sequences, m new tokens, G groups, D width of a key or value, l tokens of a compressed
block, d stride, w window.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nsa_core.config.model import MAX_POSITIONS, ModelConfig
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.inputs import require_count


@dataclass(frozen=True)
class CacheSizes:
    """Rows of the buffers.

    Attributes:
        chunk: Most new tokens of one step.
        ring: Rows of the window: w - 1 old ones and a chunk of new ones.
        compressed: As `BlockGeometry.num_cached` says: one that is not complete has a row too.
        tail: Rows of the raw tail: what the next block already has, and a chunk.
    """

    capacity: int
    chunk: int
    ring: int
    compressed: int
    tail: int

    @classmethod
    def plan(cls, geometry: BlockGeometry, *, capacity: int, chunk: int) -> Self:
        """Smallest buffers that serve this many tokens in steps of at most `chunk`."""
        return cls(
            capacity=capacity,
            chunk=chunk,
            ring=geometry.window - 1 + chunk,
            compressed=geometry.num_cached(capacity),
            tail=geometry.compress_block - 1 + chunk,
        )


@dataclass(frozen=True, eq=False)
class PairBuffer:
    """Keys [B, R, G, D] and values [B, R, G, E] of R rows."""

    k: Tensor
    v: Tensor

    def write(self, rows: Tensor, k_BmGD: Tensor, v_BmGE: Tensor) -> None:
        """Copy new keys and values to these rows, the same of every sequence."""
        self.k.index_copy_(1, rows, k_BmGD.to(self.k.dtype))
        self.v.index_copy_(1, rows, v_BmGE.to(self.v.dtype))

    def write_one(self, row_B: Tensor, k_BGD: Tensor, v_BGE: Tensor) -> None:
        """Copy one key and value to one row of each sequence."""
        batch, rows = self.k.shape[:2]
        flat_B = torch.arange(batch, device=row_B.device) * rows + row_B
        self.k.flatten(0, 1).index_copy_(0, flat_B, k_BGD.to(self.k.dtype))
        self.v.flatten(0, 1).index_copy_(0, flat_B, v_BGE.to(self.v.dtype))

    def take(self, row_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of these rows of each sequence: keys [B, R, G, D] and values [B, R, G, E]."""
        batch, rows = self.k.shape[:2]
        first_B1 = torch.arange(batch, device=row_BR.device)[:, None] * rows
        flat = (first_B1 + row_BR).flatten()
        k, v = (
            x.flatten(0, 1).index_select(0, flat).view(*row_BR.shape, *x.shape[2:])
            for x in (self.k, self.v)
        )
        return k, v


@dataclass(frozen=True, eq=False)
class NSALayerCache:
    """Buffers of one NSA layer.

    Attributes:
        selected: Rotated keys of the selected branch, all tokens.
        window: Rotated keys of the sliding branch; the token at position p is in row p % ring.
        compressed: Rotated compressed keys, block i in row i.
        tail: Raw keys of the compressed branch; the token at position p is in row p % tail rows.
    """

    selected: PairBuffer
    window: PairBuffer
    compressed: PairBuffer
    tail: PairBuffer


@dataclass(frozen=True, eq=False)
class DenseLayerCache:
    """Rotated keys and values of all tokens."""

    pair: PairBuffer


LayerCache = NSALayerCache | DenseLayerCache


@dataclass(eq=False)
class DecodeCache:
    """The buffers of all layers and how many tokens they hold; all sequences are equally long."""

    geometry: BlockGeometry
    sizes: CacheSizes
    layers: tuple[LayerCache, ...]
    length: int = 0

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        batch: int,
        capacity: int,
        chunk: int = 512,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Reserve everything that `capacity` tokens need, once; prompts are taken by the `chunk`.

        Raises:
            ValueError: If a count is below 1, there are more positions than rotary angles tell
                apart, or the dtype is none of floating point.
        """
        require_count("batch", batch)
        require_count("capacity", capacity, most=MAX_POSITIONS)
        require_count("chunk", chunk)
        if not dtype.is_floating_point:
            message = f"a cache holds floating-point numbers, got {dtype}"
            raise ValueError(message)
        geometry = BlockGeometry.from_config(config.nsa)
        sizes = CacheSizes.plan(geometry, capacity=capacity, chunk=min(chunk, capacity))

        def pair(rows: int) -> PairBuffer:
            shape = (batch, rows, config.num_kv_groups)
            k = torch.zeros(*shape, config.head_dim_k, dtype=dtype, device=device)
            v = torch.zeros(*shape, config.head_dim_v, dtype=dtype, device=device)
            return PairBuffer(k, v)

        def layer() -> LayerCache:
            if config.attention == "dense":
                return DenseLayerCache(pair(capacity))
            return NSALayerCache(
                selected=pair(capacity),
                window=pair(sizes.ring),
                compressed=pair(sizes.compressed),
                tail=pair(sizes.tail),
            )

        return cls(geometry, sizes, tuple(layer() for _ in range(config.num_layers)))

    @property
    def batch(self) -> int:
        """Sequences."""
        first: PairBuffer = next(iter(vars(self.layers[0]).values()))
        return first.k.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        pairs: list[PairBuffer] = [pair for layer in self.layers for pair in vars(layer).values()]
        return sum(pair.k.nbytes + pair.v.nbytes for pair in pairs)
