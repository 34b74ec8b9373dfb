"""Batches that are copied beside the compute arrive whole, in order, and are not overwritten."""

import pytest
import torch

from nsa_core.data.batch import LoaderState, TokenBatch
from nsa_core.data.prefetch import do_nothing
from nsa_core.train.feed import StepFeed

pytestmark = pytest.mark.gpu
ROWS, LENGTH, PER_STEP = 32, 2048, 4


class Numbered:
    """Batches full of their number, always ready."""

    state: LoaderState

    def __init__(self) -> None:
        self.num = 0

    def next_batch(self, poll: object) -> TokenBatch:
        tokens = torch.full((ROWS, LENGTH), self.num)
        borders = torch.arange(0, ROWS * LENGTH + 1, LENGTH, dtype=torch.int32)
        place = LoaderState(
            epoch=0, global_sample=self.num, manifest_sha256="", seq_len=LENGTH, seed=0
        )
        self.num += 1
        return TokenBatch(tokens, tokens, borders, LENGTH, ROWS * LENGTH, 0, place)

    def ready_batch(self) -> TokenBatch:
        return self.next_batch(None)


def test_batches_beside_a_busy_card_hold_what_the_loader_gave() -> None:
    device = torch.device("cuda")
    feed = StepFeed(Numbered(), device, PER_STEP)
    work = torch.randn(4096, 4096, device=device)
    sums = []
    for _ in range(30):
        for batch in feed.take(do_nothing):
            for _ in range(3):  # the card is behind the host, so that copies run beside it
                work = (work @ work).clamp(-1, 1)
            sums.append(batch.tokens_BT.sum() + 0 * work[0, 0].long())
            assert batch.targets_BT.is_cuda
            assert batch.cu_seqlens.is_cuda
            del batch
            feed.fetch_ahead()
    found = torch.stack(sums).tolist()
    assert found == [number * ROWS * LENGTH for number in range(30 * PER_STEP)]
