"""The transport over Fabric and Paramiko, hardened: for machines that have no ssh client."""

import base64
import contextlib
import math
import queue
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nsa_ops.errors import (
    AuthenticationError,
    ConfigurationError,
    LocalResourceError,
    OpsError,
    PodUnreachableError,
)
from nsa_ops.remote.frame import BOOTSTRAP, FramedAnswer
from nsa_ops.remote.framed import Ended, FramedTransport
from nsa_ops.remote.pump import BEGIN_S, Outcome
from nsa_ops.remote.ssh.config import Resolved, identity_paths, resolve
from nsa_ops.remote.ssh.explain import another_host_key, explain_ssh
from nsa_ops.remote.ssh.host_keys import HostKey, read_pin
from nsa_ops.remote.ssh.target import CONNECT_TIMEOUT_S, Address, SshSettings, SshTarget

_SSH_PORT = 22
_PULSE_S = 5.0
_MAX_SILENCE_S = 18.0
_DEAD_MS = 15_000
_READ_BYTES = 2**18
_WAKE_S = 0.5
#: Longest wait for a sender that a full channel may hold.
_SENT_S = 0.5
_END_S = 2.0

#: What has arrived on stdout and on stderr.
Receive = Callable[[], tuple[bytes, bytes]]


def _load() -> tuple[Any, Any]:
    """The two packages, imported only when a pod needs them.

    Raises:
        LocalResourceError: If they are not installed.
    """
    try:
        import fabric
        import paramiko
    except ImportError as error:
        message = f"The transport `fabric` needs a package that is not installed: {error.name}"
        raise LocalResourceError(message, hint="Install `nsa-ops[fabric]`") from error
    return fabric, paramiko


