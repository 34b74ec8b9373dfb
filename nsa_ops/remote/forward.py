"""A loopback port of a pod on a loopback port here, and a command that lives as long as we do."""

import os
import re
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from nsa_ops.errors import DeadlineError, LocalResourceError
from nsa_ops.remote.frame import BOOTSTRAP, encode_call
from nsa_ops.remote.framed import last_line
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.transport import QUICK_S

LOOPBACK = "127.0.0.1"
#: Stands for the pod; the shared link knows where it is.
_HOST = "pod"
READY_S = 60.0
_END_S = 5.0
_READY = re.compile(rb"nsa-ready (?P<port>\d{1,5}) (?P<pid>\d+);")
_MARKS = re.compile(r"[0-9a-f]{32}[{}]\w*;")


def shared_words(transport: OpenSSHTransport) -> list[str]:
    """Ssh over the shared link and no other: without it, the call fails at once."""
    only = ["-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-o", "BatchMode=yes"]
    return ["ssh", "-F", "/dev/null", *only, "-S", str(transport.control_path)]


def free_port() -> int:
    """A port of this machine's loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Forward:
    """A port here that leads to a port of the pod, both on loopback.

    Attributes:
        transport: Whose shared link carries it.
        local_port: Here.
        remote_port: There.
    """

    transport: OpenSSHTransport
    local_port: int
    remote_port: int

    def argv(self, verb: str) -> list[str]:
        """The command that opens (`forward`) or closes (`cancel`) it."""
        ends = f"{LOOPBACK}:{self.local_port}:{LOOPBACK}:{self.remote_port}"
        return [*shared_words(self.transport), "-O", verb, "-L", ends, _HOST]

    def open(self) -> None:
        """Open it; a link that was lost is made anew first.

        Raises:
            PodUnreachableError: If the pod does not answer.
            LocalResourceError: If the port is taken here.
        """
        self.transport.run(("true",), timeout_s=QUICK_S)
        done = self._call("forward")
        if done.returncode:
            message = f"Port {self.local_port} of this machine cannot be opened: {_said(done)}"
            raise LocalResourceError(message, hint="Name another one with `--port`")

    def close(self) -> None:
        """Close it; a link that is gone has closed it already."""
        with suppress(DeadlineError):
            self._call("cancel")

    def _call(self, verb: str) -> "subprocess.CompletedProcess[bytes]":
        return _run(self.argv(verb), self.transport)


def _run(argv: list[str], transport: OpenSSHTransport) -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, env=transport.environment,
            timeout=QUICK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        message = f"The shared link to {transport.where} did not answer within {QUICK_S:g} s"
        raise DeadlineError(message, hint="Repeat it") from error


def _said(done: "subprocess.CompletedProcess[bytes]") -> str:
    return last_line(done.stderr.decode(errors="replace")) or f"exit {done.returncode}"


class Held:
    """A command on the pod that reads its stdin: it ends when we close it, or are gone."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, pid: int) -> None:
        self._process = process
        self.port = port
        self.pid = pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the connection; None while the command lives."""
        return self._process.poll()

    def close(self) -> None:
        """Close its stdin, and wait until it has ended."""
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def hold(transport: OpenSSHTransport, argv: Sequence[str]) -> Held:
    """Start a command over the shared link and wait until it says `nsa-ready PORT PID;`.

    Raises:
        PodUnreachableError: If the pod does not answer.
        LocalResourceError, DeadlineError: As `await_ready`.
    """
    transport.run(("true",), timeout_s=QUICK_S)
    return await_ready([*shared_words(transport), _HOST, BOOTSTRAP], argv, transport.environment)


def await_ready(door: Sequence[str], argv: Sequence[str], environment: dict[str, str]) -> Held:
    """As `hold`, through any program that gives its stdin to `sh` as the bootstrap does.

    Args:
        door: The program, such as ssh with its options.
        argv: The command; it says `nsa-ready PORT PID;` once it can be used.
        environment: Environment of the program.

    Raises:
        LocalResourceError: If the command ends before it is ready; with its last words.
        DeadlineError: If it is not ready in time.
    """
    process = subprocess.Popen(
        list(door), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, start_new_session=True,
    )  # fmt: skip
    port, pid = _await_words(process, encode_call(argv, secrets.token_hex(16)))
    return Held(process, port, pid)


def _await_words(process: "subprocess.Popen[bytes]", line: bytes) -> tuple[int, int]:
    """Give it its line, and wait for its port and pid; it is ended if they do not come."""
    held = Held(process, 0, 0)
    with suppress(BrokenPipeError):  # what it said instead is read below
        _stream(process.stdin).write(line)
        _stream(process.stdin).flush()
    out, said = _stream(process.stdout), b""
    end = time.monotonic() + READY_S
    while (left_s := end - time.monotonic()) > 0:
        if not select.select([out], [], [], left_s)[0]:
            break
        piece = os.read(out.fileno(), 4096)
        said += piece
        if found := _READY.search(said):
            return int(found["port"]), int(found["pid"])
        if not piece:
            words = _last_words(_stream(process.stderr).read())
            held.close()
            message = f"It ended before it could be used: {words or 'it said nothing'}"
            raise LocalResourceError(message)
    held.close()
    message = f"It could not be used within {READY_S:g} s"
    raise DeadlineError(message, hint="See what the pod is busy with: `nsa-ops status`")


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        message = "a process was started without its streams"
        raise RuntimeError(message)
    return stream


def _last_words(stderr: bytes) -> str:
    """The last line of a command, without the marks of its frame."""
    return last_line(_MARKS.sub("", stderr.decode(errors="replace")))
