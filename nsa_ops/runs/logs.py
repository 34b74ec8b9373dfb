"""Logs: a run's complete output, byte for byte, by offset."""

from collections.abc import Iterator
from dataclasses import dataclass

from nsa_ops.agents import probe_run
from nsa_ops.context import Operator
from nsa_ops.errors import NotFoundError
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.choose import FoundRun, find_run
from nsa_ops.runs.wait import ENDED

CHUNK_BYTES = 256 * 1024
INTERVAL_S = 1.0


@dataclass(frozen=True)
class Chunk:
    """A part of a log."""

    content: bytes
    offset: int

    @property
    def next_offset(self) -> int:
        """Where the next part begins."""
        return self.offset + len(self.content)


def read_log(
    operator: Operator,
    run_id: str | None,
    *,
    offset: int = 0,
    follow: bool = False,
    name: str = "training.log",
    pod: str | None = None,
) -> Iterator[Chunk]:
    """The log from an offset on; following it ends when the run has ended and all is read.

    `offset`: first byte; a negative one counts from the end.
    `pod`: pod to read it on; None for the one that the registry names.

    Raises:
        NotFoundError: If there is no such run.
    """
    found = find_run(operator, run_id, pod=pod)
    position = offset if offset >= 0 else max(0, found.report.log_bytes + offset)
    has_ended = found.report.state in ENDED
    while True:
        content = _read(found, name, position)
        if content:
            yield Chunk(content, position)
            position += len(content)
        elif not follow or has_ended:
            return
        else:
            operator.clock.sleep(INTERVAL_S)
            # Asked before the next read: what was written up to the end is then read whole.
            has_ended = _has_ended(found)


def _read(found: FoundRun, name: str, position: int) -> bytes:
    """The next part; nothing while the file is not there yet."""
    path = f"{found.report.run_dir}/{name}"
    try:
        return found.link.transport.tail(path, position, max_bytes=CHUNK_BYTES, timeout_s=QUICK_S)
    except NotFoundError:
        return b""


def _has_ended(found: FoundRun) -> bool:
    return probe_run(found.run).state in ENDED
