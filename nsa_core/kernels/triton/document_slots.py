"""Cut packed documents into tiles that never cross a document border, without asking the host.

Document m starts at token s_m. Its tiles of `tile` tokens get the slots s_m // tile + m, + 1, ...
Two documents never share a slot: floor(s / tile) + m + ceil(L / tile) <= floor((s + L) / tile) + m
+ 1. So num_tokens // tile + M slots are enough for any borders, and the launch grid is known on
the host; a slot whose tile starts at or after the end of its document is empty, and its program
returns at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.sizes import cdiv


@triton.jit(do_not_specialize=["num_documents", "num_slots", "num_steps"])
def _tile_documents_kernel(
    CU, DOCUMENT, num_documents, num_slots, num_steps, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    """Bisect for the last document whose first slot is at or before each slot."""
    slot = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    low = tl.zeros([WIDTH], tl.int32)
    high = tl.zeros([WIDTH], tl.int32) + (num_documents - 1)
    for _ in range(num_steps):
        middle = (low + high + 1) // 2
        begins = tl.load(CU + middle) // TILE + middle
        low = tl.where(begins <= slot, middle, low)
        high = tl.where(begins <= slot, high, middle - 1)
    tl.store(DOCUMENT + slot, low, mask=slot < num_slots)


@triton.jit
def locate(DOCUMENT, CU, slot, TILE: tl.constexpr):
    """Find (first token of the document, its length, index of the tile in it) of a slot."""
    document = tl.load(DOCUMENT + slot)
    start = tl.load(CU + document)
    length = tl.load(CU + document + 1) - start
    return start, length, slot - start // TILE - document


def num_slots(num_tokens: int, num_documents: int, tile: int) -> int:
    """Number of tile slots that hold any packing of `num_tokens` tokens in `num_documents`."""
    return num_tokens // tile + num_documents


def tile_documents(cu_seqlens: Tensor, num_tokens: int, tile: int) -> Tensor:
    """Name the document of every tile slot.

    Args:
        cu_seqlens: Document borders [M + 1], int32.
        num_tokens: N, the last border, known on the host.
        tile: Tokens per tile.

    Returns:
        Document of each slot [num_tokens // tile + M], int32; empty slots name a document too,
        and are recognised by a tile that starts past its end.
    """
    num_documents = cu_seqlens.numel() - 1
    slots = num_slots(num_tokens, num_documents, tile)
    document = torch.empty(slots, dtype=torch.int32, device=cu_seqlens.device)
    width = 128
    run(
        _tile_documents_kernel,
        (cdiv(slots, width),),
        cu_seqlens,
        document,
        num_documents,
        slots,
        num_documents.bit_length(),
        tile,
        width,
    )
    return document


@dataclass(frozen=True)
class Documents:
    """Packed documents on the device with the tile slots of one query block size."""

    cu_seqlens: Tensor
    num_tokens: int
    max_seqlen: int
    block: int
    tile_document: Tensor

    @property
    def num_documents(self) -> int:
        """M."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_slots(self) -> int:
        """Query blocks of all documents, empty slots included."""
        return self.tile_document.numel()

    @property
    def num_padded(self) -> int:
        """Tokens where each document begins at a multiple of the query block, as its slots do."""
        return self.num_slots * self.block


def documents(cu_seqlens: Tensor, num_tokens: int, max_seqlen: int, block: int) -> Documents:
    """Cut packed documents into query blocks of `block` tokens."""
    tiles = tile_documents(cu_seqlens, num_tokens, block)
    return Documents(cu_seqlens, num_tokens, max_seqlen, block, tiles)
