"""Compare the chosen backends with the reference on this very device, forward and gradients.

Legend: N tokens, H query heads, G key/value groups, D key width, E value width, C compressed slots.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa_core.config.model import ModelConfig
from nsa_core.kernels.backend import AttentionBackend, BranchBackends
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import (
    ReferenceBackend,
    attend,
    block_scores,
    document_borders,
    document_slots,
)
from nsa_core.kernels.selection import choose_blocks

#: Relative L2 error that each dtype may have (spec: what must be shown, 1). The specification's
#: 1e-5 for float32 is absolute and of outputs; here it is relative, because gradients grow with the
#: row. Outputs of values of size 1 are smaller than 1, so for them it asks for more on average.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
#: Share of the exact choice's free score that a choice in lower precision may lose.
REGRET_LIMIT = 1e-3
#: Blocks that a token far enough in always takes: the first, the previous one and its own.
_NUM_FORCED = 3
#: Scores of the reference that exist at a time, over all heads: long documents go through it some
#: queries at a time, forward and backward.
_CHUNK_SCORES = {"cpu": 2**22, "cuda": 2**27}


@dataclass(frozen=True)
class Parity:
    """Error of one branch against the reference.

    Attributes:
        error: Largest relative L2 error over the output and the gradients of q, k and v.
        worst: Which of them it was.
    """

    branch: str
    backend: str
    error: float
    worst: str
    limit: float

    @property
    def is_close(self) -> bool:
        """Within the limit; NaN is not."""
        return self.error <= self.limit


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """L2 norm of the difference over the L2 norm of the reference."""
    wanted = wanted.double()
    scale = wanted.norm().clamp(min=1e-30)
    return float((found.double() - wanted).norm() / scale)


@dataclass(frozen=True, eq=False)
class _Inputs:
    q_NHD: Tensor
    k_NGD: Tensor
    v_NGE: Tensor
    k_CGD: Tensor
    v_CGE: Tensor
    grad_NHE: Tensor
    packing: Packing
    geometry: BlockGeometry


def short_length(config: ModelConfig) -> int:
    """Tokens of a row beyond the window, of which about half have a choice of blocks."""
    sizes = config.nsa
    return max(2 * sizes.window, (2 * sizes.num_selected + 2) * sizes.select_block) + 13


def _draw(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, num_tokens: int | None, seed: int
) -> _Inputs:
    """Random inputs in two documents: one of this many tokens, or `short_length`, and a short one.

    The second one begins in the middle of a block of the row.
    """
    geometry = BlockGeometry.from_config(config.nsa)
    lengths = [num_tokens or short_length(config), geometry.select_block + 5]
    packing = Packing.from_lengths(lengths, device)
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, heads: int, width: int) -> Tensor:
        return torch.randn(rows, heads, width, generator=generator).to(device, dtype)

    tokens, slots = packing.num_tokens, geometry.num_slots(packing.num_tokens)
    groups = config.num_kv_groups
    return _Inputs(
        q_NHD=draw(tokens, config.num_heads, config.head_dim_k),
        k_NGD=draw(tokens, groups, config.head_dim_k),
        v_NGE=draw(tokens, groups, config.head_dim_v),
        k_CGD=draw(slots, groups, config.head_dim_k),
        v_CGE=draw(slots, groups, config.head_dim_v),
        grad_NHE=draw(tokens, config.num_heads, config.head_dim_v),
        packing=packing,
        geometry=geometry,
    )


Branch = Callable[[AttentionBackend, Tensor, Tensor, Tensor], Tensor]


def _run(branch: Branch, backend: AttentionBackend, *inputs: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a branch; the last input is the gradient of the output."""
    *qkv, grad = inputs
    leaves = [tensor.clone().requires_grad_() for tensor in qkv]
    out = branch(backend, leaves[0], leaves[1], leaves[2])
    out.backward(grad)  # type: ignore[no-untyped-call]
    named = zip(("dq", "dk", "dv"), leaves, strict=True)
    return {"out": out.detach()} | {
        name: leaf.grad for name, leaf in named if leaf.grad is not None
    }


