"""The tests can fail: each planted fault turns the named check red.

`tests/faults/lists` plants faults in the text of the code. Here are those that the specification
names, and those of what a caller may replace. A check is a small version of a property that the
other test modules show. Without a fault every check is green; then each fault is planted, and its
checks have to notice.
"""

from functools import cache

import pytest
import torch
from torch.nn import functional as F

from nsa_core.checks.causality import perturbation_probe
from nsa_core.kernels import gathered, gathered_backend
from nsa_core.kernels.gathered import TileKeys
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from nsa_core.kernels.tiles import ChosenMaskPlan, CompressedPlan, SlidingPlan
from nsa_core.model import attention, decode, transformer
from nsa_core.model.cache import DecodeCache
from nsa_core.model.compression import MLPCompression
from nsa_core.model.loss import LossSum, loss_sum
from tests.core.kernels.cases import make_inputs, run
from tests.core.model.cases import (
    first_attention,
    free_tokens,
    run_attention,
    small_config,
    small_model,
    tokens,
)
from tests.core.model.layer_reference import nsa_layer

#: 21 of 41 tokens choose freely (asserted below).
LENGTH = 41


def layer_input() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(LENGTH, 16, generator=generator, dtype=torch.float64)


@cache
def expected_layer():
    """Output and gradients of the token-by-token layer, which no fault below can reach."""
    layer, x = first_attention(small_model()), layer_input().requires_grad_()
    weights = dict(layer.named_parameters())
    out = nsa_layer(small_config(), weights, x)
    return out.detach(), torch.autograd.grad(out.square().sum(), [x, *weights.values()])


def check_layer() -> None:
    """The layer equals the token-by-token one."""
    found = run_attention(small_model(), layer_input(), Packing.uniform(1, LENGTH))
    torch.testing.assert_close(found, expected_layer()[0], rtol=0, atol=1e-5)


def check_gradients() -> None:
    """Every gradient of the layer equals the token-by-token one."""
    model, x = small_model(), layer_input().requires_grad_()
    out = run_attention(model, x, Packing.uniform(1, LENGTH))
    leaves = [x, *first_attention(model).parameters()]
    grads = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
    for grad, truth in zip(grads, expected_layer()[1], strict=True):
        torch.testing.assert_close(grad, truth, rtol=0, atol=1e-5)


def check_causality() -> None:
    """Changing the future changes no bit of the past."""
    assert perturbation_probe(small_model(), vocab_size=31, lengths=(LENGTH,)).is_causal


def check_documents() -> None:
    """Packed documents equal separate ones."""
    model, row, lengths = small_model(), tokens(1, 75), [30, 45]
    packed = model(row, Packing.from_lengths(lengths))[0]
    alone = torch.cat([model(part)[0] for part in row.split(lengths, dim=1)])
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-9)


def check_choices() -> None:
    """Chosen blocks equal those of the reference."""
    geometry, packing = BlockGeometry(4, 2, 8, 4, 5), Packing.from_lengths([70])
    inputs = make_inputs(packing, geometry)
    ids = [
        run(backend, inputs, geometry, packing).ids
        for backend in (ReferenceBackend(), GatheredBackend())
    ]
    assert torch.equal(*ids)


def check_ties() -> None:
    """Exact ties go to the lowest index."""
    geometry, packing = BlockGeometry(4, 2, 4, 4, 8), Packing.from_lengths([64])
    inputs = make_inputs(packing, geometry)
    with torch.no_grad():
        inputs.q.zero_()
    assert run(GatheredBackend(), inputs, geometry, packing).ids[63, 0].tolist() == [0, 1, 14, 15]


def check_decode() -> None:
    """A prompt in one chunk, then single tokens, equals one shot."""
    model, row = small_model(), tokens(1, 50)
    cache = DecodeCache.allocate(model.config, batch=1, capacity=50, chunk=38, dtype=torch.float64)
    pieces = row.split([38, *[1] * 12], dim=1)
    hidden = torch.cat([decode.extend(model, cache, piece).hidden_BmW for piece in pieces], dim=1)
    torch.testing.assert_close(hidden[0], model.hidden(row), rtol=0, atol=1e-9)


def check_loss() -> None:
    """The chunked loss equals plain cross-entropy, -1 left out."""
    model, row = small_model(), tokens(2, 9)
    targets = row.clone()
    targets[:, -3:] = -1
    plain = F.cross_entropy(model(row).flatten(0, 1), targets.flatten(), ignore_index=-1)
    result = model.loss(row, targets)
    torch.testing.assert_close(result.sum / result.count, plain)


CHECKS = [
    check_layer,
    check_gradients,
    check_causality,
    check_documents,
    check_choices,
    check_ties,
    check_decode,
    check_loss,
]


def plant_mask(monkeypatch: pytest.MonkeyPatch, plan, change) -> None:
    """Change what the queries of a tile see."""
    plain = plan.tile_keys

    def tile_keys(self, first, last, num_groups) -> TileKeys:
        keys = plain(self, first, last, num_groups)
        return TileKeys(keys.row_PGR, change(keys.is_visible_PGQR))

    monkeypatch.setattr(plan, "tile_keys", tile_keys)


