"""The device of an evaluation."""

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
