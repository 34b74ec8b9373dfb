"""The device of an evaluation, and how much it holds."""

import os

import torch


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
