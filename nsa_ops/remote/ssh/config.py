"""What the user's ssh configuration makes of an address: asked of ssh itself, never parsed here."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    OpsError,
    PodUnreachableError,
)
from nsa_ops.remote.ssh.errors import explain_ssh
from nsa_ops.remote.ssh.target import Address, SshSettings

_ASK_S = 10.0
_APPLIED = re.compile(r"^debug1: (.+ line \d+: Applying options for .*?)\r?$", re.MULTILINE)
_NONE = "none"


@dataclass(frozen=True)
class Resolved:
    """An address as OpenSSH understands it.

    Attributes:
        host: Host that is connected to.
        port: Port.
        user: Login.
        identity_files: Private keys that are tried.
        proxy_jump: Machines that lie between; empty for a direct connection.
        proxy_command: Command that makes the connection; empty for a direct one.
    """

    host: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    proxy_jump: str
    proxy_command: str

    def __str__(self) -> str:
        """The route in words."""
        through = self.proxy_jump or (f"`{self.proxy_command}`" if self.proxy_command else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user}@{host}:{self.port}" + (f" through {through}" if through else "")


def identity_paths(resolved: Resolved) -> list[Path]:
    """Private keys that are tried, as paths of this machine."""
    return [Path(one).expanduser() for one in resolved.identity_files]


def parse_resolved(text: str) -> Resolved:
    """The answer of `ssh -G`: one lower-case keyword and its value a line.

    Raises:
        ConfigurationError: If it holds no host.
    """
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        keyword, _, value = line.partition(" ")
        values.setdefault(keyword, []).append(value)
    single = {name: found[0] for name, found in values.items()}
    if "hostname" not in single or not single.get("port", "").isdigit():
        message = f"`ssh -G` gave no host name and port: {text[:200]!r}"
        raise ConfigurationError(message, hint="See `ssh -V`")
    jump, command = single.get("proxyjump", _NONE), single.get("proxycommand", _NONE)
    return Resolved(
        host=single["hostname"],
        port=int(single["port"]),
        user=single.get("user", ""),
        identity_files=tuple(values.get("identityfile", ())),
        proxy_jump="" if jump == _NONE else jump,
        # The first one of both wins in ssh; it prints only that one.
        proxy_command="" if command == _NONE else command,
    )


def resolve(address: Address, settings: SshSettings) -> Resolved:
    """Ask `ssh -G` what an address means; connects to nothing.

    Raises:
        ConfigurationError, LocalResourceError: If ssh cannot use its configuration, or is missing.
    """
    argv = ["ssh", *settings.config_words, "-G", *address.words]
    done = run_ssh_tool(argv, settings)
    if done.returncode:
        raise _refusal(done.stderr.decode(errors="replace"), address)
    return parse_resolved(done.stdout.decode(errors="replace"))


def blocks_of(address: Address, settings: SshSettings) -> frozenset[str]:
    """The `Host` blocks that ssh applies to an address, each by its file, line and pattern.

    Raises:
        ConfigurationError, LocalResourceError: As `resolve`.
    """
    argv = ["ssh", *settings.config_words, "-v", "-G", *address.words]
    done = run_ssh_tool(argv, settings)
    said = done.stderr.decode(errors="replace")
    if done.returncode:
        raise _refusal(said, address)
    return frozenset(_APPLIED.findall(said))


def _refusal(said: str, address: Address) -> OpsError:
    """Nothing was connected to, so what ssh refuses is never the network."""
    error = explain_ssh(None, said, str(address), str(address))
    if not isinstance(error, PodUnreachableError):
        return error
    words = " / ".join(said.strip().splitlines())
    message = f"ssh cannot tell what `{address}` is: {words}"
    return ConfigurationError(message, hint=f"See `ssh -G {address.host}`")


def run_ssh_tool(
    argv: list[str], settings: SshSettings, timeout_s: float = _ASK_S
) -> subprocess.CompletedProcess[bytes]:
    """Run a program of OpenSSH without a terminal, so that it can ask nobody.

    Raises:
        LocalResourceError: If it is not installed, or does not end in time.
    """
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, env=dict(settings.environment),
            timeout=timeout_s, start_new_session=True, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        message = f"`{argv[0]}` is not installed on this machine"
        hint = "Install OpenSSH's client, or add the pod with `--transport fabric`"
        raise LocalResourceError(message, hint=hint) from error
    except subprocess.TimeoutExpired as error:
        message = f"`{argv[0]}` did not end within {timeout_s:g} s on this machine"
        raise LocalResourceError(
            message, hint="Does a `Match exec` of ~/.ssh/config hang?"
        ) from error
