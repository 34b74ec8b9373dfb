"""Where each document of a packed row begins and ends, kept on the device.

Legend: B batch, T tokens of a row, N = B * T tokens of the call, M documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nsa_core.kernels.geometry import BlockGeometry


@dataclass(frozen=True, eq=False)
class Packing:
    """Documents laid end to end in one row of N tokens; nothing here needs a host synchronisation.

    Attributes:
        cu_seqlens: int32 [M + 1], start of each document and N at the end. Empty documents are
            allowed: `from_document_ids` pads with them, because M is not known on the host.
        max_seqlen: No document is longer than this (an upper bound, on the host).
        num_tokens: N, on the host.
        start_N: int32, the row in which each token's document begins.
        position_N: int32, position of each token within its document.
        length_N: int32, tokens of each token's document.
        uniform_length: T if the row is a plain batch of equally long documents, else None.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    num_tokens: int
    start_N: Tensor
    position_N: Tensor
    length_N: Tensor
    uniform_length: int | None = None

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        num_tokens: int,
        uniform_length: int | None = None,
    ) -> Self:
        """Derive the per-token views from document borders that are already on the device.

        Args:
            cu_seqlens: int32 [M + 1], ascending, from 0 to `num_tokens`; not checked here because
                that would need a host synchronisation.
            max_seqlen: Upper bound of the document lengths.
            num_tokens: The last entry of `cu_seqlens`.
            uniform_length: Length of every document, where they are equally long.
        """
        rows = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
        document_N = torch.searchsorted(cu_seqlens, rows, right=True) - 1
        start_N = cu_seqlens[document_N]
        return cls(
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            num_tokens=num_tokens,
            start_N=start_N,
            position_N=rows - start_N,
            length_N=cu_seqlens[document_N + 1] - start_N,
            uniform_length=uniform_length,
        )

    @classmethod
    def uniform(cls, batch: int, length: int, device: torch.device | str = "cpu") -> Self:
        """A batch [B, T] without document borders: B documents of T tokens."""
        cu_seqlens = length * torch.arange(batch + 1, dtype=torch.int32, device=device)
        return cls.from_cu_seqlens(
            cu_seqlens, max_seqlen=length, num_tokens=batch * length, uniform_length=length
        )

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Self:
        """Documents of these lengths, one after the other.

        Raises:
            ValueError: If there is no document or a length is below 1.
        """
        if not lengths or min(lengths) < 1:
            message = f"document lengths must be at least 1, got {list(lengths)}"
            raise ValueError(message)
        borders = [0]
        for length in lengths:
            borders.append(borders[-1] + length)
        return cls.from_cu_seqlens(
            torch.tensor(borders, dtype=torch.int32, device=device),
            max_seqlen=max(lengths),
            num_tokens=borders[-1],
        )

    @classmethod
    def from_document_ids(
        cls,
        document_BT: Tensor,
        max_seqlen: int | None = None,
        max_documents: int | None = None,
    ) -> Self:
        """Cut where the document id changes and at the start of each row of the batch.

        Args:
            document_BT: Any integer ids; only a change between neighbours counts.
            max_seqlen: Upper bound of the document lengths if one below T is known.
            max_documents: Upper bound of their number if one below B * T is known. Kernels take
                time for every document there may be, so give one. Where there are more, the device
                stops with an assertion; nothing is cut off in silence.
        """
        batch, length = document_BT.shape
        is_start_BT = torch.ones_like(document_BT, dtype=torch.bool)
        is_start_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
        num_tokens = batch * length
        rows = torch.arange(num_tokens + 1, dtype=torch.int32, device=document_BT.device)
        borders = rows.clone()
        borders[:num_tokens].masked_fill_(~is_start_BT.reshape(-1), num_tokens)
        kept = min(max_documents or num_tokens, num_tokens) + 1
        ordered = borders.sort().values[:kept]
        torch._assert_async(
            ordered[-1] == num_tokens, f"there are more than max_documents={kept - 1} documents"
        )
        return cls.from_cu_seqlens(ordered, max_seqlen=max_seqlen or length, num_tokens=num_tokens)


@dataclass(frozen=True, eq=False)
class CompressedSlots:
    """Which rows the compressed block of each slot pools; no host synchronisation.

    Attributes:
        first_row_C: int64, first row of the block.
        position_C: Position of that row within its document: i * d.
        exists_C: bool, whether a whole block of one document belongs to this slot.
    """

    first_row_C: Tensor
    position_C: Tensor
    exists_C: Tensor


def compressed_slots(packing: Packing, geometry: BlockGeometry) -> CompressedSlots:
    """Map each of the N // d slots to its block.

    A block that owns slot c covers row c * d + d - 1, because it starts within that stride and is
    at least d long: the document of that row is the only one that can own the slot.
    """
    stride = geometry.compress_stride
    slot_C = torch.arange(geometry.num_slots(packing.num_tokens), device=packing.start_N.device)
    witness_C = slot_C * stride + stride - 1
    start_C = packing.start_N[witness_C]
    position_C = (slot_C - start_C // stride) * stride
    exists_C = position_C + geometry.compress_block <= packing.length_N[witness_C]
    return CompressedSlots(start_C + position_C, position_C, exists_C)
