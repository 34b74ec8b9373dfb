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
    block_scores,
    document_borders,
    document_slots,
)

#: Relative L2 error that each dtype may have (spec: what must be shown, 1). The specification's
#: 1e-5 for float32 is absolute and of outputs; here it is relative, because gradients grow with the
#: row. Outputs of values of size 1 are smaller than 1, so for them it asks for more on average.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
#: Share of the exact choice's score that a choice in lower precision may lose.
REGRET_LIMIT = 1e-3
#: Of the longer document, or so: the reference keeps its scores, 4 bytes a head and pair of tokens.
_MAX_TOKENS = 1100


@dataclass(frozen=True)
class Parity:
    """Error of one branch against the reference.

    Attributes:
        branch: Branch that was compared.
        backend: Backend that computed it.
        error: Largest relative L2 error over the output and the gradients of q, k and v.
        worst: Which of them it was.
        limit: What the error may be.
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


def _draw(config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int) -> _Inputs:
    """Random inputs in two documents of odd lengths.

    The first one reaches beyond the window, and has more blocks than may be chosen, if the memory
    of the reference's masks allows it.
    """
    geometry = BlockGeometry.from_config(config.nsa)
    wanted = max(2 * geometry.window, (geometry.num_selected + 2) * geometry.select_block)
    lengths = [min(wanted, _MAX_TOKENS) + 13, geometry.select_block + 5]
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


def _compare(name: str, branch: Branch, backend: AttentionBackend, *inputs: Tensor) -> Parity:
    found = _run(branch, backend, *inputs)
    wanted = _run(branch, ReferenceBackend(), *(tensor.float() for tensor in inputs))
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
    seed: int = 0,
) -> list[Parity]:
    """Compare every branch of the model with the reference at its own widths and block sizes.

    The selected branch gets the reference's own choice; the choice itself is judged by
    `choice_regret`.

    Args:
        config: Widths and block sizes.
        backends: The backends that would train.
        device: Where they run.
        dtype: In which q, k and v arrive.
        seed: Of the inputs.
    """
    x = _draw(config, device, dtype, seed)
    reference = ReferenceBackend()
    ids_NGS = reference.select(
        x.q_NHD.float(), x.k_CGD.float(), torch.empty(0), x.geometry, x.packing
    ).to(device, torch.int32)
    compressed: Branch = lambda b, q, k, v: b.compressed(q, k, v, x.geometry, x.packing)[0]  # noqa: E731
    selected: Branch = lambda b, q, k, v: b.selected(q, k, v, ids_NGS, x.geometry, x.packing)  # noqa: E731
    sliding: Branch = lambda b, q, k, v: b.sliding(q, k, v, x.geometry, x.packing)  # noqa: E731
    everything = replace(x.geometry, window=x.packing.max_seqlen)
    dense: Branch = lambda b, q, k, v: b.sliding(q, k, v, everything, x.packing)  # noqa: E731
    token_inputs = (x.q_NHD, x.k_NGD, x.v_NGE, x.grad_NHE)
    if backends.dense is not None:
        return [_compare("dense", dense, backends.dense, *token_inputs)]
    return [
        _compare(
            "compressed", compressed, backends.compressed, x.q_NHD, x.k_CGD, x.v_CGE, x.grad_NHE
        ),
        _compare("selected", selected, backends.selected, *token_inputs),
        _compare("sliding", sliding, backends.sliding, *token_inputs),
    ]


def choice_regret(
    config: ModelConfig,
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> float:
    """Share of the exact choice's score that a backend's choice of blocks loses; 0 is exact.

    A choice that breaks a rule (a block chosen twice, one of the future, a wrong count) costs 1.
    """
    x = _draw(config, device, dtype, seed)
    q_NHD, k_CGD = x.q_NHD.float(), x.k_CGD.float()
    exact = ReferenceBackend().select(q_NHD, k_CGD, torch.empty(0), x.geometry, x.packing)
    _, lse_NH = backend.compressed(x.q_NHD, x.k_CGD, x.v_CGE, x.geometry, x.packing)
    found = backend.select(x.q_NHD, x.k_CGD, lse_NH, x.geometry, x.packing)
    wanted_score = found_score = 0.0
    for start, stop in document_borders(x.packing):
        slots = document_slots(start, stop, x.geometry)
        score_TGJ = block_scores(q_NHD[start:stop], k_CGD[slots], x.geometry)
        wanted, chosen = exact[start:stop], found[start:stop]
        position_T = torch.arange(stop - start, device=device)
        if not follows_the_rules(chosen, wanted, position_T, x.geometry).all():
            return 1.0
        wanted_score += float(chosen_scores(score_TGJ, wanted).sum())
        found_score += float(chosen_scores(score_TGJ, chosen).sum())
    return max(0.0, 1 - found_score / wanted_score)


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