class FabricTransport(FramedTransport):
    """One Paramiko connection; it never sets an environment and never uses SFTP.

    With a password it logs in by that alone; without one, by the keys that ssh would try.
    """

    def __init__(
        self, target: SshTarget, password: str | None = None, *, longest_s: float = math.inf
    ) -> None:
        self._target = target
        self.longest_s = longest_s
        self._password = password
        self._fabric, self._paramiko = _load()
        self._connection: Any = None
        self._pulse: _Pulse | None = None
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        """The pod in words."""
        return str(self._target.address)

    def _exchange(self, pieces: Iterable[bytes], answer: FramedAnswer, timeout_s: float) -> Ended:
        began_s = time.monotonic()
        limit_s = min(timeout_s, BEGIN_S)
        channel = self._open_in_time(limit_s)
        if channel is None:
            return Ended(None, "late" if limit_s == timeout_s else "silent")
        sender = threading.Thread(target=self._send, args=(channel, pieces), daemon=True)
        sender.start()
        outcome: Outcome = "late"
        try:
            receive = self._receiver(channel)
            outcome = _drain(channel, receive, answer, self._pulse, began_s, timeout_s)
        finally:
            status = channel.exit_status if channel.exit_status_ready() else None
            # Paramiko may put its end of input behind a close, for which sshd ends the connection.
            sender.join(_SENT_S)
            self._close_in_time(channel)
            sender.join(_END_S)
        if outcome == "silent":
            self.close()
        return Ended(None if status == -1 else status, outcome)

    def _receiver(self, channel: Any) -> Receive:
        """Takes what has arrived on both streams; a link that was cut gives no more.

        Reading also sends (it widens the channel's window), so a cut may be met there.
        """

        def receive() -> tuple[bytes, bytes]:
            try:
                out = channel.recv(_READ_BYTES) if channel.recv_ready() else b""
                err = channel.recv_stderr(_READ_BYTES) if channel.recv_stderr_ready() else b""
            except (self._paramiko.SSHException, OSError, EOFError):
                return b"", b""
            return out, err

        return receive

    def _close_in_time(self, channel: Any) -> None:
        """Close a channel; on a link that was cut this may block, so only for a short time."""

        def close() -> None:
            with contextlib.suppress(self._paramiko.SSHException, OSError, EOFError):
                channel.close()

        closer = threading.Thread(target=close, daemon=True)
        closer.start()
        closer.join(_END_S)

    def _send(self, channel: Any, pieces: Iterable[bytes]) -> None:
        """Feed the command from a thread of its own; one that does not read is no error."""
        with contextlib.suppress(OSError, EOFError, self._paramiko.SSHException):
            for piece in pieces:
                channel.sendall(piece)
            channel.shutdown_write()

    def _open_in_time(self, limit_s: float) -> Any:
        """A channel on which `sh` waits; None if the link gave none in time and was dropped.

        Paramiko waits for these answers without a limit, so a thread of its own has to.
        """
        box: queue.Queue[Any] = queue.Queue()

        def open_channel() -> None:
            try:
                box.put(self._open_channel())
            except OpsError as error:
                box.put(error)

        threading.Thread(target=open_channel, daemon=True).start()
        try:
            found = box.get(timeout=limit_s)
        except queue.Empty:
            self.close()
            return None
        if isinstance(found, OpsError):
            raise found
        return found

    def _open_channel(self) -> Any:
        try:
            channel = self._connected().create_session()
            channel.exec_command(BOOTSTRAP)
        except (self._paramiko.SSHException, OSError, EOFError) as error:
            self.close()
            raise self._link_error(error) from error
        return channel

    def _connected(self) -> Any:
        """The open connection; a dead one is replaced."""
        with self._lock:
            if self._connection is None or not self._connection.is_connected:
                self._connection = self._connect()
            return self._connection

    def _connect(self) -> Any:
        pinned = read_pin(self._target)
        route = _route(self._target)
        files = [] if self._password else [str(one) for one in identity_paths(route)]
        connection = self._fabric.Connection(
            host=route.host,
            user=route.user or None,
            port=route.port,
            # Neither ~/.fabric.yaml nor Paramiko's reading of ~/.ssh/config, which refuses valid
            # files: ssh itself has resolved the address.
            config=self._fabric.Config(lazy=True, ssh_config=self._paramiko.SSHConfig()),
            forward_agent=False,
            connect_timeout=CONNECT_TIMEOUT_S,
            connect_kwargs={
                "sock": open_socket(route.host, route.port),
                "key_filename": [one for one in files if Path(one).is_file()],
                "password": self._password,
                "allow_agent": self._password is None,
                "look_for_keys": self._password is None and not files,
                "banner_timeout": CONNECT_TIMEOUT_S,
                "auth_timeout": CONNECT_TIMEOUT_S,
            },
        )
        client = connection.client
        client.set_missing_host_key_policy(self._paramiko.RejectPolicy())
        key = self._paramiko.PKey.from_type_string(pinned.kind, base64.b64decode(pinned.base64))
        client.get_host_keys().add(_known_as(route), key.get_name(), key)
        connection.open()
        connection.transport.clear_to_send_timeout = CONNECT_TIMEOUT_S
        self._pulse = _Pulse(connection.transport)
        return connection

    def _link_error(self, error: Exception) -> OpsError:
        where, paramiko = self.where, self._paramiko
        is_unknown = "not found in known_hosts" in str(error)
        if isinstance(error, paramiko.BadHostKeyException) or is_unknown:
            key = getattr(error, "key", None)  # only where another key than the pinned one answered
            shown = HostKey(key.get_name(), key.get_base64()).fingerprint if key else ""
            return another_host_key(where, self._target.pod, str(error), shown=shown)
        if isinstance(error, paramiko.AuthenticationException):
            message = f"{where} refuses our login: {error}"
            hint = "Name a key in ~/.ssh/config or load it into your agent"
            if self._password is not None:
                hint = "Check the password, and that sshd on the pod accepts passwords"
            return AuthenticationError(message, hint=hint)
        said = str(error) or type(error).__name__
        return PodUnreachableError(f"{where} does not answer: {said}", hint="A run there continues")

    def _explain(self, ended: Ended, said: str) -> OpsError:
        return explain_ssh(ended.status, said, self.where, self._target.pod)

    def close(self) -> None:
        """End the connection, if one is open; runs on the pod do not notice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Pulse:
    """Asks the server every few seconds and notes when it last answered.

    Paramiko's own keepalive asks for no answer, so a link that stalls would never end.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._heard_s = time.monotonic()
        threading.Thread(target=self._ask, daemon=True).start()

    @property
    def silence_s(self) -> float:
        """Seconds since the server last answered."""
        return time.monotonic() - self._heard_s

    def _ask(self) -> None:
        while self._transport.is_active():
            self._transport.global_request("keepalive@openssh.com", wait=True)
            if self._transport.is_active():
                self._heard_s = time.monotonic()
            time.sleep(_PULSE_S)


