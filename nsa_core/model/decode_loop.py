"""Decode token after token: one CUDA graph for all positions on a card, the same step elsewhere."""

import torch
from torch import Tensor

from nsa_core.kernels.cuda_graph import capture
from nsa_core.kernels.decode import choose_decode_attention
from nsa_core.model.cache import DecodeCache
from nsa_core.model.decode_step import TokenStep, decode_step
from nsa_core.model.transformer import TOKEN_DTYPES, LanguageModel


def describe_decode(model: LanguageModel) -> str:
    """How a model decodes where it is: one line for people."""
    attention = choose_decode_attention(model.backends).name
    kind = "dense" if model.config.attention == "dense" else f"{attention} attention"
    is_cuda = model.embedding.weight.is_cuda
    return f"{kind}, one CUDA graph for all positions" if is_cuda else f"{kind}, no CUDA graph"


class DecodeLoop:
    """Adds one token to every sequence of a cache at a time.

    What `step` returns on a card lies in the graph's memory: the next step overwrites it.
    """

    def __init__(
        self, model: LanguageModel, cache: DecodeCache, *, use_graph: bool | None = None
    ) -> None:
        """Make the loop; the first step captures the graph.

        Args:
            model: In eval mode, its weights at their final addresses.
            cache: Filled with the prompt; `extend` may add to it between steps.
            use_graph: None uses one on CUDA.

        Raises:
            ValueError: If a graph is asked for without CUDA.
        """
        device = model.embedding.weight.device
        is_cuda = device.type == "cuda"
        if use_graph and not is_cuda:
            message = f"a CUDA graph needs a CUDA device, and the model is on {device}"
            raise ValueError(message)
        self.model, self.cache = model, cache
        self.attend = choose_decode_attention(model.backends)
        self.uses_graph = is_cuda if use_graph is None else use_graph
        self._token_B = torch.zeros(cache.batch, dtype=torch.int64, device=device)
        self._position_B = torch.zeros_like(self._token_B)
        self._captured: tuple[torch.cuda.CUDAGraph, TokenStep] | None = None

    def step(self, token_B: Tensor) -> TokenStep:
        """Add these ids, on the device, and compute the logits after them; the host does not wait.

        Raises:
            ValueError: If the cache is full, or there is not one id of each sequence.
        """
        if token_B.shape != self._token_B.shape or token_B.dtype not in TOKEN_DTYPES:
            message = (
                f"a step takes {len(self._token_B)} ids as int64 or int32, got "
                f"{list(token_B.shape)} of {token_B.dtype}"
            )
            raise ValueError(message)
        if self.cache.length >= self.cache.sizes.capacity:
            message = f"the cache is full: it holds {self.cache.sizes.capacity} tokens"
            raise ValueError(message)
        self._token_B.copy_(token_B)
        self._position_B.fill_(self.cache.length)
        step = self._replay() if self.uses_graph else self._compute()
        self.cache.length += 1
        return step

    def _compute(self) -> TokenStep:
        return decode_step(self.model, self.cache, self._token_B, self._position_B, self.attend)

    def _replay(self) -> TokenStep:
        """What the warm-up writes to the caches, the first replay writes again."""
        if self._captured is None:
            self._captured = capture(self._compute, self._token_B.device)
        graph, step = self._captured
        graph.replay()
        return step
