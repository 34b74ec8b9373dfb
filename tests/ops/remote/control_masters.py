"""Somebody who listens on a control socket: a master of ssh, a stranger, or one that is stopped."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

#: What a master says to our two packets: that it speaks version 4, and that it lives.
MASTER = struct.pack(">III", 8, 1, 4) + struct.pack(">IIII", 12, 0x80000005, 1, 4242)


@contextlib.contextmanager
def listener(path: Path, says: bytes | None) -> Iterator[None]:
    """Listen at a path; each caller is told this and then left, or None: nothing at all."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link, _ = listening.accept()
                    with link:
                        link.recv(64)
                        link.sendall(says or b"")

        if says is not None:
            Thread(target=serve, daemon=True).start()
        yield
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
