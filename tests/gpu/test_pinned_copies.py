"""Copies of a card's tensors for a checkpoint."""

import pytest
import torch

from nsa_core.train.host_copies import HostCopies


@pytest.mark.gpu
def test_copies_of_a_card_are_pinned_and_whole_at_once():
    device = torch.device("cuda")
    host = HostCopies(device, pytest.fail)
    state = {"model": {"w": torch.zeros(2**26, device=device)}}
    for value in range(3):
        state["model"]["w"].fill_(value)
        copied = host.copy(state)["model"]["w"]
        state["model"]["w"].fill_(-1)
        assert copied.is_pinned()
        assert bool((copied == value).all())
    assert host.reserved_bytes == 2**28
