"""The first login to a new pod, by its password: our public key is put there for all later ones."""

import stat
from pathlib import Path
from typing import TextIO

from nsa_ops.context import Operator, audit_log, target_of
from nsa_ops.errors import (
    AuthenticationError,
    ConfigurationError,
    LocalResourceError,
    NotFoundError,
)
from nsa_ops.local_files import expand_home, read_named
from nsa_ops.remote.audit import AuditedTransport
from nsa_ops.remote.ssh.config import identity_paths, resolve
from nsa_ops.remote.ssh.target import Address, SshSettings
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.store import PodRecord

STDIN = "-"

#: Adds the line on stdin to the login's keys, once; what is there stays.
_INSTALL = """
umask 077
IFS= read -r key && [ -n "$key" ] || exit 65
mkdir -p -- "$HOME/.ssh" || exit
file=$HOME/.ssh/authorized_keys
[ -e "$file" ] || : > "$file" || exit
grep -qxF -- "$key" "$file" && exit
[ -z "$(tail -c 1 -- "$file")" ] || echo >> "$file" || exit
printf '%s\\n' "$key" >> "$file"
"""


def read_password(source: str, stdin: TextIO) -> str:
    """The password in a file that nobody else may read, or in the first line of stdin.

    Raises:
        LocalResourceError: If others may read it.
        ConfigurationError: If it is empty, or no text.
        OpsError: As `read_named`.
    """
    if source == STDIN:
        password = stdin.readline().rstrip("\n")
    else:
        path = expand_home(source)
        content = read_named(path, "Password file")
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            message = f"Password file `{source}` has mode {mode:o}, so others may read it"
            raise LocalResourceError(message, hint=f"Run `chmod 600 {source}`")
        try:
            password = content.decode().partition("\n")[0].rstrip("\r")
        except UnicodeDecodeError as error:
            message = f"Password file `{source}` is no UTF-8 text"
            raise ConfigurationError(message, hint="Write it anew in UTF-8") from error
    if not password:
        message = f"`--password-from {source}` gave no password"
        raise ConfigurationError(message, hint="It is the first line")
    return password


def find_public_key(address: Address, settings: SshSettings) -> Path:
    """The public half of the first key that ssh would try for an address."""
    tried = identity_paths(resolve(address, settings))
    for path in tried:
        public = path.with_name(f"{path.name}.pub")
        if path.is_file() and public.is_file():
            return public
    names = ", ".join(f"`{path}.pub`" for path in tried[:3])
    message = f"There is no key to put on {address}: looked for {names or 'none'}"
    raise NotFoundError(message, hint="Make one with `ssh-keygen -t ed25519`")


def install_key(operator: Operator, pod: PodRecord, public_key: Path, password: str) -> None:
    """Log in once with the password, over Paramiko, and add our key to the login's keys.

    The host key is pinned already; the password is in no argument, environment, log or audit.

    Raises:
        AuthenticationError: If the password or the host key is wrong, or the key cannot be kept.
        LocalResourceError: If Fabric is not installed here.
    """
    from nsa_ops.remote.fabric import FabricTransport  # needs packages that may be absent

    transport = FabricTransport(target_of(pod, operator.settings), password)
    try:
        key = public_key.read_text(encoding="utf-8").strip().encode() + b"\n"
        audited = AuditedTransport(transport, audit_log(operator.settings), pod.name)
        done = audited.run(("sh", "-c", _INSTALL), stdin=key, timeout_s=QUICK_S)
    finally:
        transport.close()
    if done.exit_code:
        message = f"Our key could not be put on {transport.where}: {done.last_error_line}"
        raise AuthenticationError(message, hint="See `ls -la ~/.ssh` there")