def _drain(
    channel: Any,
    receive: Receive,
    answer: FramedAnswer,
    pulse: _Pulse | None,
    began_s: float,
    timeout_s: float,
) -> Outcome:
    """Take both streams together until the answer is whole, the channel ends or time is up."""
    while not answer.is_whole:
        limit_s = timeout_s if answer.has_begun else min(timeout_s, BEGIN_S)
        left_s = began_s + limit_s - time.monotonic()
        if left_s <= 0:
            return "late" if limit_s == timeout_s else "silent"
        if pulse is not None and pulse.silence_s > _MAX_SILENCE_S:
            return "silent"
        select.select([channel], [], [], min(left_s, _WAKE_S))
        is_over = channel.closed or channel.eof_received
        out, err = receive()
        if out:
            answer.out.feed(out)
        if err:
            answer.err.feed(err)
        if is_over and not out and not err:
            break
    return "ended"


def open_socket(host: str, port: int) -> socket.socket:
    """A TCP connection that sends at once and ends when nothing is acknowledged for 15 s.

    Raises:
        OSError: If nobody answers.
    """
    opened = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; elsewhere `BEGIN_S` and deadlines remain
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MS)
    return opened


def _known_as(route: Resolved) -> str:
    """The name under which Paramiko looks for a pinned key."""
    return route.host if route.port == _SSH_PORT else f"[{route.host}]:{route.port}"


def _route(target: SshTarget) -> Resolved:
    """Where to connect.

    Raises:
        ConfigurationError: If the way leads through another machine.
    """
    route = resolve_without_ssh(target.address, target.settings)
    if route.proxy_jump or route.proxy_command:
        message = f"Pod `{target.pod}` is reached as {route}, but `fabric` connects only directly"
        raise ConfigurationError(message, hint="Add it with `--transport ssh`")
    return route


def resolve_without_ssh(address: Address, settings: SshSettings) -> Resolved:
    """What ssh makes of an address, or the address itself on a machine that has no ssh."""
    if shutil.which("ssh", path=settings.environment.get("PATH")) is not None:
        return resolve(address, settings)
    return Resolved(address.host, address.port or _SSH_PORT, address.user, (), "", "")


def scan(address: Address, settings: SshSettings) -> HostKey:
    """The host key that answers at an address.

    Raises:
        PodUnreachableError: If nobody answers, or it does not speak SSH.
    """
    _, paramiko = _load()
    route = resolve_without_ssh(address, settings)
    try:
        with contextlib.closing(
            paramiko.Transport(open_socket(route.host, route.port))
        ) as transport:
            transport.start_client(timeout=CONNECT_TIMEOUT_S)
            key = transport.get_remote_server_key()
    except (paramiko.SSHException, OSError, EOFError) as error:
        message = f"{address} does not answer: {error or type(error).__name__}"
        raise PodUnreachableError(message, hint="Check host and port") from error
    return HostKey(key.get_name(), key.get_base64())
