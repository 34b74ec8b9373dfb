"""Which kernel the backward of items takes, and that Hopper's compiles for other groups."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

import triton

from nsa_core.kernels.triton import attend_host, row_terms, selected
from nsa_core.kernels.triton.document_slots import Documents, documents
from nsa_core.kernels.triton.hopper import support
from nsa_core.kernels.triton.index import IndexSize, QueryIndex
from nsa_core.kernels.triton.launch import MAX_SHARED_BYTES
from tests.core.kernels_triton.compiling import Recorded, compile_launch, recording

TOKENS, LONGEST = 256, 65536


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "PROVEN_TRITON", (triton.__version__,))
    monkeypatch.setattr(support, "device_capability", lambda _: (9, 0))


def item_launches(
    heads: int = 12, groups: int = 2, width: int = 64, dtype: torch.dtype = torch.bfloat16,
    *, longest: int = LONGEST, deterministic: bool = False,
) -> Iterator[Recorded]:  # fmt: skip
    """What the backward of the KV-major path launches for items."""
    q = torch.zeros(TOKENS, heads, width, dtype=dtype)
    k = torch.zeros(TOKENS, groups, width, dtype=dtype)
    rows = torch.zeros(TOKENS, heads)
    terms = row_terms.RowTerms(rows, rows, torch.zeros(heads, TOKENS + 64, dtype=torch.int64))
    ids = torch.zeros(TOKENS, groups, 16, dtype=torch.int32)
    with recording(90) as launches:
        docs = documents(torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS, longest, 64)
        words = selected.invert(ids, q, k, docs, dense=False, deterministic=deterministic)
        choice = selected.open_choice(ids, words, q, k, docs, dense=False)
        selected.selected_backward(
            q, k, k, q, terms, choice, docs, (k, k), deterministic=deterministic
        )
    return (one for one in launches if "item_backward" in one.kernel.__name__)


def kernel_name(**sizes: object) -> str:
    (launch,) = item_launches(**sizes)
    return launch.kernel.__name__


@pytest.mark.usefixtures("proven")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "groups"), [(12, 2), (5, 1), (1, 1), (16, 1)])
def test_narrow_heads_take_the_backward_of_hopper(heads, groups, dtype) -> None:
    found = kernel_name(heads=heads, groups=groups, dtype=dtype)
    assert found == "hopper_item_backward_kernel"


@pytest.mark.usefixtures("proven")
@pytest.mark.parametrize("change", [{"deterministic": True}, {"width": 128}], ids=str)
def test_ordered_sums_and_wide_heads_take_the_kernel_of_any_card(change) -> None:
    assert kernel_name(**change) == "item_backward_kernel"


@pytest.mark.usefixtures("proven")
def test_a_triton_that_is_not_proven_takes_the_kernel_of_any_card(monkeypatch) -> None:
    monkeypatch.setattr(support, "PROVEN_TRITON", ())
    assert kernel_name() == "item_backward_kernel"


@pytest.mark.usefixtures("proven")
def test_another_card_takes_the_kernel_of_any_card(monkeypatch) -> None:
    monkeypatch.setattr(support, "device_capability", lambda _: (8, 0))
    assert kernel_name() == "item_backward_kernel"


@pytest.mark.usefixtures("proven")
def test_dq_is_added_in_whole_lines_where_documents_are_longer_than_8192_tokens() -> None:
    found = [dict(next(item_launches(longest=n)).constants)["LINES"] for n in (4096, 8192, 8193)]
    assert found == [False, False, True]


@pytest.mark.parametrize(("most_items", "programs"), [(1, 1), (2, 1), (3, 2), (10_000, 132)])
def test_a_launch_has_a_program_for_two_items_and_no_more_than_the_card_has_cores(
    monkeypatch: pytest.MonkeyPatch, most_items: int, programs: int
) -> None:
    host = attend_host.hopper("item_backward")
    grids = []
    monkeypatch.setattr(host, "run", lambda _kernel, grid, *_, **__: grids.append(grid))
    q, k, rows = torch.zeros(64, 2, 64), torch.zeros(64, 1, 64), torch.zeros(64, 2)
    words = torch.zeros(4096, dtype=torch.int32)
    choice = QueryIndex.over(words, IndexSize(64, 1, 16, 2, 2, 128))
    docs = Documents(torch.tensor([0, 64], dtype=torch.int32), 64, 64, 64, words)
    terms = row_terms.RowTerms(rows, rows, rows)
    host.add_items(q, k, k, q, terms, choice, docs, (q, k, k), most_items)
    assert grids == [(programs,)]


@pytest.mark.slow
@pytest.mark.usefixtures("proven")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 5, 16])
def test_the_backward_of_hopper_keeps_its_registers_for_any_group(heads, dtype) -> None:
    (launch,) = item_launches(heads, 1, dtype=dtype)
    machine = compile_launch(launch, 90)
    assert machine.stack_bytes <= 16
    assert machine.serialised == ()
    assert machine.shared_bytes <= MAX_SHARED_BYTES[90]
