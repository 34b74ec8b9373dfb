"""The device and the precision of an evaluation, and a batch moved there."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from nsa_core.config.training import Precision
from nsa_core.data.batch import TokenBatch
from nsa_core.kernels.packing import Packing

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_device(wanted: str) -> torch.device:
    """`cuda`, `cpu`, or for `auto` a card where there is one.

    Raises:
        ValueError: If CUDA is asked for and torch sees no card.
    """
    has_card = torch.cuda.is_available()
    if wanted == "cuda" and not has_card:
        message = "--device cuda: torch sees no CUDA card here; `nvidia-smi` says why"
        raise ValueError(message)
    return torch.device("cuda" if has_card and wanted != "cpu" else "cpu")


def memory_bytes(device: torch.device) -> int:
    """Memory of the card, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def autocast(
    device: torch.device, precision: Precision
) -> AbstractContextManager[torch.autocast | None]:
    """Mixed precision of the run; fp32 computes as written."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=COMPUTE_DTYPE[precision])


def move(batch: TokenBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Packing]:
    """Tokens [B, T], targets [B, T] and packing of a batch on the device of the model.

    As many segments as rows, and one as long as a row: then every segment is a whole row.
    """
    rows, length = batch.tokens_BT.shape
    is_uniform = len(batch.cu_seqlens) == rows + 1 and batch.max_seqlen == length
    tokens_BT = batch.tokens_BT.to(device, non_blocking=True)
    targets_BT = batch.targets_BT.to(device, non_blocking=True)
    packing = Packing.from_cu_seqlens(
        batch.cu_seqlens.to(device, non_blocking=True),
        max_seqlen=batch.max_seqlen,
        num_tokens=tokens_BT.numel(),
        uniform_length=length if is_uniform else None,
    )
    return tokens_BT, targets_BT, packing
