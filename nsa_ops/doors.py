"""Doors: the transport that a pod's kind names, and what this machine gives it."""

import math
from collections.abc import Callable
from pathlib import Path

from nsa_ops.errors import ConfigurationError
from nsa_ops.remote.local import LocalTransport
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.ssh.config import resolve
from nsa_ops.remote.ssh.host_keys import HostKey, scan
from nsa_ops.remote.ssh.target import Address, SshSettings, SshTarget, parse_address
from nsa_ops.remote.transport import Transport
from nsa_ops.settings import Settings
from nsa_ops.store import PodRecord

LOCAL, SSH, FABRIC = "local", "ssh", "fabric"


def open_door(
    pod: PodRecord,
    settings: Settings,
    *,
    longest_s: float = math.inf,
    tell: Callable[[str], None] | None = None,
) -> Transport:
    """The way to a pod; nothing is connected before the first call.

    Args:
        pod: Pod to reach.
        settings: What the door needs of this machine.
        longest_s: No call may take longer, whatever it asks for.
        tell: Takes what was done to the link without being asked for.

    Raises:
        ConfigurationError: If this version does not know the kind.
        LocalResourceError: If the kind needs a package that is not installed.
    """
    if pod.kind == LOCAL:
        return LocalTransport(settings.login_environment, longest_s=longest_s)
    if pod.kind == SSH:
        return OpenSSHTransport(target_of(pod, settings), longest_s=longest_s, tell=tell)
    if pod.kind == FABRIC:
        from nsa_ops.remote.fabric import FabricTransport  # needs packages that may be absent

        return FabricTransport(target_of(pod, settings), longest_s=longest_s)
    message = f"Pod `{pod.name}` is of kind `{pod.kind}`, and this version does not know it"
    raise ConfigurationError(message, hint="Update nsa-ops")


def look_at_host(kind: str, address: Address, settings: SshSettings) -> tuple[str, HostKey]:
    """The route to an address in words, and the host key that answers there.

    Raises:
        PodUnreachableError: If nobody answers.
    """
    if kind == FABRIC:
        from nsa_ops.remote import fabric

        return str(fabric.resolve_without_ssh(address, settings)), fabric.scan(address, settings)
    return str(resolve(address, settings)), scan(address, settings)


def target_of(pod: PodRecord, settings: Settings) -> SshTarget:
    """A pod as ssh reaches it."""
    address = parse_address(pod.address)
    return SshTarget(pod.name, pod.pod_id, address, ssh_settings(settings))


def ssh_settings(settings: Settings) -> SshSettings:
    """This machine's side of every connection."""
    config = settings.values.ssh_config
    return SshSettings(
        state_dir=settings.state_dir,
        socket_dirs=settings.socket_dirs,
        environment=settings.ssh_environment,
        config=Path(config).expanduser().absolute() if config else None,
    )
