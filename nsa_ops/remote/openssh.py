"""The transport over the system's OpenSSH client: one shared connection for each pod."""

import math
import os
import re
import socket
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from nsa_ops.errors import LocalResourceError, OpsError
from nsa_ops.remote.frame import BOOTSTRAP, FramedAnswer
from nsa_ops.remote.framed import Ended, FramedTransport
from nsa_ops.remote.pump import Outcome, end_process, pump
from nsa_ops.remote.ssh.config import run_ssh_tool
from nsa_ops.remote.ssh.explain import explain_ssh
from nsa_ops.remote.ssh.host_keys import read_pin, unpin
from nsa_ops.remote.ssh.target import (
    SshTarget,
    choose_socket,
    command_options,
    link_options,
    option_words,
    socket_name,
    trust_options,
)

#: Terminals that the terminfo of every distribution has.
_EVERYWHERE = re.compile(r"(xterm|screen|tmux)(-256color)?|linux|vt1\d\d|dumb")


# A control socket is asked in its master's own protocol (OpenSSH's PROTOCOL.mux): packets are a
# 32-bit length and that many bytes, of big-endian 32-bit words. A client of ssh would wait for ever
# for a master that is stopped, or for a stranger that only listens.
#: How long a master may take; it answers within a few milliseconds, also while it moves data.
ANSWER_S = 3.0
_HELLO, _ALIVE_CHECK, _ALIVE = 0x00000001, 0x10000004, 0x80000005
_VERSION, _REQUEST = 4, 1
_MAX_PACKET = 4096
#: `open`: its master answers; `silent`: somebody listens and does not; `dead`: nobody listens.
Link = Literal["open", "silent", "dead"]


class OpenSSHTransport(FramedTransport):
    """`ssh` with a control master of its own; `~/.ssh/config` is honoured and never edited."""

    def __init__(
        self,
        target: SshTarget,
        *,
        longest_s: float = math.inf,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        """Nothing is connected before the first call.

        Args:
            target: Pod to reach.
            longest_s: No call may take longer, whatever it asks for.
            tell: Takes a line where a shared link that does not answer was replaced.
        """
        self._target = target
        self.longest_s = longest_s
        self._tell = tell

    @property
    def where(self) -> str:
        """The pod in words."""
        return str(self._target.address)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of ssh, and of rsync that calls it."""
        return dict(self._target.settings.environment)

    @cached_property
    def control_path(self) -> Path:
        """Socket of the shared link, in a folder that only this user can enter."""
        target = self._target
        name = socket_name(target, read_pin(target).fingerprint)
        return _place_socket(target.settings.socket_dirs, name)

    @cached_property
    def _argv(self) -> list[str]:
        options = command_options(self._target, self.control_path)
        head = ["ssh", *self._target.settings.config_words, "-T", *option_words(options)]
        return [*head, *self._target.address.words]

    @property
    def shared_argv(self) -> list[str]:
        """Ssh over the shared link and no other, before a host's name: without it, it fails."""
        only = ["-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-o", "BatchMode=yes"]
        return ["ssh", "-F", "/dev/null", *only, "-S", str(self.control_path)]

    def bare_argv(self, command: str) -> list[str]:
        """What a person would type over the same shared link; a bench compares with it."""
        return [*self._argv, command]

    def _exchange(self, pieces: Iterable[bytes], answer: FramedAnswer, timeout_s: float) -> Ended:
        self._replace_silent_link()
        process = self._start()
        outcome: Outcome = "late"
        try:
            feeds = (answer.out.feed, answer.err.feed)
            outcome = pump(process, pieces, feeds, answer, timeout_s)
        finally:
            # A complete answer needs no exit status, and a process on the pod may hold the streams.
            status = end_process(process, is_wanted=outcome == "ended" and not answer.is_whole)
        return Ended(status, outcome)

    def _replace_silent_link(self) -> None:
        """Make room for a new link where ssh would wait for ever for the master of the old one."""
        if drop_silent(self.control_path) and self._tell is not None:
            self._tell(
                f"the shared link to {self.where} did not answer within {ANSWER_S:g} s (is its ssh "
                f"stopped?); `{self.control_path}` was removed, and a new link is opened"
            )

    def _start(self) -> subprocess.Popen[bytes]:
        """Start ssh without a terminal, so that neither it nor a jump can ask anybody."""
        try:
            return subprocess.Popen(
                [*self._argv, BOOTSTRAP],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self.environment,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise _no_ssh() from error

    def _explain(self, ended: Ended, said: str) -> OpsError:
        return explain_ssh(ended.status, said, self.where, self._target.pod)

    def close(self) -> None:
        """End the shared link, if one is open; runs on the pod do not notice."""
        drop_silent(self.control_path)
        if self.control_path.exists():
            run_ssh_tool([*self._argv[:1], "-O", "exit", *self._argv[1:]], self._target.settings)


def run_terminal(target: SshTarget, term: str) -> int:
    """A shell for a person at this terminal: the same pinned key, but ssh may ask.

    Returns:
        Exit status of ssh.

    Raises:
        AuthenticationError: If no key is pinned.
        LocalResourceError: If ssh is not installed.
    """
    read_pin(target)
    options = {**trust_options(target.alias, target.known_hosts), **link_options()}
    words = option_words(options | {"ControlPath": "none"})
    argv = ["ssh", *target.settings.config_words, *words, *target.address.words]
    environment = {**target.settings.environment, "TERM": term}
    try:
        return subprocess.run(argv, env=environment, check=False).returncode
    except FileNotFoundError as error:
        raise _no_ssh() from error


def known_terminal(term: str) -> str:
    """The terminal's own name, or one that every machine knows (xterm-kitty ends tmux at once)."""
    return term if _EVERYWHERE.fullmatch(term) else "xterm-256color"


def _no_ssh() -> LocalResourceError:
    hint = "Install OpenSSH's client, or add the pod with `--transport fabric`"
    return LocalResourceError("`ssh` is not installed on this machine", hint=hint)


def forget_link(target: SshTarget) -> None:
    """End the shared link to a pod, and forget its pinned key."""
    if target.known_hosts.is_file():
        OpenSSHTransport(target).close()
        unpin(target)


def _place_socket(folders: Sequence[Path], name: str) -> Path:
    """The first place that is short enough and takes a socket: a disk may be full or read-only.

    Raises:
        LocalResourceError: If there is none, or others may enter the first one.
    """
    problem = ""
    for number in range(len(folders)):
        path = choose_socket(folders[number:], name)
        try:
            _make_private(path.parent)
            if not path.exists():
                tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            why = error.strerror or error
            problem = f"`{path.parent}` cannot hold the socket of an ssh connection: {why}"
            continue
        return path
    hint = "Set XDG_RUNTIME_DIR or TMPDIR to a writable folder of your own"
    raise LocalResourceError(problem, hint=hint)


def _make_private(folder: Path) -> None:
    """Make a folder for sockets; one that others may enter is refused.

    Raises:
        LocalResourceError: If it belongs to somebody else, or is open.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o077 or facts.st_uid != os.getuid():
        message = f"`{folder}` holds sockets of open ssh connections, and others may enter it"
        raise LocalResourceError(message, hint=f"Run `chmod 700 {folder}`, or remove it")


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
