"""What a pod's disk, debugger and data really give; needs no card."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

from nsa_core.config.run import RunConfig
from nsa_core.data.documents import MIN_RECORDS, Document, require_text
from nsa_core.data.reporting import DataError
from nsa_core.data.sources.local import LocalSource
from nsa_core.data.sources.make import make_source
from nsa_core.data.sources.source import SourcePosition
from nsa_core.rundir.data_account import DataAccount, find_excess
from nsa_core.rundir.report import DiskSpeed, FirstBatch

DISK_MIB = 256
#: A disk slower than this is known to be slow before all is written.
DISK_S = 5.0
FIRST_BATCH_S = 60.0
#: A local data set is looked at for this long: all of a small one, some gigabytes of a large one.
LOOK_S = 10.0
_DEBUG_S = 20.0
_BLOCK_MIB = 8
_MIB = 2**20

# Waits with a word in its memory, and tells where.
_WATCHED = """
import ctypes, sys
word = ctypes.create_string_buffer(b"seen")
print(ctypes.addressof(word), flush=True)
sys.stdin.read()
"""

# Reads the word out of the other process as py-spy would; a sibling, so no parent's right helps.
_WATCHING = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
pid, address = map(int, sys.argv[1:])
word = ctypes.create_string_buffer(4)
here, there = Piece(ctypes.addressof(word), 4), Piece(address, 4)
libc = ctypes.CDLL(None, use_errno=True)
if libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != 4:
    sys.exit(os.strerror(ctypes.get_errno()))
sys.exit(0 if word.raw == b"seen" else "the memory read was not the memory written")
"""


def measure_disk(folder: Path, size_mib: int = DISK_MIB) -> DiskSpeed:
    """Write a file where runs are written, force it to the disk, and remove it.

    It writes less than `size_mib` if that takes longer than `DISK_S`.
    """
    block = os.urandom(_BLOCK_MIB * _MIB)
    written = 0
    with tempfile.NamedTemporaryFile(prefix=".nsa-speed-", dir=folder) as file:
        began_s = time.monotonic()
        while written < size_mib and time.monotonic() - began_s < DISK_S:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written += _BLOCK_MIB
        seconds = time.monotonic() - began_s
    return DiskSpeed(written_mib=written, seconds=round(seconds, 3))


def try_debugger() -> str:
    """Read another process's memory; empty if that is allowed, else what the kernel says."""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as watched:
        try:
            address = watched.stdout.readline().decode().strip() if watched.stdout else ""
            words = [sys.executable, "-I", "-c", _WATCHING, str(watched.pid), address]
            done = subprocess.run(
                words,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_DEBUG_S,
                check=False,
            )
        finally:
            watched.kill()
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def read_first_batch(config: RunConfig, deadline_s: float = FIRST_BATCH_S) -> FirstBatch:
    """Open the data of a configuration and take its first documents; stages nothing.

    A local source is read on for some seconds, for the share of it that would be dropped.

    A source that hangs is left behind in its thread.

    Raises:
        DataError: If the data cannot be read, holds no text, or does not come in time.
    """
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(_read, config).result(deadline_s)
    except TimeoutError as error:
        message = f"no document of `{config.data.source}` came within {deadline_s:g} s"
        hint = "see that the pod reaches the hub, or train on a local copy"
        raise DataError(message, hint) from error
    finally:
        pool.shutdown(wait=False)


class _EnoughError(Exception):
    """A local source was looked at for long enough."""


def _read(config: RunConfig) -> FirstBatch:
    """The first batch, then more for a while where the data is on this machine."""
    began_s = time.monotonic()
    source = make_source(config.data, config.seed)
    documents = source.documents(SourcePosition())
    is_here = config.data.source == "fineweb_edu_local"
    if is_here:  # also where no record of it gives a document
        source.tallies.look = lambda: _stop_at(began_s + LOOK_S)
    lengths: list[int] = []
    seconds, is_everything = LOOK_S, False
    with suppress(_EnoughError):
        lengths.extend(len(one.text) for one in islice(documents, config.data.document_batch))
        seconds = time.monotonic() - began_s
        is_everything = is_here and _read_on(documents, began_s + LOOK_S)
    account = source.tallies.account(goes_on=not is_everything)
    require_text(config.data.path or config.data.source, account)
    return FirstBatch(
        seconds=round(seconds, 3),
        num_documents=len(lengths),
        num_characters=sum(lengths),
        account=account.brief(),
        is_everything=is_everything,
        excess=_excess(account, config, is_everything=is_everything),
        source_bytes=source.text_bytes() if isinstance(source, LocalSource) else None,
    )


def _stop_at(until_s: float) -> None:
    if time.monotonic() >= until_s:
        raise _EnoughError


def _read_on(documents: Iterator[Document], until_s: float) -> bool:
    """Read until a moment of the monotonic clock; whether that was everything."""
    return all(time.monotonic() < until_s for _ in documents)


def _excess(account: DataAccount, config: RunConfig, *, is_everything: bool) -> str:
    """Why the staging would refuse it; nothing where too few records were seen for a share."""
    if not is_everything and account.num_documents + account.num_lost < MIN_RECORDS:
        return ""
    return find_excess(account, config.data.max_dropped, config.data.max_dropped_files) or ""
