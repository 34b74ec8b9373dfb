"""The socket of a shared ssh link: whether its master answers, asked in the master's own protocol.

OpenSSH's PROTOCOL.mux: packets are a 32-bit length and that many bytes, of big-endian 32-bit words.
A client of ssh waits for ever for a master that is stopped, or for a stranger that only listens.
"""

import socket
import stat
import struct
import time
from pathlib import Path
from typing import Literal

#: How long a master may take; it answers within a few milliseconds, also while it moves data.
ANSWER_S = 3.0
_HELLO, _ALIVE_CHECK, _ALIVE = 0x00000001, 0x10000004, 0x80000005
_VERSION, _REQUEST = 4, 1
_MAX_PACKET = 4096
#: `open`: its master answers; `silent`: somebody listens and does not; `dead`: nobody listens.
Link = Literal["open", "silent", "dead"]


def ask_master(path: Path, timeout_s: float = ANSWER_S) -> Link:
    """What is behind a control socket, by a question that changes nothing."""
    end_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(timeout_s)
        try:
            link.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return "dead"
        except OSError:  # nobody takes the connections that wait already
            return "silent"
        try:
            link.sendall(_packet(_HELLO, _VERSION) + _packet(_ALIVE_CHECK, _REQUEST))
            hello, answer = _words(link, end_s), _words(link, end_s)
        except (OSError, EOFError, ValueError):
            return "silent"
    is_master = hello[:2] == (_HELLO, _VERSION) and answer[:2] == (_ALIVE, _REQUEST)
    return "open" if is_master else "silent"


def drop_silent(path: Path) -> bool:
    """Remove a control socket that somebody listens on without answering; whether it was one.

    One that nobody listens on is left to ssh, which replaces it.
    """
    try:
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or ask_master(path) != "silent":
            return False
        if path.lstat().st_ino == found.st_ino:  # else another command has replaced it meanwhile
            path.unlink()
    except FileNotFoundError:
        return False
    return True


def _packet(*words: int) -> bytes:
    return struct.pack(f">I{len(words)}I", 4 * len(words), *words)


def _words(link: socket.socket, end_s: float) -> tuple[int, ...]:
    """The words that one packet begins with."""
    (length,) = struct.unpack(">I", _receive(link, 4, end_s))
    if length > _MAX_PACKET:
        message = f"a packet of {length} bytes"
        raise ValueError(message)
    content = _receive(link, length, end_s)
    count = length // 4
    return struct.unpack(f">{count}I", content[: 4 * count])


def _receive(link: socket.socket, length: int, end_s: float) -> bytes:
    received = b""
    while len(received) < length:
        link.settimeout(max(0.001, end_s - time.monotonic()))
        piece = link.recv(length - len(received))
        if not piece:
            raise EOFError
        received += piece
    return received
