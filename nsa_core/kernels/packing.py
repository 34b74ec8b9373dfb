"""Where each document of a packed row begins and ends, kept on the device.

Legend: B batch, T tokens of a row, N = B * T tokens of the call, M documents.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.inputs import require_count

#: Rows and borders are int32.
MAX_TOKENS = 2**31 - 1


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
            cu_seqlens: int32 [M + 1], ascending, from 0 to `num_tokens`. Borders in the memory of
                the host are checked; a card would have to be waited for, so there `check` does it
                on request.
            max_seqlen: Upper bound of the document lengths.
            num_tokens: The last entry of `cu_seqlens`.
            uniform_length: Length of every document, where they are equally long.

        Raises:
            ValueError: If that does not hold, or there is no token.
        """
        require_count("num_tokens", num_tokens, most=MAX_TOKENS)
        require_count("max_seqlen", max_seqlen)
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
            message = (
                "cu_seqlens must be int32 [documents + 1] with at least one document, got "
                f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            )
            raise ValueError(message)
        is_here = type(cu_seqlens) is Tensor and cu_seqlens.device.type == "cpu"
        if is_here and not torch.compiler.is_compiling():
            _check_borders(cu_seqlens.tolist(), max_seqlen, num_tokens, uniform_length)
        return cls._derive(
            cu_seqlens,
            max_seqlen=max_seqlen,
            num_tokens=num_tokens,
            uniform_length=uniform_length,
        )

    def check(self) -> Self:
        """Read the borders back and refuse those that `from_cu_seqlens` would; waits for a card.

        Raises:
            ValueError: If they do not ascend from 0 to the last token, or a bound does not hold.
        """
        borders = self.cu_seqlens.tolist()
        _check_borders(borders, self.max_seqlen, self.num_tokens, self.uniform_length)
        return self

    @classmethod
    def _derive(
        cls,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        num_tokens: int,
        uniform_length: int | None = None,
    ) -> Self:
        """The per-token views of borders that are known to be right."""
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
        """A batch [B, T] without document borders: B documents of T tokens.

        Raises:
            ValueError: If B or T is below 1.
        """
        require_count("rows of the batch", batch)
        require_count("tokens of a row", length)
        require_count("tokens of a call", batch * length, most=MAX_TOKENS)
        cu_seqlens = length * torch.arange(batch + 1, dtype=torch.int32, device=device)
        return cls._derive(
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
        require_count("tokens of a call", borders[-1], most=MAX_TOKENS)
        return cls._derive(
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

        Raises:
            ValueError: If there is no token, or a bound is below 1.
        """
        batch, length = document_BT.shape
        require_count("rows of the batch", batch)
        require_count("tokens of a row", length)
        require_count("max_seqlen", length if max_seqlen is None else max_seqlen)
        require_count("max_documents", 1 if max_documents is None else max_documents)
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
        return cls._derive(ordered, max_seqlen=max_seqlen or length, num_tokens=num_tokens)


def _check_borders(
    borders: list[int], max_seqlen: int, num_tokens: int, uniform_length: int | None
) -> None:
    lengths = [stop - start for start, stop in itertools.pairwise(borders)]
    if borders[0] != 0 or borders[-1] != num_tokens or min(lengths) < 0:
        shown = ", ".join(map(str, borders[:8])) + (", ..." if len(borders) > 8 else "")
        message = f"cu_seqlens must ascend from 0 to {num_tokens}, got [{shown}]"
        raise ValueError(message)
    if max(lengths) > max_seqlen:
        message = f"max_seqlen {max_seqlen} is below the longest document of {max(lengths)} tokens"
        raise ValueError(message)
    if uniform_length is not None and {*lengths} != {uniform_length}:
        message = f"documents of {min(lengths)} to {max(lengths)} tokens are not {uniform_length}"
        raise ValueError(message)


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
