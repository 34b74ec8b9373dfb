"""The step that a CUDA graph can replay: prefill's numbers, and nothing asked of the host."""

from dataclasses import fields

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.decode_attention import GatheredDecode
from nsa_core.model.cache import DecodeCache
from nsa_core.model.decode import extend, logits, prefill
from nsa_core.model.decode_step import DecodeLoop, decode_step
from nsa_core.model.transformer import LanguageModel
from tests.core.model.cases import free_tokens, small_config, small_model, tokens
from tests.core.model.test_decode import CONFIGS, RecordingBackend
from tests.oracle import num_reads


def filled(model, row, *, capacity, chunk: int = 7):
    """A cache that holds these tokens."""
    cache = DecodeCache.allocate(
        model.config, batch=row.shape[0], capacity=capacity, chunk=chunk,
        dtype=model.embedding.weight.dtype, device=row.device,
    )  # fmt: skip
    if row.shape[1]:
        prefill(model, cache, row)
    return cache


def buffers(cache):
    """Every buffer of a cache."""
    pairs = (getattr(layer, f.name) for layer in cache.layers for f in fields(layer))
    return [tensor for pair in pairs for tensor in (pair.k, pair.v)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("prompt", [0, 3, 40])
def test_prefill_then_steps_gives_what_one_shot_gives(config, prompt: int) -> None:
    backend, length = RecordingBackend(), 61
    assert free_tokens(config, length) - free_tokens(config, prompt) >= 20
    model = small_model(config, backends=BranchBackends.of(backend))
    row = tokens(2, length)
    with torch.no_grad():
        expected = model.hidden(row).view(2, length, -1)
    loop = DecodeLoop(model, filled(model, row[:, :prompt], capacity=length))
    for t in range(prompt, length):
        step = loop.step(row[:, t])
        torch.testing.assert_close(step.hidden_BW, expected[:, t], rtol=0, atol=1e-9)
        for found, truth in zip(step.ids, backend.ids, strict=True):
            assert torch.equal(found, truth.view(2, length, *found.shape[1:])[:, t])
        wanted = num_reads(model.geometry, t) if config.attention == "nsa" else t + 1
        assert [reads.total.tolist() for reads in step.reads()] == [[[wanted]] * 2] * 2
    assert loop.cache.length == length


def test_float32_steps_are_within_1e_5_of_one_shot() -> None:
    model = small_model(dtype=torch.float32)
    row = tokens(1, 43)
    with torch.no_grad():
        expected = model(row)[0]
    loop = DecodeLoop(model, filled(model, row[:, :13], capacity=43))
    worst = max(
        float((loop.step(row[:, t]).logits_BV[0] - expected[t]).abs().max()) for t in range(13, 43)
    )
    assert worst <= 1e-5


def test_a_step_and_an_extension_may_follow_each_other() -> None:
    model, row = small_model(), tokens(2, 40)
    cache = filled(model, row[:, :9], capacity=40)
    plain = filled(model, row[:, :9], capacity=40)
    first = 9
    while first < 40:
        DecodeLoop(model, cache).step(row[:, first])
        extend(model, plain, row[:, first : first + 1])
        last = min(first + 4, 40)
        if last == first + 1:
            break
        found = extend(model, cache, row[:, first + 1 : last])
        wanted = extend(model, plain, row[:, first + 1 : last])
        torch.testing.assert_close(found.hidden_BmW, wanted.hidden_BmW, rtol=0, atol=1e-9)
        first = last


def test_sequences_may_stand_at_different_positions() -> None:
    model, lengths, new = small_model(), (3, 40, 24), 12
    assert free_tokens(model.config, *(n + new for n in lengths)) >= 40
    rows = [tokens(1, length + new, seed) for seed, length in enumerate(lengths)]
    alone = [filled(model, row[:, :n], capacity=60) for row, n in zip(rows, lengths, strict=True)]
    together = filled(model, tokens(3, 0), capacity=60)
    for target, *sources in zip(buffers(together), *map(buffers, alone), strict=True):
        target.copy_(torch.cat(sources))
    for i in range(new):
        token_B = torch.stack([row[0, n + i] for row, n in zip(rows, lengths, strict=True)])
        position_B = torch.tensor(lengths) + i
        found = decode_step(model, together, token_B, position_B, GatheredDecode())
        for sequence, (cache, token) in enumerate(zip(alone, token_B, strict=True)):
            wanted = extend(model, cache, token.view(1, 1))
            torch.testing.assert_close(
                found.logits_BV[sequence], logits(model, wanted)[0], rtol=0, atol=1e-9
            )
            assert torch.equal(found.ids[0][sequence], wanted.ids[0][0, 0])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_one_trace_without_a_break_serves_every_position(config) -> None:
    """A branch on a value, a read-back or a shape that depends on one breaks or repeats it."""
    model, row = small_model(config), tokens(2, 30)
    cache = filled(model, row[:, :2], capacity=30)
    eager = filled(model, row[:, :2], capacity=30)
    torch._dynamo.reset()
    traced = torch.compile(decode_step, fullgraph=True, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(2, 30):
            arguments = (row[:, t].clone(), torch.full((2,), t), GatheredDecode())
            found = traced(model, cache, *arguments)
            wanted = decode_step(model, eager, *arguments)
            assert torch.equal(found.logits_BV, wanted.logits_BV)


def test_the_check_sees_a_value_that_is_read_back() -> None:
    class Asking(GatheredDecode):
        def attend(
            self,
            q_BHD: torch.Tensor,
            pairs,
            gate_BH3: torch.Tensor,
            position_B: torch.Tensor,
            geometry,
        ):
            if position_B.max() > 5:
                q_BHD = q_BHD * 2
            return super().attend(q_BHD, pairs, gate_BH3, position_B, geometry)

    model, row = small_model(), tokens(1, 4)
    cache = filled(model, row, capacity=8)
    torch._dynamo.reset()
    traced = torch.compile(decode_step, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        traced(model, cache, row[:, 0], torch.tensor([4]), Asking())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_operator_below_asks_for_a_value(config) -> None:
    """Tensors without data: whatever needs a number from one raises."""
    with FakeTensorMode():
        model = LanguageModel(config)
        cache = DecodeCache.allocate(config, batch=2, capacity=30, chunk=4)
        token_B = torch.zeros(2, dtype=torch.int64)
        step = decode_step(model, cache, token_B, token_B.clone(), GatheredDecode())
        assert step.logits_BV.shape == (2, 31)
        with pytest.raises(DataDependentOutputException):
            step.logits_BV[0, 0].item()


def test_the_buffers_never_move_and_no_tensor_grows_with_the_position() -> None:
    model = small_model()
    loop = DecodeLoop(model, filled(model, tokens(1, 0), capacity=40))
    addresses = [buffer.data_ptr() for buffer in buffers(loop.cache)]
    sizes = set()
    for token in tokens(1, 40)[0]:
        step = loop.step(token.view(1))
        counted = [getattr(read, f.name).numel() for read in step.counted for f in fields(read)]
        sizes.add((step.logits_BV.numel(), step.ids[0].numel(), *counted))
    assert len(sizes) == 1
    assert addresses == [buffer.data_ptr() for buffer in buffers(loop.cache)]


def test_a_full_cache_is_refused_before_anything_is_written() -> None:
    model = small_model()
    loop = DecodeLoop(model, filled(model, tokens(1, 10), capacity=10))
    before = [buffer.clone() for buffer in buffers(loop.cache)]
    with pytest.raises(ValueError, match=r"full.*10"):
        loop.step(torch.tensor([1]))
    assert all(map(torch.equal, before, buffers(loop.cache)))


def test_a_graph_without_a_card_is_refused() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="CUDA"):
        DecodeLoop(model, filled(model, tokens(1, 1), capacity=4), use_graph=True)


def test_the_reads_at_65536_are_the_ones_of_the_formula() -> None:
    """The paper's sizes: 4,095 compressed, 16 whole blocks, 512 in the window."""
    sizes = {
        "phi": "avg", "compress_block": 32, "compress_stride": 16, "select_block": 64,
        "num_selected": 16, "window": 512,
    }  # fmt: skip
    config = small_config(num_layers=1, nsa=sizes)
    model = small_model(config, dtype=torch.float32)
    cache = DecodeCache.allocate(config, batch=1, capacity=65_536, chunk=1)
    position_B = torch.tensor([65_535])
    step = decode_step(model, cache, torch.tensor([1]), position_B, GatheredDecode())
    reads = step.reads()[0]
    assert [reads.compressed.item(), reads.selected.item(), reads.sliding.item()] == [
        4095, 1024, 512,
    ]  # fmt: skip
    assert reads.total.item() == 5631
