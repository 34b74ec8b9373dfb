"""Probes of decode: token by token as in one pass, and the kernels of a card as plain PyTorch.

Legend: B sequences, T tokens of a row, V vocabulary, H query heads, G groups, h = H / G, D key
width, C rows of the compressed buffer, J selection blocks, S = num_selected, l tokens of a
compressed block, d stride, l' tokens of a selection block, w window.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa_core.checks.numerics import chosen_scores, follows_the_rules
from nsa_core.kernels.decode_attention import (
    CachedPairs,
    DecodeAttention,
    DecodedToken,
    GatheredDecode,
)
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.selection import select_scores
from nsa_core.model.cache import DecodeCache
from nsa_core.model.decode import logits, prefill
from nsa_core.model.decode_step import DecodeLoop, decode_step
from nsa_core.model.transformer import LanguageModel

#: Relative L2 that an output may differ from that of the same inputs in float64. Half types round
#: the probabilities before the second product, a branch before the sum, and the sum, each by half a
#: unit in the last place: 2^-9 in bfloat16, 2^-12 in float16. At the sizes of `m7c-125m` plain
#: PyTorch measures 2.6e-3 in bfloat16, and a window that lacks one key is off by 1.2e-2.
#: float32: spec, what must be shown, 6.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-9, torch.float16: 3 * 2**-12}
#: Two blocks tie if their exact scores differ by no more than this share. Kernels add the products
#: of a score in float32: D products move it by at most D * 2^-24 of their sum of magnitudes, here
#: up to 3 nats at D = 128, so by 2e-5, and the probability by twice that with its normaliser's.
TIE = 1e-4
#: Finite garbage in every row that no token has written.
_GARBAGE = 100.0
_BATCH = 2


@dataclass(frozen=True)
class DecodeResult:
    """How far decode is from one pass.

    Attributes:
        difference: Largest absolute difference of a logit; NaN is a failure.
        limit: What it may be in float32 (spec: what must be shown, 6).
    """

    num_tokens: int
    difference: float
    limit: float = 1e-5

    @property
    def is_equal(self) -> bool:
        """Within the limit."""
        return self.difference <= self.limit


@torch.no_grad()
def decode_probe(
    model: LanguageModel,
    *,
    num_tokens: int,
    prompt: int,
    one_pass: LanguageModel | None = None,
    seed: int = 0,
) -> DecodeResult:
    """Take a prompt in chunks, then single tokens, and compare every logit with one pass.

    The single tokens go the way that generation takes: through one CUDA graph on a card.

    The model is in float32. The prompt is prefilled in chunks that divide neither it nor the
    blocks; T is best beyond the window. `one_pass` has the same weights on backends that train in
    float32; `model` if left out.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.vocab_size
    tokens_BT = torch.randint(vocab_size, (1, num_tokens), generator=generator).to(device)
    wanted_TV = (one_pass or model)(tokens_BT)[0]
    cache = DecodeCache.allocate(
        model.config,
        batch=1,
        capacity=num_tokens,
        chunk=max(1, prompt // 3 + 1),
        dtype=torch.float32,
        device=device,
    )
    step = prefill(model, cache, tokens_BT[:, :prompt])
    worst = (logits(model, step)[0] - wanted_TV[prompt - 1]).abs().max()
    loop = DecodeLoop(model, cache)
    for position in range(prompt, num_tokens):
        found_V = loop.step(tokens_BT[:, position]).logits_BV[0]
        difference = (found_V - wanted_TV[position]).abs().max()
        worst = torch.maximum(worst, difference)
    return DecodeResult(num_tokens, worst.item())


@dataclass(frozen=True)
class DecodeKernelsResult:
    """How far the kernels are from plain PyTorch in one dtype.

    Attributes:
        num_steps: Tokens that were decoded, each in every layer and of two sequences.
        error: Largest relative L2 of a layer's output; NaN is a failure.
        wrong_choices: Chosen blocks that break a rule or lose more score than a tie.
        ties: Choices unlike plain PyTorch's that tie with it; their outputs are not compared.
        wrong_reads: Counts of keys unlike plain PyTorch's, or unlike the specification's formula.
    """

    dtype: torch.dtype
    num_steps: int
    error: float
    wrong_choices: int
    ties: int
    wrong_reads: int

    @property
    def limit(self) -> float:
        """What the error may be."""
        return LIMITS[self.dtype]

    @property
    def is_equal(self) -> bool:
        """Outputs within the limit, choices equal up to ties, counts equal."""
        return self.error <= self.limit and not self.wrong_choices and not self.wrong_reads


def decode_kernels_probe(
    model: LanguageModel, kernels: DecodeAttention, dtype: torch.dtype, seed: int = 0
) -> DecodeKernelsResult:
    """Decode the first tokens of a text and some far behind; compare each layer on one cache.

    The first tokens see no compressed block, then one. The far ones have more blocks to choose from
    than they may take, and complete a compressed and a selection block on the way.

    The model has NSA layers and float32 weights; both sides read its caches, in `dtype`.

    Raises:
        ValueError: If the kernels do not serve the sizes of the model.
    """
    geometry, device = model.geometry, model.embedding.weight.device
    near = geometry.compress_block + geometry.compress_stride
    far = max(geometry.window, (geometry.num_selected + 2) * geometry.select_block, near) - 5
    length = far + geometry.select_block + geometry.compress_stride
    generator = torch.Generator().manual_seed(seed)
    shape = (_BATCH, length)
    tokens_BT = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    cache = DecodeCache.allocate(model.config, batch=_BATCH, capacity=length, device=device)
    _fill_with_garbage(cache)
    compared = _Compared(kernels, dtype)
    _decode(model, cache, tokens_BT[:, :near], compared)
    if far > near:
        prefill(model, cache, tokens_BT[:, near:far])
    _decode(model, cache, tokens_BT[:, max(near, far) :], compared)
    return compared.result(near + length - max(near, far))


def _fill_with_garbage(cache: DecodeCache) -> None:
    for layer in cache.layers:
        for pair in vars(layer).values():
            pair.k.fill_(_GARBAGE)
            pair.v.fill_(_GARBAGE)


def _decode(
    model: LanguageModel, cache: DecodeCache, tokens_BT: Tensor, attend: DecodeAttention
) -> None:
    for token_B in tokens_BT.T.contiguous():
        position_B = torch.full((_BATCH,), cache.length, device=token_B.device)
        decode_step(model, cache, token_B, position_B, attend)
        cache.length += 1


@dataclass(eq=False)
class _Compared:
    """Plain PyTorch in float64, which looks at what the kernels make of the same inputs."""

    kernels: DecodeAttention
    dtype: torch.dtype
    errors: list[Tensor] = field(default_factory=list)
    wrong_choices: list[Tensor] = field(default_factory=list)
    ties: list[Tensor] = field(default_factory=list)
    wrong_reads: list[Tensor] = field(default_factory=list)

    name = "compared"

    def attend(
        self,
        q_BHD: Tensor,
        pairs: CachedPairs,
        gate_BH3: Tensor,
        position_B: Tensor,
        geometry: BlockGeometry,
    ) -> DecodedToken:
        """See `DecodeAttention.attend`."""
        q, held = q_BHD.to(self.dtype), _cast(pairs, self.dtype)
        found = self.kernels.attend(q, held, gate_BH3, position_B, geometry)
        exact_q, exact = q.double(), _cast(held, torch.float64)
        wanted = GatheredDecode().attend(exact_q, exact, gate_BH3.double(), position_B, geometry)
        score_BGJ = _exact_scores(exact_q, exact, position_B, geometry)
        is_same_B = (found.ids_BGS == wanted.ids_BGS).flatten(1).all(dim=-1)
        is_good_BG = _is_good_choice(found.ids_BGS, wanted.ids_BGS, score_BGJ, position_B, geometry)
        self.errors.append(_relative_error(found.out_BHE, wanted.out_BHE, is_same_B))
        self.wrong_choices.append((~is_good_BG).sum())
        self.ties.append((is_good_BG.all(dim=-1) & ~is_same_B).sum())
        self.wrong_reads.append(_wrong_reads(found, wanted, position_B, geometry))
        return DecodedToken(wanted.out_BHE.to(q_BHD.dtype), wanted.ids_BGS, wanted.counted)

    def result(self, num_steps: int) -> DecodeKernelsResult:
        """Everything that was seen; waits for the device."""
        counts = (
            int(torch.stack(seen).sum())
            for seen in (self.wrong_choices, self.ties, self.wrong_reads)
        )
        error = float(torch.stack(self.errors).max())
        return DecodeKernelsResult(self.dtype, num_steps, error, *counts)


def _cast(pairs: CachedPairs, dtype: torch.dtype) -> CachedPairs:
    return CachedPairs(
        *((k.to(dtype), v.to(dtype)) for k, v in (pairs.compressed, pairs.selected, pairs.sliding))
    )


def _relative_error(found_BHE: Tensor, wanted_BHE: Tensor, counts_B: Tensor) -> Tensor:
    """Largest relative L2 of a sequence that counts."""
    gap_B = (found_BHE.double() - wanted_BHE).flatten(1).norm(dim=-1)
    error_B = gap_B / wanted_BHE.flatten(1).norm(dim=-1).clamp(min=1e-30)
    return torch.where(counts_B, error_B, 0.0).max()


def _exact_scores(
    q_BHD: Tensor, pairs: CachedPairs, position_B: Tensor, geometry: BlockGeometry
) -> Tensor:
    """Importance [B, G, J] of the selection blocks (Eq. 8-10), by one masked softmax."""
    k_BCGD = pairs.compressed[0]
    batch, _, groups, width = k_BCGD.shape
    q_BGhD = q_BHD.reshape(batch, groups, -1, width)
    logit_BGhC = torch.einsum("bghd,bcgd->bghc", q_BGhD, k_BCGD) / math.sqrt(width)
    last_C = torch.arange(k_BCGD.shape[1], device=q_BHD.device) * geometry.compress_stride
    is_hidden_BC = last_C + geometry.compress_block - 1 > position_B[:, None]
    hidden_B11C = is_hidden_BC[:, None, None]
    prob_BGhC = torch.softmax(logit_BGhC.masked_fill(hidden_B11C, -math.inf), dim=-1)
    num_blocks = geometry.num_select_blocks(pairs.selected[0].shape[1])
    return select_scores(prob_BGhC.masked_fill(hidden_B11C, 0.0).sum(dim=2), num_blocks, geometry)


def _is_good_choice(
    found_BGS: Tensor,
    wanted_BGS: Tensor,
    score_BGJ: Tensor,
    position_B: Tensor,
    geometry: BlockGeometry,
) -> Tensor:
    """Whether a choice [B, G] keeps the rules, and its n-th best block ties with the exact one."""
    found, wanted = (
        chosen_scores(score_BGJ, ids).sort(dim=-1, descending=True).values
        for ids in (found_BGS, wanted_BGS)
    )
    ties = (found >= wanted * (1 - TIE)).all(dim=-1)
    return follows_the_rules(found_BGS, wanted_BGS, position_B, geometry) & ties


def _wrong_reads(
    found: DecodedToken, wanted: DecodedToken, position_B: Tensor, geometry: BlockGeometry
) -> Tensor:
    """Counts unlike plain PyTorch's, and sums unlike spec/model.md, Decode."""
    totals = list(zip(found.counted.totals(), wanted.counted.totals(), strict=True))
    wrong = torch.stack([(one != other).sum() for one, other in totals]).sum()
    seen_B = position_B + 1
    stride, block = geometry.compress_stride, geometry.compress_block
    compressed_B = ((seen_B - block) // stride + 1).clamp(min=0)
    left_BS = seen_B[:, None] - found.ids_BGS[:, 0].long() * geometry.select_block
    in_block_BS = left_BS.clamp(0, geometry.select_block) * (found.ids_BGS[:, 0] >= 0)
    formula_B = compressed_B + in_block_BS.sum(dim=-1) + seen_B.clamp(max=geometry.window)
    return wrong + (torch.stack([one for one, _ in totals]).sum(dim=0) != formula_B).sum()
