"""Frame: a call as one line for `sh`, and its answer between random marks.

A login shell's start-up file may print before and after a command, ssh writes its own words to
the same stderr, and `exit 255` looks like a dead link. So both streams carry a mark before and
after the command's own bytes, and the exit code stands in the last one:

    noise  NONCE{  output of the command  NONCE}0;  noise
"""

import re
import shlex
from collections.abc import Callable, Sequence

from nsa_ops.errors import ConfigurationError

#: What the pod's login shell is given. Any shell parses it (fish and csh too), it holds nothing of
#: the call, and POSIX `read` takes one line and leaves the rest of stdin to the command.
BOOTSTRAP = "exec sh -c 'IFS= read -r s && eval \"$s\"'"

#: Endings that are no exit codes.
MISSING = "missing"
NOT_EXECUTABLE = "refused"
NO_TIMEOUT = "tool"

_PLAIN = re.compile(r"[\n\x20-\x7e]*")
_MAX_NOISE = 65_536
_ENDING = re.compile(rb"[a-z0-9]{1,8};")


def encode_call(argv: Sequence[str], nonce: str, limit_s: int) -> bytes:
    """One line that runs a command inside marks, in a process group that ends after a limit.

    Args:
        argv: The command; never expanded or split there.
        nonce: Random word of this call.
        limit_s: Seconds after which the pod itself kills the group, also when the link is gone.

    Raises:
        ConfigurationError: If a word holds a NUL byte, which no argument can.
    """
    prelude, words = ["n=$(printf '\\nx')", "n=${n%x}"], []
    for number, word in enumerate(argv):
        if "\0" in word:
            message = f"Argument {number} of `{argv[0]}` holds a NUL byte"
            raise ConfigurationError(message)
        if _PLAIN.fullmatch(word):
            words.append(_quote_lines(word))
        else:
            prelude += [
                f"w{number}=$(printf '%bx' '{_octal(word)}')",
                f"w{number}=${{w{number}%x}}",
            ]
            words.append(f'"$w{number}"')
    start, end = f"printf %s '{nonce}{{'", f'printf "%s}}%s;" {nonce} "$c"'
    found = _is_found(argv[0], words[0])
    run = f"timeout -s KILL {limit_s} {' '.join(words)}; c=$?"
    choose = f"if ! command -v timeout >/dev/null; then c={NO_TIMEOUT}; {found} else {run}; fi"
    script = "; ".join([*prelude, start, f"{start} >&2", choose, f"{end} >&2", end])
    return script.encode() + b"\n"


def _is_found(name: str, word: str) -> str:
    """Branches for a program that does not exist or cannot be executed."""
    if "/" not in name:
        return f"elif ! command -v {word} >/dev/null; then c={MISSING};"
    return (
        f"elif [ ! -e {word} ]; then c={MISSING}; "
        f"elif [ -d {word} ] || [ ! -x {word} ]; then c={NOT_EXECUTABLE};"
    )


def _quote_lines(word: str) -> str:
    """Quote printable text; a newline is a variable, so that the call stays one line."""
    return '"$n"'.join(shlex.quote(line) if line else "" for line in word.split("\n")) or "''"


def _octal(word: str) -> str:
    return "".join(f"\\0{byte:03o}" for byte in word.encode(errors="surrogateescape"))


class Framed:
    """One stream of an answer, fed piece by piece; the command's own bytes go to a sink.

    Attributes:
        is_open: The first mark was seen: the command was about to start.
        ending: What stands in the last mark; None until it was seen.
    """

    def __init__(self, nonce: str, sink: Callable[[bytes], object]) -> None:
        self._start = nonce.encode() + b"{"
        self._end = nonce.encode() + b"}"
        self._sink = sink
        self._pending = b""
        self._noise = b""
        self.is_open = False
        self.ending: str | None = None

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the stream."""
        self._pending += piece
        if self.ending is not None:
            self._pass_noise(len(self._pending))
        elif not self.is_open:
            self._seek_start()
        else:
            self._pass_payload()

    @property
    def noise(self) -> str:
        """What stood outside the marks: words of ssh and of start-up files."""
        outside = self._noise if self.is_open else self._noise + self._pending
        return outside.decode(errors="replace")

    def _seek_start(self) -> None:
        at = self._pending.find(self._start)
        if at < 0:
            self._pass_noise(len(self._pending) - len(self._start) + 1)
            return
        self._pass_noise(at)
        self._pending = self._pending[len(self._start) :]
        self.is_open = True
        self._pass_payload()

    def _pass_payload(self) -> None:
        at = self._pending.find(self._end)
        if at < 0:
            at = max(0, len(self._pending) - len(self._end) + 1)
            self._sink(self._pending[:at])
            self._pending = self._pending[at:]
            return
        ending = _ENDING.match(self._pending, at + len(self._end))
        if ending is not None:
            self._sink(self._pending[:at])
            self.ending = ending[0][:-1].decode()
            self._pending = self._pending[ending.end() :]
            self._pass_noise(len(self._pending))

    def _pass_noise(self, count: int) -> None:
        if count > 0:
            self._noise = (self._noise + self._pending[:count])[-_MAX_NOISE:]
            self._pending = self._pending[count:]
