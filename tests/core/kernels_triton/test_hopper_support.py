"""Which kernels are Hopper's for which tensors on a card that they were proven on."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

import triton

from nsa_core.kernels.triton.hopper import support


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "PROVEN_TRITON", (triton.__version__,))
    monkeypatch.setattr(support, "device_capability", lambda _: (9, 0))


def taken(
    heads: int, groups: int, width: int, dtype: torch.dtype = torch.bfloat16,
    *, value_width: int | None = None, block: int = 64,
) -> list[str]:  # fmt: skip
    """What is Hopper's for these sizes."""
    q = torch.zeros(1, heads, width, dtype=dtype)
    k = torch.zeros(1, groups, width, dtype=dtype)
    v = torch.zeros(1, groups, value_width or width, dtype=dtype)
    found = {
        "forward": support.takes_forward(q, k, v, block),
        "dq": support.takes_query_gradient(q, k, v, block),
        "items": support.takes_items(q, v, block),
        "planes": support.takes_planes(q, v, block),
    }
    return [name for name, is_taken in found.items() if is_taken]


@pytest.mark.usefixtures("proven")
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((64, 4, 128), ["forward", "dq", "planes"]),
        ((6, 2, 128), ["planes"]),
        ((12, 2, 64), ["dq", "items", "planes"]),
        ((3, 1, 64), ["dq", "items", "planes"]),
        ((12, 3, 64), ["items", "planes"]),
        ((12, 2, 32), []),
        ((64, 4, 128, torch.float16), ["planes"]),
        ((12, 2, 64, torch.float16), ["items", "planes"]),
        ((12, 2, 64, torch.float32), []),
    ],
    ids=str,
)
def test_widths_groups_and_dtype_decide_which_kernels_are_of_hopper(sizes, expected) -> None:
    assert taken(*sizes) == expected


@pytest.mark.usefixtures("proven")
@pytest.mark.parametrize(("heads", "width"), [(12, 64), (64, 128)])
@pytest.mark.parametrize("change", [{"value_width": 32}, {"block": 32}], ids=str)
def test_other_values_and_other_blocks_take_the_kernels_of_any_card(heads, width, change) -> None:
    assert taken(heads, 2, width, **change) == []


@pytest.mark.usefixtures("proven")
@pytest.mark.parametrize(("heads", "width"), [(12, 64), (64, 128)])
@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_no_other_card_takes_them(monkeypatch, heads, width, capability) -> None:
    monkeypatch.setattr(support, "device_capability", lambda _: capability)
    assert taken(heads, 2, width) == []
