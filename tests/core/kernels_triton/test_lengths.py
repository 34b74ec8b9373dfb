"""Which kernels and tiles the longest document of a call decides, to the token."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.triton import attend_host, one_tile, select, sources
from nsa_core.kernels.triton import launch as launch_table
from nsa_core.kernels.triton.document_slots import documents
from tests.core.kernels_triton.compiling import Recorded, recording

BLOCK, WIDTH = 64, 64


def choices(*lengths: int) -> list[Recorded]:
    """Launches that choose the blocks of documents of these lengths."""
    tokens = sum(lengths)
    q, k = torch.zeros(tokens, 2, WIDTH), torch.zeros(tokens // 16, 1, WIDTH)
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    with recording(90) as launches:
        docs = documents(borders, tokens, max(lengths), BLOCK)
        select.select_blocks(q, k, torch.zeros(tokens, 2), docs, 32, 16, 16)
    return [one for one in launches if one.kernel.__name__.startswith("top_")]


@pytest.mark.parametrize(
    ("lengths", "kernel"),
    [
        ((4096,), "top_few_blocks_kernel"),
        ((4097,), "top_blocks_kernel"),
        ((4096, 4096), "top_few_blocks_kernel"),
    ],
    ids=str,
)
def test_up_to_64_blocks_are_chosen_in_registers(lengths, kernel) -> None:
    (launch,) = choices(*lengths)
    assert launch.kernel.__name__ == kernel


@pytest.mark.parametrize(("length", "places"), [(1, 16), (1024, 16), (2048, 32), (2049, 64)])
def test_a_choice_in_registers_holds_all_blocks_of_the_longest_document(length, places) -> None:
    (launch,) = choices(length)
    assert dict(launch.constants)["BLOCKS"] == places


def test_the_first_chunk_of_a_long_document_is_chosen_in_registers(monkeypatch) -> None:
    monkeypatch.setattr(select, "_SCORE_BYTES", 64 * 4 * BLOCK * 128)  # chunks of 64 query blocks
    first, *later = choices(8192)
    assert first.kernel.__name__ == "top_few_blocks_kernel"
    assert {one.kernel.__name__ for one in later} == {"top_blocks_kernel"}


@pytest.mark.parametrize(
    ("arch", "longest", "is_taken"),
    [(90, 2048, True), (90, 2049, False), (90, 1, True), (89, 2048, False), (80, 64, False)],
)
def test_documents_whose_keys_fit_one_tile_are_attended_and_chosen_at_once_on_hopper(
    arch, longest, is_taken
) -> None:
    q, k = torch.zeros(128, 2, WIDTH), torch.zeros(8, 1, WIDTH)
    with recording(arch):
        docs = documents(torch.tensor([0, 128], dtype=torch.int32), 128, longest, BLOCK)
        assert one_tile.takes_one_tile(q, k, docs, 16) is is_taken


@pytest.mark.parametrize(("capability", "is_taken"), [((9, 0), True), ((10, 0), False)])
def test_a_newer_card_with_the_launches_of_hopper_attends_and_chooses_apart(
    capability, is_taken, monkeypatch
) -> None:
    monkeypatch.setattr(launch_table, "device_capability", lambda _device: capability)
    q, k = torch.zeros(128, 2, WIDTH), torch.zeros(8, 1, WIDTH)
    with recording(launch_table.architecture(*capability)):
        docs = documents(torch.tensor([0, 128], dtype=torch.int32), 128, 128, BLOCK)
        assert one_tile.takes_one_tile(q, k, docs, 16) is is_taken


@pytest.mark.parametrize(
    ("longest", "keys"), [(1, 16), (256, 16), (257, 32), (1024, 64), (1025, 128), (2048, 128)]
)
def test_one_tile_holds_the_keys_and_the_blocks_of_the_longest_document(longest, keys) -> None:
    assert max(16, one_tile.tile_keys(longest, BLOCK, 16)) == keys
    assert keys >= (longest - 32) // 16 + 1
    assert keys * 16 // BLOCK >= -(-longest // BLOCK)


def forward_launch(longest: int, mode: sources.Mode, width: int = WIDTH) -> Recorded:
    """The forward of a branch on sm_90."""
    q, k = torch.zeros(128, 2, width), torch.zeros(128, 1, width)
    with recording(90) as launches:
        docs = documents(torch.tensor([0, 128], dtype=torch.int32), 128, longest, BLOCK)
        attend_host.forward(q, k, k, docs, mode, (torch.zeros_like(q), torch.zeros(128, 2)))
    return launches[-1]


def key_tile(longest: int, width: int = WIDTH) -> int:
    """Keys of a tile in the forward of the compressed branch."""
    launch = forward_launch(longest, sources.compressed_mode(32, 16), width)
    keys: int = dict(launch.constants)["BN"]
    return keys


def test_the_compressed_branch_takes_narrower_tiles_up_to_8192_tokens() -> None:
    assert [key_tile(longest) for longest in (2048, 8192, 8193)] == [32, 32, 64]
    assert key_tile(2048, 128) == key_tile(8193, 128)


@pytest.mark.parametrize(
    "mode",
    [sources.sliding_mode(512), sources.chosen_mode(torch.zeros(1, 1, 192, dtype=torch.int32))],
    ids=["window", "chosen"],
)
def test_the_other_branches_are_launched_alike_for_any_length(mode: sources.Mode) -> None:
    assert forward_launch(2048, mode) == forward_launch(8193, mode)