def _reference_run(see: "_Visible", x: _Inputs, *inputs: Tensor) -> dict[str, Tensor]:
    """What `_run` gives, by explicit scores, mask, softmax and sum for some queries at a time."""
    q, k, v = (tensor.float().clone().requires_grad_() for tensor in inputs[:3])
    outs = []
    for start, stop in document_borders(x.packing):
        keys = see.keys(start, stop)
        num_keys = max(1, keys.stop - keys.start)
        step = max(1, _CHUNK_SCORES[q.device.type] // (q.shape[1] * num_keys))
        for first in range(start, stop, step):
            rows = slice(first, min(first + step, stop))
            mask_HTR = see.mask(rows, start, num_keys=keys.stop - keys.start)
            out = attend(q[rows], k[keys], v[keys], mask_HTR)
            out.backward(inputs[3][rows].float())  # type: ignore[no-untyped-call]
            outs.append(out.detach())
    found = {"out": torch.cat(outs), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True, eq=False)
class _Visible:
    """Which keys the queries of a branch see, written from the specification.

    Attributes:
        geometry: Block sizes.
        num_heads: H.
        ids_NGS: Chosen blocks of the selected branch; None for the others.
    """

    geometry: BlockGeometry
    num_heads: int
    device: torch.device
    ids_NGS: Tensor | None = None
    is_compressed: bool = False

    def keys(self, start: int, stop: int) -> slice:
        """Rows of the keys of the document in rows start .. stop - 1."""
        if self.is_compressed:
            return document_slots(start, stop, self.geometry)
        return slice(start, stop)

    def mask(self, rows: slice, start: int, *, num_keys: int) -> Tensor:
        """Bool [1 or H, T, R] for some rows of a document that begins at `start`."""
        device = self.device
        position_T1 = torch.arange(rows.start - start, rows.stop - start, device=device)[:, None]
        key_R = torch.arange(num_keys, device=device)
        if self.is_compressed:
            last_R = key_R * self.geometry.compress_stride + self.geometry.compress_block - 1
            return (last_R <= position_T1)[None]
        age_TR = position_T1 - key_R
        if self.ids_NGS is None:
            return ((age_TR >= 0) & (age_TR < self.geometry.window))[None]
        ids_TGS, block_R = self.ids_NGS[rows].long(), key_R // self.geometry.select_block
        num_blocks = int(block_R[-1]) + 1
        is_chosen_TGJ = torch.zeros(
            *ids_TGS.shape[:2], num_blocks + 1, dtype=torch.bool, device=device
        )
        is_chosen_TGJ.scatter_(2, torch.where(ids_TGS < 0, num_blocks, ids_TGS), 1)
        is_seen_GTR = is_chosen_TGJ[..., block_R].transpose(0, 1) & (age_TR >= 0)
        return is_seen_GTR.repeat_interleave(self.num_heads // ids_TGS.shape[1], dim=0)


def _compare(
    name: str,
    branch: Branch,
    backend: AttentionBackend,
    see: _Visible,
    x: _Inputs,
    *inputs: Tensor,
) -> Parity:
    found = _run(branch, backend, *inputs)
    wanted = _reference_run(see, x, *inputs)
    errors = {
        key: relative_error(found[key], wanted[key]) if key in found else math.inf for key in wanted
    }
    worst = max(errors, key=lambda key: (errors[key] != errors[key], errors[key]))
    return Parity(name, backend.name, errors[worst], worst, LIMITS[inputs[0].dtype])


def parity_probe(
    config: ModelConfig,
    backends: BranchBackends,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int | None = None,
    seed: int = 0,
) -> list[Parity]:
    """Compare every branch of the model with the reference at its own widths and block sizes.

    The selected branch gets random blocks, the forced ones among them; the choice itself is judged
    by `choice_regret`. The longer document has `num_tokens`, or `short_length`.
    """
    x = _draw(config, device, dtype, num_tokens, seed)
    ids_NGS = _random_choice(x, config.num_kv_groups, seed)
    compressed: Branch = lambda b, q, k, v: b.compressed(q, k, v, x.geometry, x.packing)[0]  # noqa: E731
    selected: Branch = lambda b, q, k, v: b.selected(q, k, v, ids_NGS, x.geometry, x.packing)  # noqa: E731
    sliding: Branch = lambda b, q, k, v: b.sliding(q, k, v, x.geometry, x.packing)  # noqa: E731
    everything = replace(x.geometry, window=x.packing.max_seqlen)
    dense: Branch = lambda b, q, k, v: b.sliding(q, k, v, everything, x.packing)  # noqa: E731
    heads, of_tokens = config.num_heads, (x.q_NHD, x.k_NGD, x.v_NGE, x.grad_NHE)
    if backends.dense is not None:
        see = _Visible(everything, heads, device)
        return [_compare("dense", dense, backends.dense, see, x, *of_tokens)]
    of_slots = (x.q_NHD, x.k_CGD, x.v_CGE, x.grad_NHE)
    see_blocks = _Visible(x.geometry, heads, device, is_compressed=True)
    see_chosen = _Visible(x.geometry, heads, device, ids_NGS)
    see_window = _Visible(x.geometry, heads, device)
    return [
        _compare("compressed", compressed, backends.compressed, see_blocks, x, *of_slots),
        _compare("selected", selected, backends.selected, see_chosen, x, *of_tokens),
        _compare("sliding", sliding, backends.sliding, see_window, x, *of_tokens),
    ]


def _random_choice(x: _Inputs, num_groups: int, seed: int) -> Tensor:
    """Blocks [N, G, S] int32 that keep the rules of a choice and are random otherwise."""
    num_blocks = x.geometry.num_select_blocks(x.packing.max_seqlen)
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(x.packing.num_tokens, num_groups, num_blocks, generator=generator)
    position_N = x.packing.position_N
    return choose_blocks(score.to(position_N.device), position_N, x.geometry)


@dataclass(frozen=True)
class ChoiceResult:
    """How good a choice of blocks is where there is one.

    Attributes:
        num_choices: Tokens and groups with more blocks than may be chosen; 0 where all chosen
            blocks are forced ones.
        regret: Share of the score of the exact choice's free blocks that was lost there; 0 is
            exact. A choice that breaks a rule (a block chosen twice, one of the future, a wrong
            count) costs 1.
    """

    num_choices: int
    regret: float

    @property
    def is_good(self) -> bool:
        """Within the limit; NaN is not."""
        return self.regret <= REGRET_LIMIT


def choice_regret(
    config: ModelConfig,
    backends: BranchBackends,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int | None = None,
    seed: int = 0,
) -> ChoiceResult:
    """Judge the choice of blocks that a run makes by the exact scores.

    Forced blocks, and tokens that take every block there is, are held to the rules and left out of
    the scores: they would hide a poor choice. Documents are those of `parity_probe`.
    """
    x = _draw(config, device, dtype, num_tokens, seed)
    q_NHD, k_CGD = x.q_NHD.float(), x.k_CGD.float()
    exact = ReferenceBackend().select(q_NHD, k_CGD, torch.empty(0), x.geometry, x.packing)
    found = _choose_as_a_run_does(backends, x)
    wanted_score = found_score = 0.0
    num_choices = 0
    for start, stop in document_borders(x.packing):
        slots = document_slots(start, stop, x.geometry)
        score_TGJ = block_scores(q_NHD[start:stop], k_CGD[slots], x.geometry)
        wanted, chosen = exact[start:stop], found[start:stop]
        position_T = torch.arange(stop - start, device=device)
        if not follows_the_rules(chosen, wanted, position_T, x.geometry).all():
            return ChoiceResult(wanted.shape[0] * wanted.shape[1], 1.0)
        chooses_T = position_T // x.geometry.select_block >= x.geometry.num_selected
        chooses_T &= torch.tensor(x.geometry.num_selected > _NUM_FORCED, device=device)
        num_choices += int(chooses_T.sum()) * wanted.shape[1]
        wanted_score += _free_score(score_TGJ, wanted, position_T, x.geometry, chooses_T)
        found_score += _free_score(score_TGJ, chosen, position_T, x.geometry, chooses_T)
    if not num_choices:
        return ChoiceResult(0, 0.0)
    return ChoiceResult(num_choices, max(1 - found_score / wanted_score, 0.0))


def _choose_as_a_run_does(backends: BranchBackends, x: _Inputs) -> Tensor:
    """Chosen ids [N, G, S]: by the operator of all branches where there is one."""
    if backends.fused is not None:
        pair = x.k_NGD, x.v_NGE
        gate_NH3 = torch.ones_like(x.q_NHD[..., :3])
        _, ids_NGS = backends.fused.attend(
            x.q_NHD, (x.k_CGD, x.v_CGE), pair, pair, gate_NH3, x.geometry, x.packing
        )
        return ids_NGS
    backend = backends.compressed
    _, lse_NH = backend.compressed(x.q_NHD, x.k_CGD, x.v_CGE, x.geometry, x.packing)
    return backend.select(x.q_NHD, x.k_CGD, lse_NH, x.geometry, x.packing)


def _free_score(
    score_TGJ: Tensor,
    ids_TGS: Tensor,
    position_T: Tensor,
    geometry: BlockGeometry,
    chooses_T: Tensor,
) -> float:
    """Score of the chosen blocks that are not forced, of the tokens that choose."""
    current_T11 = (position_T // geometry.select_block)[:, None, None]
    is_free_TGS = (ids_TGS > 0) & (ids_TGS < current_T11 - 1)
    score_TGS = chosen_scores(score_TGJ, ids_TGS) * is_free_TGS
    return float(score_TGS[chooses_T].sum(dtype=torch.float64))


def follows_the_rules(
    chosen_XGS: Tensor, exact_XGS: Tensor, position_X: Tensor, geometry: BlockGeometry
) -> Tensor:
    """Whether a choice [X, G] is as good as the exact one but for its scores.

    As many blocks, ascending with -1 at the end, none of the future, the forced ones among them.
    """
    own_X11 = (position_X // geometry.select_block)[:, None, None]
    forced = (torch.zeros_like(own_X11), (own_X11 - 1).clamp(min=0), own_X11)
    ascends = (chosen_XGS[..., 1:] > chosen_XGS[..., :-1]) | (chosen_XGS[..., 1:] == -1)
    is_block = (chosen_XGS >= -1) & (chosen_XGS <= own_X11)
    is_same_count = (chosen_XGS >= 0) == (exact_XGS >= 0)
    rules = [found.all(dim=-1) for found in (ascends, is_block, is_same_count)]
    has_forced = [(chosen_XGS == block).any(dim=-1) for block in forced]
    return torch.stack([*rules, *has_forced]).all(dim=0)


def chosen_scores(score_XGJ: Tensor, ids_XGS: Tensor) -> Tensor:
    """Scores [X, G, S] of chosen blocks; 0 for padding and for what is no block."""
    index_XGS = ids_XGS.long().clamp(0, score_XGJ.shape[-1] - 1)
    return score_XGJ.gather(-1, index_XGS) * (ids_XGS >= 0)


def trained_rows(parameter: torch.nn.Parameter) -> Tensor:
    """Bool [rows]: which rows of a matrix, or numbers of a vector, have a usable gradient.

    A row is what the last axis holds; one number of it must not be 0, and all must be finite.
    """
    grad = parameter.grad
    shape = parameter.shape[:-1] if parameter.ndim > 1 else parameter.shape
    if grad is None:
        return torch.zeros(shape.numel(), dtype=torch.bool)
    row_RX = grad.reshape(shape.numel(), -1)
    return (row_RX.isfinite().all(dim=1) & (row_RX != 0).any(dim=1)).cpu()


def describe_dead_rows(name: str, is_trained_R: Tensor) -> str:
    """Name of a parameter with the first range of its rows that no gradient reaches."""
    dead = torch.nonzero(~is_trained_R).flatten().tolist()
    if len(dead) == len(is_trained_R):
        return name
    stop = next(
        (row for row in range(dead[0], len(is_trained_R)) if is_trained_R[row]), len(is_trained_R)
    )
    return f"{name}, rows {dead[0]} to {stop - 1}"
