"""The launch tables, as code that is being compiled looks into them."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.triton.launch import device_architecture


def test_a_compiler_that_traces_into_the_tables_neither_breaks_nor_warns(monkeypatch):
    # Warnings are errors in this suite; a user would see one on stderr for every compiled length.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    card = torch.device("cuda", 97)

    @torch.compile(backend="eager", fullgraph=True)
    def add_architecture(x: torch.Tensor) -> torch.Tensor:
        return x + device_architecture(card)

    assert add_architecture(torch.zeros(1)).item() == 90
