"""Cards of a pod as CUDA shows them to a run."""

from dataclasses import replace

import pytest

from nsa_ops.gpu.card import Slice
from nsa_ops.gpu.tool_output import parse_output
from nsa_ops.machine.offer import cards_of
from tests.ops.gpu.smi import smi_xml

FOUR = parse_output(smi_xml(0, 0, 0, 0), "nvidia-smi -q -x").cards


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("GPU-1a, 3", [1, 3]),
        ("0,9,1", [0]),  # CUDA stops at what it does not know
        ("0,0,1", [0]),
        ("-1", []),
        ("²,1", []),
        ("9" * 5000, []),
        ("", []),
        ("MIG-1", []),
        ("GPU-", []),  # fits four cards, so it names none
    ],
)
def test_a_run_gets_the_cards_that_cuda_shows_in_its_order(
    visible: str | None, indices: list[int]
) -> None:
    found = cards_of(FOUR, visible)
    assert [card.index for card in found.visible] == indices
    assert found.num_hidden == 4 - len(indices)


def test_auto_gets_the_cards_before_the_first_one_that_others_use() -> None:
    cards = parse_output(smi_xml(0, 0, 30_000, 0), "nvidia-smi -q -x").cards
    offered = cards_of(cards, None).offer()
    assert offered.count == 2
    assert offered.why == (
        "the pod has 4 cards, and gpu2 has 30003 MiB in use by another process: "
        "python (pid 77, 30000 MiB)"
    )
    assert cards_of(cards, "0,1,3").offer().count == 3


def test_a_card_in_slices_is_no_card_of_a_run() -> None:
    sliced = [replace(FOUR[0], slices=(Slice("1g.10gb"),)), replace(FOUR[1], is_mig=True), FOUR[2]]
    assert [card.index for card in cards_of(sliced, None).visible] == [2]
