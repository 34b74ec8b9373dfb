"""Run the kernels under the interpreter beyond their first word, chunk, cell and segment.

A mask word holds 32 blocks, a chunk of scores as many query blocks as fit its buffer, a cell 4
blocks, a segment 8 query blocks: documents of a few blocks never leave the first of each. As slow
as they are long, so each case is as short as its border allows.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton import launch, select
from tests.core.kernels_triton import interpreted
from tests.core.kernels_triton.interpreted import Errors, Inputs

#: Three free choices, so that the second and third have a best one before them.
GEOMETRY = BlockGeometry(
    compress_block=8, compress_stride=4, select_block=16, num_selected=6, window=24
)
#: 34 blocks, two more than a word of the mask has bits, between two short documents.
LENGTHS = [5, 530, 20]


@contextmanager
def small_buffers() -> Iterator[None]:
    """Scores in chunks of about eight query blocks, and no q held by a score program."""
    chunk_bytes = 8 * 4 * GEOMETRY.select_block * 34
    with (
        mock.patch.object(select, "_SCORE_BYTES", chunk_bytes),
        mock.patch.object(select, "_HELD_BYTES", 0),
    ):
        yield


@contextmanager
def parts_of_a_query_block() -> Iterator[None]:
    """Programs that choose for eight tokens, half a query block, as on a card."""
    with (
        mock.patch.object(select, "INTERPRETER", None),
        mock.patch.object(select, "_FEW_TOKENS", 8),
    ):
        yield


def choice_cases(*, few_blocks: int) -> Errors:
    """The choice and its ties over chunks, and over cells where no document has few blocks."""
    x = Inputs(LENGTHS, 3, 1, 16, 16, GEOMETRY)
    with small_buffers(), mock.patch.object(select, "_FEW_BLOCKS", few_blocks):
        found = {"ties": interpreted.ties_case(x), "zeros": interpreted.zeros_case(x)}
        with parts_of_a_query_block():
            found["choice"] = interpreted.select_case(x)
    return {name: errors["wrong"] for name, errors in found.items()}


def mask_case(*, keys: int) -> Errors:
    """The masked-dense path over two words of 32 blocks, with key tiles of one block or two."""
    wide = dataclasses.replace(launch.launch_for("band", torch.device("cpu"), 16, 16), keys=keys)
    with mock.patch.object(launch, "_INTERPRETED", wide):
        return interpreted.selected_case(
            Inputs(LENGTHS, 2, 1, 16, 16, GEOMETRY), dense=True, deterministic=False, arbitrary=True
        )


def items_case(*, deterministic: bool, partial: bool) -> Errors:
    """The KV-major path over several segments of the first block and chunks of queries."""
    policy = dataclasses.replace(launch.policy_for(torch.device("cpu"), 16, 16), partial_dq=partial)
    with mock.patch.object(launch, "_INTERPRETED_POLICY", policy):
        return interpreted.selected_case(
            Inputs([5, 280, 33], 3, 1, 16, 16, GEOMETRY),
            dense=False,
            deterministic=deterministic,
            arbitrary=True,
        )


def all_cases() -> dict[str, Callable[[], Errors]]:
    """Every case by name."""
    return {
        "choice": lambda: choice_cases(few_blocks=0),
        "choice-few": lambda: choice_cases(few_blocks=64),
        "mask": lambda: mask_case(keys=16),
        "mask-pairs": lambda: mask_case(keys=32),
        "items": lambda: items_case(deterministic=False, partial=False),
        "items-ordered": lambda: items_case(deterministic=True, partial=False),
        "items-partial": lambda: items_case(deterministic=False, partial=True),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    found = {name: case() for name, case in all_cases().items() if not wanted or name in wanted}
    sys.stdout.write(json.dumps(found))
