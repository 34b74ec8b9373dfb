"""Keep two processes from staging into one folder; the second waits and then finds it done."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsa_core.data.progress import OnProgress, StageProgress

POLL_S = 0.5


@contextmanager
def folder_lock(path: Path, progress: OnProgress) -> Iterator[None]:
    """Hold an advisory lock; the kernel lets it go when the process ends, however it ends."""
    with path.open("ab") as file:
        while not _try_lock(file.fileno()):
            progress(StageProgress("wait", detail=f"another process stages; it holds {path.name}"))
            time.sleep(POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
