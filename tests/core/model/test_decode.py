"""Prefill in any chunks, decode and one shot agree: outputs, chosen blocks and reads."""

import pytest
import torch

from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.model.cache import DecodeCache
from nsa_core.model.decode import extend, prefill
from tests.core.model.cases import free_tokens, small_config, small_model, tokens
from tests.oracle import num_reads

LARGER = {
    "phi": "avg",
    "compress_block": 6,
    "compress_stride": 3,
    "select_block": 9,
    "num_selected": 4,
}
CONFIGS = {
    "mlp": small_config(),
    "linear, wide window": small_config(nsa={"phi": "linear", "window": 40}),
    "avg, larger blocks": small_config(nsa=LARGER),
    "dense": small_config(attention="dense"),
}


class RecordingBackend(GatheredBackend):
    """Remembers the blocks that a whole forward pass chose."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = []

    def select(self, *args):
        self.ids.append(super().select(*args))
        return self.ids[-1]


def decode(model, row, pieces, *, chunk, dtype: torch.dtype = torch.float64):
    """Extend by pieces of these lengths; hidden states, ids and reads over all tokens."""
    cache = DecodeCache.allocate(
        model.config, batch=row.shape[0], capacity=row.shape[1], chunk=chunk, dtype=dtype
    )
    steps = [extend(model, cache, piece) for piece in row.split(pieces, dim=1)]
    num_layers = len(steps[0].ids)
    return (
        torch.cat([step.hidden_BmW for step in steps], dim=1),
        [torch.cat([step.ids[i] for step in steps], dim=1) for i in range(num_layers)],
        torch.cat([step.reads[0].total for step in steps], dim=1),
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("length", [1, 5, 61])
def test_every_split_of_a_sequence_gives_the_same_result(config, length: int) -> None:
    backend = RecordingBackend()
    model = small_model(config, backends=BranchBackends.of(backend))
    assert length < 61 or free_tokens(config, length) >= 25
    row = tokens(2, length)
    with torch.no_grad():
        expected = model.hidden(row).view(2, length, -1)
    pieces = {(length,), (1,) * length}
    for k in (3, 4, 20):  # then some single tokens, and the rest in one chunk
        ones = (1,) * min(5, max(0, length - k))
        rest = length - k - len(ones)
        pieces |= {(k, *ones, *([rest] if rest else []))} if ones else set()
    pieces |= {(7,) * (length // 7) + ((length % 7,) if length % 7 else ())}
    for split in pieces:
        hidden, ids, reads = decode(model, row, list(split), chunk=max(split))
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-9)
        for found, truth in zip(ids, backend.ids, strict=True):
            assert torch.equal(found, truth.view(found.shape))
        if config.attention == "nsa":
            assert reads[1].tolist() == [num_reads(model.geometry, t) for t in range(length)]
        else:
            assert reads[0].tolist() == list(range(1, length + 1))


def test_float32_decode_is_within_1e_5_of_one_shot() -> None:
    model = small_model(dtype=torch.float32)
    row = tokens(1, 43)
    hidden, _, _ = decode(model, row, [13, *[1] * 30], chunk=13, dtype=torch.float32)
    with torch.no_grad():
        assert (hidden[0] - model.hidden(row)).abs().max() <= 1e-5


def test_a_single_token_gathers_exactly_what_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, plain = [], torch.Tensor.index_select

    def counting(tensor, dim, index):
        gathered.append(index.numel())
        return plain(tensor, dim, index)

    model = small_model(small_config(num_layers=1))
    row, length = tokens(1, 30), 29
    cache = DecodeCache.allocate(model.config, batch=1, capacity=30, chunk=29, dtype=torch.float64)
    prefill(model, cache, row[:, :length])
    monkeypatch.setattr(torch.Tensor, "index_select", counting)
    step = extend(model, cache, row[:, length:])
    groups = model.config.num_kv_groups
    # Keys and values of every branch, for each group.
    assert sum(gathered) == 2 * groups * step.reads[0].total.item()
    assert step.reads[0].total.item() == num_reads(model.geometry, length)


def test_the_reads_at_a_long_context_are_the_ones_of_the_formula() -> None:
    model = small_model(small_config(num_layers=1), dtype=torch.float32)
    cache = DecodeCache.allocate(model.config, batch=1, capacity=1001, chunk=250)
    prefill(model, cache, tokens(1, 1000))
    reads = extend(model, cache, tokens(1, 1)).reads[0]
    # (1001 - 4) // 2 + 1 compressed; 5 blocks of 4, the last with 1 key; 5 in the window.
    assert [reads.compressed.item(), reads.selected.item(), reads.sliding.item()] == [499, 17, 5]


def test_the_buffers_never_move_and_hold_only_what_is_needed() -> None:
    model = small_model()
    cache = DecodeCache.allocate(model.config, batch=1, capacity=100, chunk=1, dtype=torch.float64)
    layer = cache.layers[0]
    rows = [layer.selected.k, layer.window.k, layer.compressed.k, layer.tail.k]
    assert [buffer.shape[1] for buffer in rows] == [100, 5, 50, 4]
    addresses = [buffer.data_ptr() for buffer in rows]
    for token in tokens(1, 40).split(1, dim=1):
        extend(model, cache, token)
    assert addresses == [buffer.data_ptr() for buffer in rows]
    assert cache.num_bytes == 2 * 8 * sum(rows * 2 * (6 + 5) for rows in (100, 5, 50, 4))


@pytest.mark.parametrize(("held", "new"), [(0, 9), (6, 5)])
def test_tokens_that_do_not_fit_are_refused_with_the_numbers(held: int, new: int) -> None:
    model = small_model()
    cache = DecodeCache.allocate(model.config, batch=1, capacity=10, chunk=8, dtype=torch.float64)
    if held:
        extend(model, cache, tokens(1, held))
    with pytest.raises(ValueError, match=f"cannot add {new} tokens to {held}.*8.*10"):
        extend(model, cache, tokens(1, new))
    assert cache.length == held


def test_an_empty_prompt_is_refused() -> None:
    model = small_model()
    cache = DecodeCache.allocate(model.config, batch=1, capacity=10)
    with pytest.raises(ValueError, match="no tokens"):
        prefill(model, cache, tokens(1, 0))
