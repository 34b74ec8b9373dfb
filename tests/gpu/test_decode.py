"""Decode on the card: the kernels beside plain PyTorch, and one graph for hundreds of positions."""

import warnings
from dataclasses import replace

import pytest
import torch

from nsa_core.config.model import ModelConfig, NSAConfig
from nsa_core.evaluate.sampling import Sampling, stream
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.decode_attention import CachedPairs, GatheredDecode
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.model.cache import DecodeCache
from nsa_core.model.decode import extend, prefill
from nsa_core.model.decode_step import DecodeLoop
from nsa_core.model.transformer import LanguageModel
from tests import oracle

pytestmark = pytest.mark.gpu
GEOMETRY = BlockGeometry(32, 16, 64, 16, 512)
#: Longer than the 16 blocks of 64: every step and 476 tokens of the prompt choose freely.
PROMPT, STEPS = 1500, 220
#: Half an ulp of the output, and as much for the probabilities before the second product.
TOLERANCES = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


@pytest.fixture(params=["split", "short"])
def form(request, monkeypatch):
    """Once in the form of any cache, once in the short one, for any number of sequences.

    The card and the sizes must have it: wide heads, float32 and long caches are split twice.
    """
    from nsa_core.kernels.triton import decode_host
    from nsa_core.kernels.triton.decode_launch import ShortLaunch, decode_launch

    if request.param == "split":
        monkeypatch.setattr(ShortLaunch, "serves", lambda *_: False)
        return request.param

    def launch(device, key_width, value_width, _pairs):
        row = decode_launch(device, key_width, value_width, 1)
        limits = {"max_pairs": 1 << 20, "max_compared": 1 << 40}
        return replace(row, short=row.short and replace(row.short, **limits))

    monkeypatch.setattr(decode_host, "decode_launch", launch)
    return request.param


def make_attention(name):
    """A policy that gives all branches to one backend."""
    if name == "gathered":
        return BranchBackends.of(GatheredBackend())
    from nsa_core.kernels.triton.triton_backend import TritonBackend

    return BranchBackends.of(TritonBackend())


def poisoned(positions, heads, groups, widths, *, capacity, ring, dtype):
    """Arguments of `attend`; whatever the tokens may not see is large garbage."""
    generator = torch.Generator("cuda").manual_seed(heads)
    batch = len(positions)

    def randn(*size):
        return torch.randn(*size, generator=generator, device="cuda", dtype=dtype)

    def pair(rows):
        return tuple(randn(batch, rows, groups, width) for width in widths)

    pairs = CachedPairs(pair(GEOMETRY.num_cached(capacity)), pair(capacity), pair(ring))
    for b, position in enumerate(positions):
        first = max(0, position - GEOMETRY.window + 1)
        dead = torch.ones(ring, dtype=torch.bool, device="cuda")
        dead[torch.arange(first, position + 1, device="cuda") % ring] = False
        for kind in range(2):
            pairs.compressed[kind][b, GEOMETRY.num_compressed(position + 1) :] = 1e4
            pairs.selected[kind][b, position + 1 :] = 1e4
            pairs.sliding[kind][b, dead] = 1e4
    gate = torch.rand(batch, heads, 3, device="cuda", generator=generator)
    position_B = torch.tensor(positions, device="cuda")
    return randn(batch, heads, widths[0]), pairs, gate, position_B, GEOMETRY


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "positions", [[0, 30, 31, 46, 47, 511, 512], [63, 1023, 1024, 1087, 3000, 8190, 8191]]
)
@pytest.mark.parametrize(
    ("heads", "groups", "widths"),
    [(12, 2, (64, 64)), (16, 1, (32, 64)), (64, 4, (128, 128)), (5, 1, (64, 128)),
     (3, 3, (128, 64))],
)  # fmt: skip
def test_the_kernels_agree_with_plain_pytorch_in_float64(heads, groups, widths, positions, dtype):
    from nsa_core.kernels.triton.decode_host import TritonDecode

    arguments = poisoned(positions, heads, groups, widths, capacity=8192, ring=700, dtype=dtype)
    q, pairs, gate, position_B, geometry = arguments
    torch.use_deterministic_algorithms(mode=True)  # fills whatever is allocated with NaN
    try:
        found = TritonDecode().attend(*arguments)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    wide = CachedPairs(
        *((k.double(), v.double()) for k, v in (pairs.compressed, pairs.selected, pairs.sliding))
    )
    wanted = GatheredDecode().attend(q.double(), wide, gate.double(), position_B, geometry)
    assert torch.equal(found.ids_BGS, wanted.ids_BGS)
    assert oracle.relative_error(found.out_BHE, wanted.out_BHE) <= TOLERANCES[dtype]
    reads = sum(found.counted.totals())
    assert reads.tolist() == [oracle.num_reads(geometry, t) for t in positions]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("copies", "capacity"), [(1, 8192), (9, 65_536)])
