"""What no backend computes is refused with one clear error, from what the host knows."""

import pytest
import torch

from nsa_core.kernels.flash import FlashBackend
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import MAX_TOKENS, Packing
from nsa_core.kernels.reference import ReferenceBackend
from tests.core.kernels import flash_package

SIZES, PACKING = BlockGeometry(4, 2, 4, 4, 6), Packing.from_lengths([9])
BACKENDS = {
    "reference": ReferenceBackend(),
    "sdpa": GatheredBackend(),
    "flash": FlashBackend(flash_package, GatheredBackend()),
}


def tensors(num_keys, *, heads=4, width=6, dtype=torch.float32, **changes):
    """q, k and v as they should be, but for the changes."""
    shapes = {"q": (9, heads, width), "k": (num_keys, 2, width), "v": (num_keys, 2, 5)}
    dtypes = {"q": dtype, "k": dtype, "v": dtype}
    for name, value in changes.items():
        (dtypes if isinstance(value, torch.dtype) else shapes)[name] = value
    return [torch.zeros(shapes[name], dtype=dtypes[name]) for name in ("q", "k", "v")]


BAD = {
    "mixed dtypes": ({"k": torch.bfloat16}, "one floating-point dtype, got float32, bfloat16"),
    "int8": ({"dtype": torch.int8}, "one floating-point dtype, got int8"),
    "heads": ({"heads": 5}, "5 query heads are no multiple of 2"),
    "no heads": ({"heads": 0}, "0 query heads"),
    "width": ({"q": (9, 4, 7)}, r"must be \[N, H, D\]"),
    "rows": ({"q": (8, 4, 6)}, "of 9 tokens"),
    "keys": ({"v": (3, 2, 5)}, r"got .*\(3, 2, 5\)"),
    "axes": ({"q": (9, 24)}, r"\[tokens, heads, width\]"),
}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("branch", ["compressed", "sliding"])
@pytest.mark.parametrize(("changes", "words"), BAD.values(), ids=BAD)
def test_tensors_that_do_not_fit_are_refused(backend, branch, changes, words):
    num_keys = 4 if branch == "compressed" else 9
    with pytest.raises(ValueError, match=words):
        getattr(backend, branch)(*tensors(num_keys, **changes), SIZES, PACKING)


@pytest.mark.parametrize("backend", list(BACKENDS.values())[:2], ids=list(BACKENDS)[:2])
def test_the_choice_and_the_chosen_blocks_are_asked_the_same(backend):
    q, k, _ = tensors(4, k=torch.float16)
    with pytest.raises(ValueError, match="one floating-point dtype"):
        backend.select(q, k, torch.zeros(9, 4), SIZES, PACKING)
    ids = torch.zeros(9, 2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="one floating-point dtype"):
        backend.selected(*tensors(9, v=torch.int8), ids, SIZES, PACKING)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 2, 4, 4, 6), "compress_block must be at least 1, got 0"),
        ((4, -2, 4, 4, 6), "compress_stride must be at least 1, got -2"),
        ((4, 2, 4, 2, 6), "num_selected must be at least 3, got 2"),
        ((4, 2, 4, 4, 0), "window must be at least 1, got 0"),
        ((5, 2, 6, 4, 6), "compress_block 5 must be a multiple of compress_stride 2"),
        ((8, 2, 4, 4, 6), "compress_block 8 must not exceed select_block 4"),
    ],
)
def test_block_sizes_that_mean_nothing_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        BlockGeometry(*sizes)


def borders(*marks, dtype=torch.int32):
    return torch.tensor(marks, dtype=dtype)


BAD_BORDERS = {
    "unsorted": (borders(0, 6, 4, 9), {}, r"ascend from 0 to 9, got \[0, 6, 4, 9\]"),
    "too short": (borders(0, 4, 8), {}, r"ascend from 0 to 9, got \[0, 4, 8\]"),
    "too long": (borders(0, 4, 12), {}, "ascend from 0 to 9"),
    "not from 0": (borders(1, 9), {}, "ascend from 0 to 9"),
    "max_seqlen": (borders(0, 3, 9), {"max_seqlen": 5}, "max_seqlen 5 is below .* 6 tokens"),
    "uniform": (borders(0, 3, 9), {"uniform_length": 3}, "3 to 6 tokens are not 3"),
}


@pytest.mark.parametrize(("cu_seqlens", "changes", "words"), BAD_BORDERS.values(), ids=BAD_BORDERS)
def test_borders_that_are_here_are_checked(cu_seqlens, changes, words):
    with pytest.raises(ValueError, match=words):
        Packing.from_cu_seqlens(cu_seqlens, **{"max_seqlen": 9, "num_tokens": 9} | changes)


@pytest.mark.parametrize(("cu_seqlens", "changes", "words"), BAD_BORDERS.values(), ids=BAD_BORDERS)
def test_borders_on_a_card_are_checked_on_request(cu_seqlens, changes, words):
    class OnACard(torch.Tensor):
        """Not read unless asked for, like one on a card."""

    packing = Packing.from_lengths([4, 5])
    values = {"max_seqlen": 9, "num_tokens": 9, "uniform_length": None} | changes
    unread = Packing(
        cu_seqlens=cu_seqlens.as_subclass(OnACard), start_N=packing.start_N,
        position_N=packing.position_N, length_N=packing.length_N, **values,
    )  # fmt: skip
    with pytest.raises(ValueError, match=words):
        unread.check()


def test_borders_that_are_right_pass_the_check():
    packing = Packing.from_cu_seqlens(borders(0, 4, 4, 9), max_seqlen=6, num_tokens=9)
    assert packing.check() is packing
    assert Packing.uniform(2, 5).check().uniform_length == 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Packing.uniform(0, 4), "rows of the batch must be at least 1, got 0"),
        (lambda: Packing.uniform(3, 0), "tokens of a row must be at least 1, got 0"),
        (lambda: Packing.uniform(-1, 4), "got -1"),
        (lambda: Packing.uniform(2**16, 2**16), f"at most {MAX_TOKENS:,}, got 4,294,967,296"),
        (lambda: Packing.from_document_ids(torch.zeros(0, 4)), "rows of the batch"),
        (lambda: Packing.from_document_ids(torch.zeros(2, 0)), "tokens of a row"),
        (lambda: Packing.from_document_ids(torch.zeros(2, 4), max_documents=0), "max_documents"),
        (lambda: Packing.from_document_ids(torch.zeros(2, 4), max_seqlen=0), "max_seqlen"),
        (lambda: Packing.from_document_ids(torch.zeros(2, 4), max_seqlen=-3), "got -3"),
        (
            lambda: Packing.from_cu_seqlens(borders(0, 0), max_seqlen=1, num_tokens=0),
            "num_tokens must be at least 1",
        ),
        (
            lambda: Packing.from_cu_seqlens(borders(0, 4), max_seqlen=-1, num_tokens=4),
            "max_seqlen must be at least 1, got -1",
        ),
        (
            lambda: Packing.from_cu_seqlens(borders(0), max_seqlen=1, num_tokens=4),
            "at least one document",
        ),
        (
            lambda: Packing.from_cu_seqlens(
                borders(0, 4, dtype=torch.int8), max_seqlen=4, num_tokens=4
            ),
            "int32 .*got torch.int8",
        ),
    ],
)
def test_documents_without_tokens_and_counts_below_one_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
