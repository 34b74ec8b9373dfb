"""TokenBatch: rows of tokens with their targets and document borders.

Legend: B rows of a micro-batch, T tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa_core.config.base import FrozenModel

#: Target of a position that has nothing to predict.
IGNORED = -1


class LoaderState(FrozenModel):
    """The position of a run in its data, as a checkpoint holds it in JSON.

    Attributes:
        epoch: Passes over the training samples that are complete.
        global_sample: Samples that all ranks together have consumed since the run began.
    """

    epoch: int
    global_sample: int
    manifest_sha256: str
    seq_len: int
    seed: int


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of one rank.

    Attributes:
        targets_BT: The id to predict at each position, int64; -1 is ignored. An end token is
            predicted by its document; the first token of the next document is not predicted from
            it, and neither is anything after the end of the data.
        cu_seqlens: int32 [M+1]: borders of the M attention segments in the flattened B*T row, 0
            first and B*T last. A segment is a document's part in a row, or a whole row where
            documents are not packed.
        num_text_bytes: Bytes of text that these targets stand for, for bits per byte.
        state: The loader's state after this batch; None for validation.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    num_targets: int
    num_text_bytes: int
    state: LoaderState | None = None

    def pinned(self) -> "TokenBatch":
        """The same batch in page-locked memory; needs a CUDA card."""
        return replace(
            self,
            tokens_BT=self.tokens_BT.pin_memory(),
            targets_BT=self.targets_BT.pin_memory(),
            cu_seqlens=self.cu_seqlens.pin_memory(),
        )


@dataclass(frozen=True)
class BatchShape:
    """How rows are made."""

    seq_len: int
    pack_documents: bool
    end_id: int
    token_num_bytes: NDArray[np.int32]


def make_batch(
    rows: Sequence[NDArray[np.int64]], shape: BatchShape, state: LoaderState | None = None
) -> TokenBatch:
    """Put samples into a batch.

    A row has up to `seq_len + 1` tokens, the last one only a target; a shorter row, also an empty
    one, is filled with end tokens that nothing is predicted from.
    """
    tokens_BT = np.full((len(rows), shape.seq_len), shape.end_id, dtype=np.int64)
    targets_BT = np.full((len(rows), shape.seq_len), IGNORED, dtype=np.int64)
    borders = [0]
    for number, row in enumerate(rows):
        inputs, targets = row[: shape.seq_len], row[1:]
        tokens_BT[number, : len(inputs)] = inputs
        is_end = inputs[: len(targets)] == shape.end_id
        targets_BT[number, : len(targets)] = np.where(is_end, IGNORED, targets)
        ends = _segment_ends(inputs, shape) if shape.pack_documents else [shape.seq_len]
        borders += [number * shape.seq_len + end for end in ends]
    counted = targets_BT[targets_BT != IGNORED]
    cu_seqlens = np.asarray(borders, dtype=np.int32)
    return TokenBatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        targets_BT=torch.from_numpy(targets_BT),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=int(np.diff(cu_seqlens).max()),
        num_targets=len(counted),
        num_text_bytes=int(shape.token_num_bytes[counted].sum()),
        state=state,
    )


def _segment_ends(inputs: NDArray[np.int64], shape: BatchShape) -> list[int]:
    """Ends of a row's segments: after each end token, at the end of the text, and of the row."""
    after_end = np.flatnonzero(inputs == shape.end_id) + 1
    ends = {*after_end.tolist(), len(inputs), shape.seq_len} - {0}
    return sorted(ends)
