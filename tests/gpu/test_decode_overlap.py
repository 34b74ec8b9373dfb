"""Launches of decode that overlap: the bits of launches that wait, also beside other work."""

import pytest
import torch

from nsa_core.kernels.cuda_graph import capture
from nsa_core.kernels.decode_attention import CachedPairs, GatheredDecode
from tests import oracle
from tests.gpu.test_decode import TOLERANCES, form, poisoned

pytestmark = pytest.mark.gpu
REPLAYS = 1000
__all__ = ["form"]  # a fixture


@pytest.mark.parametrize("capacity", [8192, 65_536])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(("heads", "groups", "width"), [(12, 2, 64), (64, 4, 128)], ids=["A", "B"])
def test_launches_that_overlap_give_the_bits_of_launches_that_wait(
    heads, groups, width, batch, capacity, monkeypatch
):
    """The short form, and 16 tiles of blocks with as many slices as there can be."""
    from nsa_core.kernels.triton import decode_host

    if not decode_host.can_overlap(torch.device("cuda")):
        pytest.skip("no launches overlap before sm_90")
    arguments = poisoned(
        [capacity - 1 - capacity // 67 * b for b in range(batch)], heads, groups, (width, width),
        capacity=capacity, ring=512, dtype=torch.bfloat16,
    )  # fmt: skip
    found = [decode_host.TritonDecode().attend(*arguments) for _ in range(3)]
    monkeypatch.setattr(decode_host, "can_overlap", lambda _: False)
    wanted = decode_host.TritonDecode().attend(*arguments)
    for one in found:
        assert torch.equal(one.ids_BGS, wanted.ids_BGS)
        assert torch.equal(one.out_BHE, wanted.out_BHE)
        for count, other in zip(one.counted.totals(), wanted.counted.totals(), strict=True):
            assert torch.equal(count, other)


def keep_busy(stream, calls):
    """Other work on the card: products of every size class, one after the other."""
    with torch.cuda.stream(stream):
        x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        for i in range(calls):
            x = torch.tanh(x @ x) if i % 3 else torch.tanh(x[:128] @ x).repeat(16, 1)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("is_filled", [False, True], ids=["tight", "filled"])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_graph_keeps_its_bits_for_1000_replays_beside_other_work(is_filled, batch):
    """The positions change with every replay: a value of the last one would show.

    Filled, each replay first overwrites every buffer between the launches with NaN.
    """
    from nsa_core.kernels.triton.decode_host import TritonDecode

    arguments = poisoned(
        [8191] * batch, 12, 2, (64, 64), capacity=8192, ring=512, dtype=torch.bfloat16
    )
    q, pairs, gate, position_B, geometry = arguments
    wide = CachedPairs(
        *((k.double(), v.double()) for k, v in (pairs.compressed, pairs.selected, pairs.sliding))
    )
    generator = torch.Generator().manual_seed(batch)
    choices = [torch.randint(0, 8192, (batch,), generator=generator).cuda() for _ in range(7)]
    expected = []
    for chosen in choices:
        position_B.copy_(chosen)
        found = TritonDecode().attend(*arguments)
        wanted = GatheredDecode().attend(q.double(), wide, gate.double(), position_B, geometry)
        assert oracle.relative_error(found.out_BHE, wanted.out_BHE) <= TOLERANCES[torch.bfloat16]
        expected.append((found.out_BHE, found.ids_BGS))
    torch.use_deterministic_algorithms(mode=is_filled)
    try:
        graph, replayed = capture(lambda: TritonDecode().attend(*arguments), torch.device("cuda"))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    side = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(REPLAYS):
        if i % 100 == 0:
            keep_busy(side, 40)
        out, ids = expected[i % len(expected)]
        position_B.copy_(choices[i % len(choices)])
        graph.replay()
        wrong += (replayed.out_BHE != out).sum() + (replayed.ids_BGS != ids).sum()
    assert wrong.item() == 0
