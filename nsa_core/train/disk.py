"""What a full disk may and may not cost: lines of telemetry yes, the run and its end no."""

import shutil
import threading
from collections.abc import Callable

from nsa_core.rundir.atomic import fsync_dir
from nsa_core.rundir.layout import RunDir

RESERVE_BYTES = 65_536


class LossyWrites:
    """Tries to write; a disk that refuses costs the line, is said once, and is counted."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self.num_lost = 0
        self.first_error = ""

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Run `write`; False if the operating system refused."""
        try:
            write()
        except OSError as error:
            with self._lock:
                self.num_lost += 1
                is_first = self.num_lost == 1
                self.first_error = self.first_error or str(error)
            if is_first:
                self._tell(f"warning: {what} could not be written: {error}; the run goes on")
            return False
        return True


def hold_reserve(run: RunDir) -> None:
    """Occupy a few blocks that `release_reserve` gives back at the end.

    Raises:
        OSError: If the disk has no room even for that.
    """
    if run.reserve.exists() and run.reserve.stat().st_size == RESERVE_BYTES:
        return
    run.reserve.write_bytes(b"\x55" * RESERVE_BYTES)


def release_reserve(run: RunDir) -> None:
    """Give the blocks back, so that exit.json and the last event find room."""
    run.reserve.unlink(missing_ok=True)
    fsync_dir(run.root)


def free_bytes(run: RunDir) -> int:
    """Bytes that the disk of the run directory still takes."""
    return shutil.disk_usage(run.root).free