def next_key_too(is_visible):
    return is_visible | is_visible.roll(1, dims=-1)


def future_key_in_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_mask(monkeypatch, SlidingPlan, next_key_too)


def softmax_over_invisible_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_mask(monkeypatch, CompressedPlan, torch.ones_like)


def only_the_first_key_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gathered.attend_tiles

    def attend_tiles(q, keys, is_visible):
        return plain(q, keys, is_visible & (is_visible.cumsum(dim=-1) == 1))

    monkeypatch.setattr(gathered, "attend_tiles", attend_tiles)


def dropped_partial_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole_blocks_only(is_visible):
        query, key = (torch.arange(size) for size in is_visible.shape[-2:])
        return is_visible & (key // 4 < (query[:, None] + 1) // 4)

    plant_mask(monkeypatch, ChosenMaskPlan, whole_blocks_only)


def interleaved_rope_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotate(x, tables):
        cos, sin = tables
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return turned.flatten(-2)

    monkeypatch.setattr(attention, "rotate", rotate)


def rope_over_the_flattened_heads_of_q(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention.rotate

    def rotate(x, tables):
        if x.shape[1] != small_config().num_heads:
            return plain(x, tables)
        flat = x.flatten(1).unsqueeze(1)
        wide = [table.repeat(1, 1, x.shape[1]) for table in tables]
        return plain(flat, wide).view(x.shape)

    monkeypatch.setattr(attention, "rotate", rotate)


def off_by_one_in_equation_9(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = BlockGeometry.first_overlap
    monkeypatch.setattr(BlockGeometry, "first_overlap", lambda self, j: plain(self, j) + 1)


def tie_broken_by_a_small_multiple_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gathered_backend.choose_blocks

    def choose_blocks(score, position, geometry):
        return plain(score + 1e-8 * torch.arange(score.shape[-1]), position, geometry)

    monkeypatch.setattr(gathered_backend, "choose_blocks", choose_blocks)


def detached_phi(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = MLPCompression.of_strides
    monkeypatch.setattr(
        MLPCompression, "of_strides", lambda self, x, count: plain(self, x, count).detach()
    )


def document_borders_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Packing, "from_lengths", lambda lengths, device="cpu": Packing.uniform(1, sum(lengths))
    )


def window_ring_indexed_by_absolute_position(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = decode._window_plan

    def window_plan(positions, window, ring):
        plan = plain(positions, window, ring)
        first = max(0, positions.first - window + 1)
        plan.row_R = torch.arange(first, positions.last).clamp(max=ring - 1)
        return plan

    monkeypatch.setattr(decode, "_window_plan", window_plan)


def prefill_that_drops_the_partial_block(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = decode.CachedBlocksPlan

    def plan(ids, positions, geometry, buffer_rows):
        made = plain(ids, positions, geometry, buffer_rows)
        if positions.count > 1:
            whole = (positions.new() + 1) // geometry.select_block * geometry.select_block
            made.is_visible_NGR = made.is_visible_NGR & (
                made.position_NGR < whole.clamp(min=1)[:, None, None]
            )
        return made

    monkeypatch.setattr(decode, "CachedBlocksPlan", plan)


def raw_tail_that_is_not_moved_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = decode._blocks

    def blocks(raw, count, geometry):
        return plain(raw.roll(1, dims=1), count, geometry)

    monkeypatch.setattr(decode, "_blocks", blocks)


def padding_counted_as_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_target(hidden, weight, target, **rest) -> LossSum:
        return loss_sum(hidden, weight, target.clamp(min=0), **rest)

    monkeypatch.setattr(transformer, "loss_sum", every_target)


#: Each fault, and the checks that have to notice it; others may notice it too.
FAULTS = {
    future_key_in_the_window: (check_causality, check_layer),
    softmax_over_invisible_blocks: (check_causality, check_layer),
    only_the_first_key_attended: (check_layer,),
    dropped_partial_block: (check_layer,),
    interleaved_rope_pairs: (check_layer,),
    rope_over_the_flattened_heads_of_q: (check_layer,),
    off_by_one_in_equation_9: (check_choices,),
    tie_broken_by_a_small_multiple_of_the_index: (check_ties,),
    detached_phi: (check_gradients,),
    document_borders_ignored: (check_documents, check_causality),
    window_ring_indexed_by_absolute_position: (check_decode,),
    prefill_that_drops_the_partial_block: (check_decode,),
    raw_tail_that_is_not_moved_on: (check_decode,),
    padding_counted_as_a_target: (check_loss,),
}


def is_red(check) -> bool:
    """Whether the check fails, by its own assertion."""
    try:
        check()
    except AssertionError:
        return True
    return False


def test_the_checks_see_tokens_that_choose_freely() -> None:
    config = small_config()
    assert free_tokens(config, LENGTH) == 21
    assert free_tokens(config, 30, 45) == 35
    assert free_tokens(config, 50) == 30


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_without_a_fault_every_check_is_green(check) -> None:
    check()


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_turns_its_checks_red(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    expected_layer()
    plant(monkeypatch)
    assert [check.__name__ for check in FAULTS[plant] if not is_red(check)] == []
