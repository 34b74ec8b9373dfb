"""Where a pod is for ssh, and the options of every connection, whatever is configured."""

import hashlib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_ops.errors import ConfigurationError, LocalResourceError

CONNECT_TIMEOUT_S = 10
PERSIST_S = 300
#: A unix socket's name has at most 104 bytes on macOS (Linux: 108); ssh binds it with 17 more.
MAX_SOCKET_PATH = 104 - 17 - 1

_ADDRESS = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][\w.+\\-]*)@)?"
    r"(?P<host>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\])"
    r"(?::(?P<port>\d{1,5}))?"
)
_MAX_PORT = 65_535


@dataclass(frozen=True)
class Address:
    """What the operator calls a machine; what is left out, `~/.ssh/config` decides.

    Attributes:
        host: Host name, address or alias of the ssh configuration.
        user: Login; empty if the configuration decides.
        port: Port; None if the configuration decides.
    """

    host: str
    user: str = ""
    port: int | None = None

    @property
    def words(self) -> list[str]:
        """The end of a command line of ssh."""
        user = ["-l", self.user] if self.user else []
        port = ["-p", str(self.port)] if self.port is not None else []
        return [*user, *port, "--", self.host]

    def __str__(self) -> str:
        """`user@host:port`, as it is typed."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f"{self.user}@" if self.user else ""
        return user + host + (f":{self.port}" if self.port is not None else "")


def parse_address(text: str) -> Address:
    """An address from `user@host[:port]`, or an alias of the ssh configuration.

    Raises:
        ConfigurationError: If it is neither.
    """
    user, _, host = text.rpartition("@")
    if _is_ipv6(host):  # ssh reads it so, too: what follows the last colon is no port
        text = f"{user}@[{host}]" if user else f"[{host}]"
    match = _ADDRESS.fullmatch(text)
    port = int(match["port"]) if match and match["port"] else None
    if match is None or port == 0 or (port or 0) > _MAX_PORT:
        message = f"Pod address `{text}` is not `local`, `local:ROOT` or `user@host[:port]`"
        hint = "A host of your ssh configuration is added with `--from-ssh-config ALIAS`"
        raise ConfigurationError(message, hint=hint)
    return Address(match["host"].strip("[]"), match["user"] or "", port)


def _is_ipv6(host: str) -> bool:
    """Whether a host is an IPv6 address without brackets."""
    try:
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    except ValueError:
        return False


@dataclass(frozen=True)
class SshSettings:
    """What this machine gives every connection.

    Attributes:
        state_dir: Folder of the pinned host keys.
        socket_dirs: Folders for control sockets, the best first.
        environment: Environment of ssh: a login and its agent, no secrets of ours.
        config: ssh configuration to read instead of the user's and the system's.
    """

    state_dir: Path
    socket_dirs: Sequence[Path]
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Path | None = None

    @property
    def config_words(self) -> list[str]:
        """The flag that names the configuration."""
        return [] if self.config is None else ["-F", str(self.config)]


@dataclass(frozen=True)
class SshTarget:
    """A pod to reach over ssh.

    Attributes:
        pod: Name of the pod, for hints.
        pod_id: Identity that the host key is pinned to; a recycled address is another pod.
        address: Where it is.
        settings: This machine's side.
    """

    pod: str
    pod_id: str
    address: Address
    settings: SshSettings

    @property
    def alias(self) -> str:
        """Name that the pinned host key has."""
        return f"nsa-{self.pod_id}"

    @property
    def known_hosts(self) -> Path:
        """File with the pinned host keys of this pod alone."""
        return self.settings.state_dir / "known_hosts" / self.pod_id


def trust_options(alias: str, known_hosts: Path, strict: str = "yes") -> dict[str, str]:
    """Options that make the pinned key the only one that is believed."""
    return {
        "HostKeyAlias": alias,
        "UserKnownHostsFile": _ssh_path(known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "KnownHostsCommand": "none",
        "StrictHostKeyChecking": strict,
        "VerifyHostKeyDNS": "no",
        "NoHostAuthenticationForLocalhost": "no",
        "CheckHostIP": "no",
        "HashKnownHosts": "no",
        "UpdateHostKeys": "no",
    }


def link_options() -> dict[str, str]:
    """Options that name a dead link in time, forward nothing, and run nothing unasked."""
    return {
        "ConnectTimeout": str(CONNECT_TIMEOUT_S),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "Ciphers": "^aes128-gcm@openssh.com",
        "LogLevel": "ERROR",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "ClearAllForwardings": "yes",
        "PermitLocalCommand": "no",
        "RemoteCommand": "none",
        "Tunnel": "no",
        "VisualHostKey": "no",
    }


def command_options(target: SshTarget, control_path: Path) -> dict[str, str]:
    """Options of a connection that runs commands: nobody is asked, and all share one link."""
    return {
        **trust_options(target.alias, target.known_hosts),
        **link_options(),
        "BatchMode": "yes",
        "RequestTTY": "no",
        "ControlMaster": "auto",
        "ControlPath": _ssh_path(control_path),
        "ControlPersist": str(PERSIST_S),
    }


def option_words(options: Mapping[str, str]) -> list[str]:
    """Options as words of a command line; they win over every configuration file."""
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _ssh_path(path: Path) -> str:
    """A path as a value of ssh, which splits at spaces and expands percent signs."""
    return '"' + str(path).replace("%", "%%") + '"'


def socket_name(target: SshTarget, pinned: str) -> str:
    """Name of the control socket: another login, address or host key never shares a link."""
    facts = (target.pod_id, str(target.address), str(target.settings.state_dir), pinned)
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def choose_socket(folders: Sequence[Path], name: str) -> Path:
    """The first folder in which the socket's name is short enough.

    Raises:
        LocalResourceError: If none is.
    """
    for folder in folders:
        if len(str(folder / name).encode()) <= MAX_SOCKET_PATH:
            return folder / name
    longest = folders[-1] / name
    message = (
        f"The control socket `{longest}` has {len(str(longest).encode())} bytes, "
        f"and a unix socket may have {MAX_SOCKET_PATH} here"
    )
    raise LocalResourceError(message, hint="Set XDG_RUNTIME_DIR or TMPDIR to a shorter folder")
