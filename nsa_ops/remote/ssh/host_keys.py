"""Host keys: read the one that a machine shows, tell its fingerprint, pin it to a pod."""

import base64
import binascii
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.atomic import write_text
from nsa_ops.errors import AuthenticationError, PodUnreachableError, VerificationError
from nsa_ops.remote.ssh.config import run_ssh_tool
from nsa_ops.remote.ssh.explain import explain_ssh
from nsa_ops.remote.ssh.target import (
    CONNECT_TIMEOUT_S,
    Address,
    SshSettings,
    SshTarget,
    link_options,
    option_words,
    trust_options,
)

_ALIAS = "nsa-scan"
#: A connection through a jump makes two handshakes.
_SCAN_S = 2.0 * CONNECT_TIMEOUT_S + 10
_FIELDS = 3


@dataclass(frozen=True)
class HostKey:
    """A public host key: its algorithm, such as `ssh-ed25519`, and the key."""

    kind: str
    base64: str

    @property
    def fingerprint(self) -> str:
        """`SHA256:…` as ssh prints it."""
        try:
            blob = base64.b64decode(self.base64, validate=True)
        except binascii.Error as error:
            message = f"The host key `{self.kind} {self.base64[:40]}` is not valid"
            raise VerificationError(message) from error
        digest = hashlib.sha256(blob).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def parse_known_hosts(text: str) -> list[HostKey]:
    """Keys of a known_hosts file whose names are not hashed; other lines are passed over."""
    lines = (line.split() for line in text.splitlines() if not line.startswith(("#", "@")))
    return [HostKey(words[1], words[2]) for words in lines if len(words) >= _FIELDS]


def scan(address: Address, settings: SshSettings) -> HostKey:
    """The host key that answers at an address, through the jump that is configured.

    ssh-keyscan knows no jump, so ssh itself connects, without offering any authentication.

    Raises:
        PodUnreachableError: If nobody answers.
        OpsError: What else ssh says.
    """
    with tempfile.TemporaryDirectory(prefix="nsa-scan-") as folder:
        found = Path(folder) / "known_hosts"
        options = {
            **trust_options(_ALIAS, found, strict="accept-new"),
            **link_options(),
            "BatchMode": "yes",
            "ControlPath": "none",
            "PreferredAuthentications": "none",
        }
        argv = ["ssh", *settings.config_words, "-T", *option_words(options), *address.words, "true"]
        done = run_ssh_tool(argv, settings, _SCAN_S)
        keys = (
            parse_known_hosts(found.read_bytes().decode(errors="replace")) if found.exists() else []
        )
    if not keys:
        said = done.stderr.decode(errors="replace")
        error = explain_ssh(done.returncode, said, str(address), str(address))
        if isinstance(error, PodUnreachableError):
            error.hint = "Check host and port, and that the machine is up"
        raise error
    return keys[0]


def pin(target: SshTarget, key: HostKey) -> None:
    """Make a key the only one that is believed for a pod."""
    folder = target.known_hosts.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(target.known_hosts, f"{target.alias} {key.kind} {key.base64}\n", mode=0o600)


def read_pin(target: SshTarget) -> HostKey:
    """The pinned key of a pod.

    Raises:
        AuthenticationError: If there is none.
    """
    path = target.known_hosts
    keys = parse_known_hosts(path.read_bytes().decode(errors="replace")) if path.is_file() else []
    if not keys:
        message = f"Pod `{target.pod}` has no pinned host key in `{path}`"
        raise AuthenticationError(message, hint=f"See `nsa-ops pod trust {target.pod}`")
    return keys[0]


def unpin(target: SshTarget) -> None:
    """Forget the key of a pod."""
    target.known_hosts.unlink(missing_ok=True)
