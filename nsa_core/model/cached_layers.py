"""Take new tokens through the layers of a model, each attending to its own cache.

Legend: N new tokens of all sequences, W model width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from nsa_core.model.attention import DenseAttention, NSAAttention
from nsa_core.model.cache import DecodeCache, DenseLayerCache, LayerCache, NSALayerCache
from nsa_core.model.transformer import Block, LanguageModel

Reads = TypeVar("Reads")
#: A layer, its normed input [N, W] and its cache in; what it adds [N, W], its chosen blocks and the
#: keys it read out.
AttendNSA = Callable[[NSAAttention, Tensor, NSALayerCache], tuple[Tensor, Tensor, Reads]]
#: As `AttendNSA`, without blocks.
AttendDense = Callable[[DenseAttention, Tensor, DenseLayerCache], tuple[Tensor, Reads]]


@dataclass(eq=False)
class CachedPass(Generic[Reads]):
    """One pass of new tokens through all layers.

    Attributes:
        attend_nsa: How an NSA layer attends.
        attend_dense: How a dense layer attends.
        ids: Chosen blocks of each NSA layer.
        reads: Keys read in each layer.
    """

    attend_nsa: AttendNSA[Reads]
    attend_dense: AttendDense[Reads]
    ids: list[Tensor] = field(default_factory=list)
    reads: list[Reads] = field(default_factory=list)

    def run(self, model: LanguageModel, cache: DecodeCache, token_N: Tensor) -> Tensor:
        """Hidden states [N, W] after the last norm.

        Raises:
            TypeError: If the cache was made for another kind of attention.
        """

        def through(index: int, block: Block, x_NW: Tensor) -> Tensor:
            layer = cache.layers[index]
            return block.add(x_NW, lambda normed_NW: self._attend(block, normed_NW, layer))

        return model.through_blocks(token_N, through)

    def _attend(self, block: Block, x_NW: Tensor, layer: LayerCache) -> Tensor:
        attention = block.attention
        if isinstance(attention, NSAAttention) and isinstance(layer, NSALayerCache):
            attended, ids, reads = self.attend_nsa(attention, x_NW, layer)
            self.ids.append(ids)
        elif isinstance(attention, DenseAttention) and isinstance(layer, DenseLayerCache):
            attended, reads = self.attend_dense(attention, x_NW, layer)
        else:
            message = f"a cache made for {type(layer).__name__} cannot serve {type(attention)}"
            raise TypeError(message)
        self.reads.append(reads)
        return attended
