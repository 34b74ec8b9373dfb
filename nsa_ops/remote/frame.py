"""Frame: a call as one line for `sh`, and its answer between random marks.

A login shell's start-up file may print before and after a command, ssh writes its own messages to
the same stderr, and `exit 255` looks like a dead link. So both streams carry a mark before and
after the command's own bytes, and the last mark holds the exit code:

    noise  NONCE{PID;  output of the command  NONCE}0;  noise

PID is the shell that runs it: sshd makes it the leader of a process group, which a missed deadline
kills by a second call.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nsa_ops.errors import ConfigurationError, VerificationError
from nsa_ops.remote.transport import OversizeError

#: What the pod's login shell is given. Any shell parses it (fish and csh too), it holds nothing of
#: the call, and POSIX `read` takes one line and leaves the rest of stdin to the command.
BOOTSTRAP = "exec sh -c 'IFS= read -r s && eval \"$s\"'"

#: Ends what a shell of ours has started, if that is still what runs under its number.
KILL = """
case $(tr '\\0' ' ' < "/proc/$1/cmdline") in *'read -r s && eval'*) ;; *) exit 0 ;; esac
kill -KILL "-$1" 2>/dev/null || kill -KILL "$1"
"""

#: Endings that are no exit codes.
MISSING = "missing"
NOT_EXECUTABLE = "refused"

_PLAIN = re.compile(r"[\n\x20-\x7e]*")
#: Bytes outside the marks of one stream: start-up files and ssh print a few kilobytes at most.
MAX_NOISE_BYTES = 2**20
_MAX_KEPT_NOISE = 65_536
_PID = re.compile(rb"([0-9]{1,10});")
_ENDING = re.compile(rf"([0-9]{{1,3}}|{MISSING}|{NOT_EXECUTABLE});".encode())
_MAX_VALUE = 11


def encode_call(argv: Sequence[str], nonce: str) -> bytes:
    """One line that runs a command inside marks.

    Args:
        argv: The command; never expanded or split there.
        nonce: Random word of this call.

    Raises:
        ConfigurationError: If a word holds a NUL byte, which no argument can.
    """
    # Each substitution is a fork there, so only what is needed.
    has_lines = any("\n" in word for word in argv)
    prelude = ["n=$(printf '\\nx')", "n=${n%x}"] if has_lines else []
    words = []
    for number, word in enumerate(argv):
        if "\0" in word:
            message = f"Argument {number} of `{argv[0]}` holds a NUL byte"
            raise ConfigurationError(message)
        if _PLAIN.fullmatch(word):
            words.append(_quote_lines(word))
        else:
            # Newlines at the end are lost in a substitution, so they are added after it. `${w%x}`
            # would keep them too, but bash 5.2 reorders bytes there that are not UTF-8.
            body = word.rstrip("\n")
            prelude.append(f"w{number}=$(printf '%b' '{_octal(body)}')")
            words.append(f'"$w{number}' + "$n" * (len(word) - len(body)) + '"')
    start, end = f'printf "%s{{%s;" {nonce} $$', f'printf "%s}}%s;" {nonce} "$c"'
    choose = f"if {_lacks(argv[0], words[0])} else {' '.join(words)}; c=$?; fi"
    script = "; ".join([*prelude, start, f"{start} >&2", choose, f"{end} >&2", end])
    return script.encode() + b"\n"


def _lacks(name: str, word: str) -> str:
    """Branches for a program that does not exist or cannot be executed."""
    if "/" not in name:
        return f"! command -v {word} >/dev/null; then c={MISSING};"
    return (
        f"[ ! -e {word} ]; then c={MISSING}; "
        f"elif [ -d {word} ] || [ ! -x {word} ]; then c={NOT_EXECUTABLE};"
    )


def _quote_lines(word: str) -> str:
    """Quote printable text; a newline is a variable, so that the call stays one line."""
    return '"$n"'.join(shlex.quote(line) if line else "" for line in word.split("\n")) or "''"


def _octal(word: str) -> str:
    return "".join(f"\\0{byte:03o}" for byte in word.encode(errors="surrogateescape"))


@dataclass(frozen=True)
class FramedAnswer:
    """Both streams of one answer."""

    out: "Framed"
    err: "Framed"

    @property
    def has_begun(self) -> bool:
        """The command was about to start."""
        return self.pid is not None

    @property
    def is_whole(self) -> bool:
        """Both last marks were seen."""
        return self.out.ending is not None and self.err.ending is not None

    @property
    def pid(self) -> int | None:
        """The shell on the pod; None if it has not begun."""
        return self.err.pid if self.out.pid is None else self.out.pid

    @property
    def noise(self) -> str:
        """Words of ssh and of start-up files: errors first."""
        return f"{self.err.noise.strip()}\n{self.out.noise.strip()}".strip()


class Framed:
    """One stream of an answer, fed piece by piece; the command's own bytes go to a sink.

    Attributes:
        pid: From the first mark: the command was about to start; None until then.
        ending: From the last mark; None until it was seen.
    """

    def __init__(self, nonce: str, sink: Callable[[bytes], object]) -> None:
        self._start = nonce.encode() + b"{"
        self._end = nonce.encode() + b"}"
        self._sink = sink
        self._pending = b""
        self._noise = b""
        self._num_noise_bytes = 0
        self.pid: int | None = None
        self.ending: str | None = None

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the stream.

        Raises:
            VerificationError: If a mark cannot be understood.
            OversizeError: If more than `MAX_NOISE_BYTES` arrive outside the marks.
        """
        self._pending = self._pending + piece if self._pending else piece
        if self.ending is not None:
            self._pass_noise(len(self._pending))
        elif self.pid is None:
            self._seek_start()
        else:
            self._pass_payload()

    @property
    def noise(self) -> str:
        """What arrived outside the marks: messages of ssh and of start-up files."""
        outside = self._noise if self.pid is not None else self._noise + self._pending
        return outside.decode(errors="replace")

    def _seek_start(self) -> None:
        at = self._pending.find(self._start)
        if at < 0:
            self._pass_noise(len(self._pending) - len(self._start) + 1)
            return
        value = self._match(_PID, at + len(self._start))
        if value is not None:
            rest = self._pending[value.end() :]
            self._pending = self._pending[:at]
            self._pass_noise(at)
            self._pending, self.pid = rest, int(value[1])
            self._pass_payload()

    def _pass_payload(self) -> None:
        at = self._pending.find(self._end)
        if at < 0:
            # A whole piece is passed on as it is: bytes are only copied where a mark may begin.
            at = len(self._pending) - _begun(self._end, self._pending)
            if at > 0:
                self._sink(self._pending[:at])
            self._pending = self._pending[at:]
            return
        value = self._match(_ENDING, at + len(self._end))
        if value is not None:
            self._sink(self._pending[:at])
            self.ending = value[1].decode()
            self._pending = self._pending[value.end() :]
            self._pass_noise(len(self._pending))

    def _match(self, pattern: re.Pattern[bytes], at: int) -> re.Match[bytes] | None:
        """The value in a mark; None while it may still arrive."""
        value = pattern.match(self._pending, at)
        if value is None and len(self._pending) - at >= _MAX_VALUE:
            found = self._pending[at : at + _MAX_VALUE]
            message = f"A mark in the pod's answer cannot be understood: {found!r}"
            raise VerificationError(message, hint="The pod does not answer as expected: check it")
        return value

    def _pass_noise(self, count: int) -> None:
        if count <= 0:
            return
        self._noise = (self._noise + self._pending[:count])[-_MAX_KEPT_NOISE:]
        self._pending = self._pending[count:]
        self._num_noise_bytes += count
        if self._num_noise_bytes > MAX_NOISE_BYTES:
            message = (
                f"The pod printed {self._num_noise_bytes} bytes or more around an answer, and the "
                f"limit is {MAX_NOISE_BYTES}"
            )
            hint = "Let the login's start-up files on the pod print only in interactive shells"
            raise OversizeError(message, hint=hint)


def _begun(mark: bytes, stream: bytes) -> int:
    """Bytes at the end of a stream with which a mark may have begun."""
    at = max(0, len(stream) - len(mark) + 1)
    while (at := stream.find(mark[:1], at)) >= 0:
        if mark.startswith(stream[at:]):
            return len(stream) - at
        at += 1
    return 0
