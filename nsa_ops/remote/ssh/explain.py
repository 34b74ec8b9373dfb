"""What went wrong with ssh, from its own error text, which every message also shows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_ops.errors import (
    AuthenticationError,
    ConfigurationError,
    LocalResourceError,
    OpsError,
    PodUnreachableError,
    RefusedError,
    StateConflictError,
)
from nsa_ops.quantities import sentence_case

#: Exit status of ssh for an error of its own.
SSH_FAILED = 255
_MAX_WORDS = 300


@dataclass(frozen=True)
class _Kind:
    """Words of ssh that mean one thing.

    Attributes:
        pattern: What ssh prints.
        error: What it is for the operator.
        means: Our sentence; `{where}` is the pod.
        hint: What to do; `{pod}` is its name.
    """

    pattern: re.Pattern[str]
    error: type[OpsError]
    means: str
    hint: str


def _kind(pattern: str, error: type[OpsError], means: str, hint: str) -> _Kind:
    return _Kind(re.compile(pattern, re.IGNORECASE | re.MULTILINE), error, means, hint)


_HOST_KEY = _kind(
    r"host key verification failed|remote host identification has changed|"
    r"host key is known for .* strict checking|offending .* key in",
    AuthenticationError,
    "the host key of {where} is not the pinned one, and nothing was sent",
    "Another machine answers there. A recycled address is a new pod: add it under another "
    "name; if you know why it changed, see `nsa-ops pod trust {pod}`",
)

_JUMP_KEY = _kind(
    "",
    AuthenticationError,
    "the host key of the jump on the way to {where} is unknown to ssh, and nothing was sent",
    "The pinned key is that of the pod; ssh itself keeps those of its jumps. Connect to the jump "
    "once with `ssh` and compare its fingerprint with what the provider's console says",
)
#: Whose key it is: a pod is known to ssh by an alias of ours, a jump by its own name.
_KEY_OF = re.compile(r"host key (?:is known )?for (?P<host>\S+) (?:and|has changed)", re.IGNORECASE)
_OUR_ALIAS = "nsa-"
#: What ssh says where the ssh of a jump has ended; its own refusal of a key is its last word.
_JUMP_ENDED = re.compile(
    r"kex_exchange_identification: connection closed|connection closed by UNKNOWN port 65535",
    re.IGNORECASE,
)
_OFFERED = re.compile(
    r"fingerprint for the (?P<kind>\S+) key sent by the remote host is\s+(?P<key>SHA256:\S+?)\.?$",
    re.IGNORECASE | re.MULTILINE,
)

# In this order: a refused key file also ends in "Permission denied", and a connection that ssh
# itself gives up also ends in "Connection closed".
_KINDS: Sequence[_Kind] = (
    _kind(
        r"bad owner or permissions on (?P<what>\S+)",
        LocalResourceError,
        "ssh refuses its own configuration on this machine, because others may write it",
        "Run `chmod 600` on the named file; nothing was sent to {where}",
    ),
    _kind(
        r"unprotected private key file|bad permissions|permissions \d+ for .* are too open",
        AuthenticationError,
        "ssh refuses the private key on this machine, because others may read it",
        "Run `chmod 600` on the named file",
    ),
    _kind(
        r"^Load key .*: Permission denied",
        AuthenticationError,
        "the private key on this machine cannot be read by this login",
        "See `ls -l` of the named file",
    ),
    _HOST_KEY,
    _kind(
        r"permission denied \(|too many authentication failures|no supported authentication|"
        r"no more authentication methods",
        AuthenticationError,
        "{where} refuses our login",
        "Try `nsa-ops pod ssh {pod}`; name a key in ~/.ssh/config or load it into your agent",
    ),
    _kind(
        r"too long for unix domain socket|path.* too long",
        LocalResourceError,
        "the name of a control socket is too long on this machine",
        "Set XDG_RUNTIME_DIR or TMPDIR to a shorter folder",
    ),
    _kind(
        r"bad configuration option|terminating, \d+ bad configuration|can't open user config|"
        r"missing argument|unsupported option",
        ConfigurationError,
        "ssh cannot use its configuration on this machine",
        "Fix the named line; nsa-ops never edits that file",
    ),
    _kind(
        r"doesn't support PTY|requires? a (pty|tty|terminal)|pty (is )?required|"
        r"exec request failed|interactive sessions? only|"
        r"shell request failed on channel",
        RefusedError,
        "{where} is a gateway that only offers a terminal: no commands can be run through it",
        "Use the pod's direct TCP address (host and port) with `nsa-ops pod add`",
    ),
    _kind(
        r"is not recognized as (an internal or external command|(the|a) name of a cmdlet)",
        RefusedError,
        "{where} runs Windows, not Linux: its shell does not know `sh`",
        "Use a machine that runs Linux; on Windows, run an ssh server inside WSL 2",
    ),
    _kind(
        r"account is currently not available|nologin",
        AuthenticationError,
        "the login on {where} has no shell",
        "Add the pod with a login that has a shell",
    ),
)


def explain_ssh(status: int | None, said: str, where: str, pod: str) -> OpsError:
    """The error behind a command that never began on the pod.

    Args:
        status: Exit status of ssh; None if it has none.
        said: Everything that ssh and the pod's start-up files printed.
        where: The pod in words.
        pod: Its name.
    """
    words = _words(said)
    for kind in _KINDS:
        if kind.pattern.search(said):
            is_of_jump = kind is _HOST_KEY and _is_key_of_jump(said)
            return _error(_JUMP_KEY if is_of_jump else kind, said, where, pod)
    if status is not None and status != SSH_FAILED:
        message = f"The login shell of {where} ended with code {status} before our command{words}"
        hint = "Its start-up file (such as ~/.bashrc or ~/.zshenv) must not exit or refuse"
        return StateConflictError(message, hint=hint)
    message = f"{where} does not answer{words}"
    return PodUnreachableError(message, hint="A run there continues; see `nsa-ops pod show`")


def another_host_key(where: str, pod: str, said: str, *, shown: str = "") -> OpsError:
    """The error for a host key that is not the pinned one.

    Args:
        where: The pod in words.
        pod: Its name.
        said: What the link said.
        shown: Fingerprint of the key that answered; empty if it is not known.
    """
    error = _error(_HOST_KEY, said, where, pod)
    if shown:
        error.message = f"{error.message} (it shows {shown})"
    return error


def _error(kind: _Kind, said: str, where: str, pod: str) -> OpsError:
    message = kind.means.format(where=where) + _offered(said)
    hint = kind.hint.format(where=where, pod=pod)
    return kind.error(sentence_case(message, where) + _words(said), hint=hint)


def _is_key_of_jump(said: str) -> bool:
    """Whether the key that was refused is that of a jump on the way to the pod."""
    named = _KEY_OF.search(said)
    if named:
        return not named["host"].startswith(_OUR_ALIAS)
    return _JUMP_ENDED.search(said) is not None


def _offered(said: str) -> str:
    """The fingerprint of the key that answered instead, where ssh tells it."""
    found = _OFFERED.search(said)
    return f"; it shows {found['key']} ({found['kind']})" if found else ""


def _words(said: str) -> str:
    """The words of ssh in one line, without its frames of `@`."""
    lines = [line.strip() for line in said.splitlines() if line.strip(" @\r")]
    text = " / ".join(lines)
    if len(text) > _MAX_WORDS:
        text = "…" + text[-_MAX_WORDS:]
    return f": {text}" if text else ""
