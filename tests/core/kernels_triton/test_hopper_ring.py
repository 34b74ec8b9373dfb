"""How persistent programs share work items: the kernels' own arithmetic, in torch."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.triton.hopper import ring


def taken_items(monkeypatch: pytest.MonkeyPatch, programs: int, items: int) -> list[Tensor]:
    """Work items of each of `programs`, in the order in which it takes them."""
    language = SimpleNamespace(
        program_id=lambda _axis: torch.arange(programs),
        num_programs=lambda _axis: programs,
        where=torch.where,
        int32=torch.int32,
    )
    with monkeypatch.context() as patch:
        patch.setattr(ring, "gl", language)
        patch.setattr(ring, "turn_place", ring.turn_place.fn)
        turns = ring.count_turns.fn(torch.tensor(items))
        rows = [ring.turn_item.fn(torch.tensor(turn)) for turn in range(int(turns.max()))]
    return [torch.stack(rows)[: int(num), program] for program, num in enumerate(turns)]


@pytest.mark.parametrize("programs", [1, 2, 3, 132])
def test_every_item_is_taken_by_one_program(monkeypatch, programs: int) -> None:
    for items in range(programs, 5 * programs + 1):
        found = torch.cat(taken_items(monkeypatch, programs, items))
        assert found.sort().values.tolist() == list(range(items)), items


@pytest.mark.parametrize("programs", [2, 3, 132])
def test_two_turns_give_every_program_as_much_where_items_become_shorter(
    monkeypatch, programs: int
) -> None:
    found = taken_items(monkeypatch, programs, 2 * programs)
    assert {int(one.sum()) for one in found} == {2 * programs - 1}