def test_the_kernels_break_exact_ties_by_the_lowest_index(copies, capacity):
    from nsa_core.kernels.triton.decode_host import TritonDecode

    arguments = poisoned(
        [8191, 3000] * copies, 12, 2, (64, 64), capacity=capacity, ring=512, dtype=torch.bfloat16
    )
    arguments[0].zero_()
    ids = TritonDecode().attend(*arguments).ids_BGS.tolist()
    assert ids == [[[*range(14), 126, 127]] * 2, [[*range(14), 45, 46]] * 2] * copies


def make_model(attention, phi="mlp", *, kind="nsa"):
    """Two layers with the paper's block sizes."""
    config = ModelConfig(
        vocab_size=300, dim=128, num_layers=2, num_heads=12, num_kv_groups=2, head_dim_k=64,
        head_dim_v=64, mlp_width=256, attention=kind, nsa=NSAConfig(phi=phi),
    )  # fmt: skip
    model = LanguageModel(config, make_attention(attention)).cuda().eval()
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cuda")
            parameter.add_(noise * 0.05)
        for block in model.block_list:  # scores far apart, so that few choices hang on a rounding
            block.attention.q.weight.mul_(4)
    return model


def make_cache(model, row, length=PROMPT):
    cache = DecodeCache.allocate(
        model.config, batch=row.shape[0], capacity=PROMPT + STEPS, device="cuda"
    )
    prefill(model, cache, row[:, :length])
    return cache


def make_tokens(batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, (batch, PROMPT + STEPS), generator=generator).cuda()


@pytest.mark.parametrize(
    ("attention", "phi", "kind"),
    [("triton", "mlp", "nsa"), ("triton", "avg", "nsa"), ("gathered", "linear", "nsa"),
     ("gathered", "avg", "dense")],
)  # fmt: skip
def test_one_graph_equals_steps_without_it_and_prefill_for_220_positions(attention, phi, kind):
    """1500 .. 1719: 14 compressed blocks and 3 selection blocks are completed on the way.

    Two sums of the same terms may round apart, so two blocks of nearly one score may change places:
    a row is held against prefill up to there, and three rows of four all the way.
    """
    assert oracle.free_choices([PROMPT], GEOMETRY.select_block, GEOMETRY.num_selected) == 476
    model, row = make_model(attention, phi, kind=kind), make_tokens(batch=4)
    graphed = DecodeLoop(model, make_cache(model, row))
    plain = DecodeLoop(model, make_cache(model, row), use_graph=False)
    reference = make_cache(model, row)
    worst = torch.zeros((), device="cuda")
    same_B = torch.ones(len(row), dtype=torch.bool, device="cuda")
    for t in range(PROMPT, PROMPT + STEPS):
        found, twin = graphed.step(row[:, t]), plain.step(row[:, t])
        assert torch.equal(found.hidden_BW, twin.hidden_BW)
        wanted = extend(model, reference, row[:, t : t + 1])
        for one, other, truth in zip(found.ids, twin.ids, wanted.ids, strict=True):
            assert torch.equal(one, other)
            same_B &= (one == truth[:, 0]).flatten(1).all(1)
        for one, truth in zip(found.reads(), wanted.reads, strict=True):
            assert torch.equal(one.total, truth.total)
        gap_B = (found.hidden_BW - wanted.hidden_BmW[:, 0]).abs().amax(1)
        worst = torch.maximum(worst, torch.where(same_B, gap_B, 0.0).max())
    assert graphed.uses_graph
    assert same_B.sum().item() >= 3
    assert worst.item() <= 1e-4  # hidden states of size 1 after two layers in float32


def test_replays_allocate_nothing_and_do_not_wait_for_the_host():
    model, row = make_model("triton"), make_tokens()
    loop = DecodeLoop(model, make_cache(model, row))
    loop.step(row[:, PROMPT])
    before = torch.cuda.memory_allocated()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(PROMPT + 1, PROMPT + 50):
            loop.step(row[:, t])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.9, seed=3)])
def test_generation_through_the_graph_writes_what_steps_without_it_write(sampling, monkeypatch):
    model = make_model("triton")
    prompt = make_tokens()[0, :PROMPT].tolist()
    found = list(stream(model, prompt, max_new_tokens=100, sampling=sampling))
    plain = DecodeLoop._compute
    monkeypatch.setattr(DecodeLoop, "_replay", plain)
    assert list(stream(model, prompt, max_new_tokens=100, sampling=sampling)) == found
    assert len(found) == 100
