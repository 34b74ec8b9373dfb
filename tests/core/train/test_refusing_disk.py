"""A disk that takes no byte: the hint is for what it said, and not always to free space."""

import errno
import os
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from nsa_core.train import attempt, checkpoint
from nsa_core.train.failure import DiskFullError

SAYS = {
    errno.ENOSPC: "Free space",
    errno.EDQUOT: "quota",
    errno.EROFS: "read-only",
    errno.EACCES: "right to write",
    errno.EIO: "the disk fails",
    errno.ENODEV: "Look at that path",
}


@pytest.mark.parametrize("number", SAYS)
def test_the_hint_at_the_start_is_for_what_the_disk_said(run, manifest, monkeypatch, number):
    def refuse(_run):
        raise OSError(number, os.strerror(number), str(run.reserve))

    monkeypatch.setattr(attempt, "hold_reserve", refuse)
    signals = SimpleNamespace(install=lambda *_: None)
    with pytest.raises(DiskFullError) as refused:
        attempt.Attempt(run, manifest)._train(signals)
    assert SAYS[number] in refused.value.hint
    assert ("Free space" in refused.value.hint) == (number in {errno.ENOSPC, errno.EDQUOT})
    assert os.strerror(number) in str(refused.value)


def test_safetensors_hides_the_number_in_its_words():
    full = SafetensorError("Error while serializing: I/O error: No space (os error 28)")
    other = SafetensorError("I/O error: Read-only file system (os error 30)")
    assert (checkpoint.is_disk_full(full), checkpoint.is_disk_full(other)) == (True, False)
    assert "read-only" in checkpoint.advise(other)
