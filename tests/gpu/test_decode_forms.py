"""The forms of decode on the card: each against float64, and replayed beside other work."""

import pytest
import torch

from nsa_core.kernels.cuda_graph import capture
from nsa_core.kernels.decode_attention import CachedPairs, GatheredDecode
from nsa_core.model.decode_step import DecodeLoop
from tests import oracle
from tests.gpu.test_decode import (
    GEOMETRY,
    PROMPT,
    TOLERANCES,
    make_cache,
    make_model,
    make_tokens,
    poisoned,
)

pytestmark = pytest.mark.gpu
FORMS = ("lean", "overlapped", "single")
SHAPES = {
    "A": (12, 2, (64, 64)), "B": (64, 4, (128, 128)), "wide": (5, 1, (64, 128)),
    "narrow": (3, 3, (128, 64)),
}  # fmt: skip
POSITIONS = [0, 30, 31, 46, 47, 511, 512, 1023, 1024, 3000, 8190, 8191]
REPLAYS = 1000


def make_decode(form):
    """The kernels in one form; launches that overlap need Hopper."""
    from nsa_core.kernels.triton.decode_host import TritonDecode

    if form == "overlapped" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no launches overlap before sm_90")
    return TritonDecode(form)


def in_float64(arguments):
    """What plain PyTorch makes of the same arguments."""
    q, pairs, gate, position_B, geometry = arguments
    wide = CachedPairs(
        *((k.double(), v.double()) for k, v in (pairs.compressed, pairs.selected, pairs.sliding))
    )
    return GatheredDecode().attend(q.double(), wide, gate.double(), position_B, geometry)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.bfloat16) for shape in SHAPES]
    + [("A", torch.float16), ("A", torch.float32), ("B", torch.float32)],
)
def test_every_form_agrees_with_plain_pytorch_in_float64(form, shape, dtype):
    decode = make_decode(form)
    arguments = poisoned(POSITIONS, *SHAPES[shape], capacity=8192, ring=700, dtype=dtype)
    wanted = in_float64(arguments)
    torch.use_deterministic_algorithms(mode=True)  # fills whatever is allocated with NaN
    try:
        found = [decode.attend(*arguments) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(mode=False)
    for one in found:
        assert torch.equal(one.ids_BGS, wanted.ids_BGS)
        assert oracle.relative_error(one.out_BHE, wanted.out_BHE) <= TOLERANCES[dtype]
        reads = sum(one.counted.totals())
        assert reads.tolist() == [oracle.num_reads(GEOMETRY, t) for t in POSITIONS]
        assert torch.equal(one.out_BHE, found[0].out_BHE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [1, 16])
def test_every_form_agrees_with_the_four_launches_at_65536(form, batch):
    """16 tiles of blocks, as many slices as there can be, more items than programs."""
    positions = [65_535 - 977 * b for b in range(batch)]
    arguments = poisoned(
        positions, 12, 2, (64, 64), capacity=65_536, ring=512, dtype=torch.bfloat16
    )
    found, wanted = make_decode(form).attend(*arguments), make_decode("four").attend(*arguments)
    assert torch.equal(found.ids_BGS, wanted.ids_BGS)
    assert oracle.relative_error(found.out_BHE, wanted.out_BHE) <= TOLERANCES[torch.bfloat16]
    for one, other in zip(found.counted.totals(), wanted.counted.totals(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_breaks_exact_ties_by_the_lowest_index(form):
    arguments = poisoned(
        [8191, 3000], 12, 2, (64, 64), capacity=8192, ring=512, dtype=torch.bfloat16
    )
    arguments[0].zero_()
    ids = make_decode(form).attend(*arguments).ids_BGS.tolist()
    assert ids == [[[*range(14), 126, 127]] * 2, [[*range(14), 45, 46]] * 2]


def keep_busy(stream, calls):
    """Other work on the card: products of every size class, one after the other."""
    with torch.cuda.stream(stream):
        x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        for i in range(calls):
            x = torch.tanh(x @ x) if i % 3 else torch.tanh(x[:128] @ x).repeat(16, 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_filled", [False, True], ids=["tight", "filled"])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_graph_keeps_its_bits_for_1000_replays_beside_other_work(form, is_filled, batch):
    """The positions change with every replay: a value of the last one would show.

    Filled, each replay first overwrites every buffer between the steps with NaN.
    """
    decode = make_decode(form)
    arguments = poisoned(
        [8191] * batch, 12, 2, (64, 64), capacity=8192, ring=512, dtype=torch.bfloat16
    )
    position_B = arguments[3]
    generator = torch.Generator().manual_seed(batch)
    choices = [torch.randint(0, 8192, (batch,), generator=generator).cuda() for _ in range(7)]
    expected = []
    for chosen in choices:
        position_B.copy_(chosen)
        found, wanted = decode.attend(*arguments), in_float64(arguments)
        assert oracle.relative_error(found.out_BHE, wanted.out_BHE) <= TOLERANCES[torch.bfloat16]
        expected.append((found.out_BHE.clone(), found.ids_BGS.clone()))
    torch.use_deterministic_algorithms(mode=is_filled)
    try:
        graph, replayed = capture(lambda: decode.attend(*arguments), torch.device("cuda"))
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
    torch.cuda.synchronize()
    for counters in decode._counters.values():
        assert not counters.any()


@pytest.mark.parametrize("form", FORMS)
def test_a_model_decodes_through_its_graph_as_without(form, monkeypatch):
    from nsa_core.kernels.triton import decode_host

    make_decode(form)
    monkeypatch.setattr(decode_host, "choose_form", lambda *_: form)
    model, row = make_model("triton"), make_tokens(batch=3)
    graphed = DecodeLoop(model, make_cache(model, row))
    plain = DecodeLoop(model, make_cache(model, row), use_graph=False)
    for t in range(PROMPT, PROMPT + 70):
        found, twin = graphed.step(row[:, t]), plain.step(row[:, t])
        assert torch.equal(found.hidden_BW, twin.hidden_BW)
        for one, other in zip(found.ids, twin.ids, strict=True):
            assert torch.equal(one, other)
    assert graphed.uses_graph
