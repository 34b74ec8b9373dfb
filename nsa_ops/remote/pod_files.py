"""Scripts that move one file on the pod's side, whole or not at all, and what their ends mean."""

import hashlib
import re
from collections.abc import Callable

from nsa_ops.errors import (
    LocalResourceError,
    NotFoundError,
    OpsError,
    PartialError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.remote.transport import Completed

_NOT_WHOLE, _NO_FILE, _NOT_REGULAR, _IS_FOLDER, _DISK, _FORBIDDEN = 65, 66, 72, 73, 74, 77
_HEADER = re.compile(rb"([0-9]{1,19}) ([0-9a-f]{64}) ([0-7]{3,4})")
_MAX_HEADER = 128

_PUT = f"""
[ -d "$1" ] || exit {_NO_FILE}
[ ! -d "$2" ] || exit {_IS_FOLDER}
trap 'rm -f -- "$3"' EXIT
umask 077
cat > "$3" || exit {_DISK}
[ "$(stat -c %s -- "$3")" = "$4" ] || exit {_NOT_WHOLE}
sum=$(sha256sum < "$3")
[ "${{sum%% *}}" = "$5" ] || exit {_NOT_WHOLE}
chmod -- "$6" "$3" && sync -- "$3" && mv -f -- "$3" "$2" || exit {_DISK}
"""

# dd moves large pieces in one process and says when it cannot read; head and tail do neither.
DD = "dd bs=1048576 status=none"

# Hashed and sent up to the size it had when it was looked at: a log may grow meanwhile.
_GET = f"""
[ -f "$1" ] || exit {_NO_FILE}
[ -r "$1" ] || exit {_FORBIDDEN}
size=$(stat -c %s -- "$1") || exit {_DISK}
send() {{ {DD} iflag=count_bytes count="$size" if="$1"; }}
sum=$(send "$1" | sha256sum) || exit {_DISK}
printf '%s %s %s\\n' "$size" "${{sum%% *}}" "$(stat -c %a -- "$1")"
send "$1" || exit {_DISK}
"""

# Anything but a regular file (a FIFO, a terminal) may never end.
_TAIL = f"""
[ -e "$1" ] || exit {_NO_FILE}
[ -f "$1" ] || exit {_NOT_REGULAR}
[ -r "$1" ] || exit {_FORBIDDEN}
[ "$(stat -c %s -- "$1")" -gt "$2" ] || exit 0
{DD} iflag=skip_bytes,count_bytes skip="$2" count="$3" if="$1" || exit {_DISK}
"""


def put_command(
    folder: str, target: str, part: str, *, size: int, sha256: str, mode: int
) -> tuple[str, ...]:
    """Receive a file on stdin under a temporary name, check it, and rename it."""
    return ("sh", "-c", _PUT, "sh", folder, target, part, str(size), sha256, f"{mode:o}")


def get_command(source: str) -> tuple[str, ...]:
    """Send size, hash and mode in one line, then the file."""
    return ("sh", "-c", _GET, "sh", source)


def tail_command(path: str, offset: int, max_bytes: int) -> tuple[str, ...]:
    """Send bytes of a file from an offset on."""
    return ("sh", "-c", _TAIL, "sh", path, str(offset), str(max_bytes))


def check(done: Completed, path: str, where: str) -> None:
    """Raise unless one of these scripts ended well."""
    if done.exit_code:
        raise _error(done, path, where)


def _error(done: Completed, path: str, where: str) -> OpsError:
    said = f": {done.last_error_line}" if done.last_error_line else ""
    code = done.exit_code
    if code == _NO_FILE:
        return NotFoundError(f"`{path}` does not exist on {where}")
    if code == _NOT_WHOLE:
        return VerificationError(f"`{path}` did not arrive completely on {where}", hint="Repeat it")
    if code == _NOT_REGULAR:
        return StateConflictError(f"`{path}` on {where} is no regular file")
    if code == _IS_FOLDER:
        return StateConflictError(
            f"`{path}` on {where} is a folder, but a file must be written there"
        )
    if code == _FORBIDDEN:
        return StateConflictError(f"`{path}` on {where} cannot be read by this login")
    if code == _DISK:
        message = f"`{path}` cannot be written or read on {where}{said}"
        return LocalResourceError(message, hint="Check the free space and the permissions there")
    return PartialError(f"Copying `{path}` ended with code {code} on {where}{said}")


class Arriving:
    """A file that arrives with its size, hash and mode in front."""

    def __init__(self, write: Callable[[bytes], object], *, max_bytes: int) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._header = b""
        self._size = self._arrived = 0
        self._sha256 = ""
        self._digest = hashlib.sha256()
        self.mode = 0o600

    def feed(self, piece: bytes) -> None:
        """Take the next bytes.

        Raises:
            VerificationError: If the announcement cannot be understood, or more comes than it says.
            LocalResourceError: If there is no room for what is announced.
        """
        if not self._sha256:
            self._header += piece
            line, newline, piece = self._header.partition(b"\n")
            if not newline and len(line) < _MAX_HEADER:
                return
            self._parse(line)
        self._arrived += len(piece)
        if self._arrived > self._size:
            message = f"{self._size} bytes were announced, but {self._arrived} or more arrived"
            raise VerificationError(message, hint="Check the pod: it sends more than it announces")
        self._digest.update(piece)
        self._write(piece)

    def _parse(self, line: bytes) -> None:
        match = _HEADER.fullmatch(line)
        if match is None:
            message = f"The pod announced a file in a form that cannot be understood: {line!r}"
            raise VerificationError(message)
        self._size, self._sha256 = int(match[1]), match[2].decode()
        self.mode = int(match[3], 8) & 0o777
        if self._size > self._max_bytes:
            message = f"{self._size} bytes were announced, but only {self._max_bytes} are free here"
            raise LocalResourceError(message, hint="Free space, or check the file on the pod")

    def verify(self, source: str) -> None:
        """Raise VerificationError unless exactly the announced content arrived."""
        sha256 = self._digest.hexdigest()
        if self._arrived != self._size or sha256 != self._sha256:
            message = (
                f"`{source}` arrived with sha256 {sha256} ({self._arrived} bytes), and "
                f"{self._sha256 or 'nothing'} ({self._size} bytes) was announced"
            )
            raise VerificationError(message, hint="The file changed meanwhile: repeat it")
