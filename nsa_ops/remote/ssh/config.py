"""What the user's ssh configuration makes of an address; ssh itself decides.

The names of its `Host` lines are read here only to say which one was probably meant.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    NotFoundError,
    OpsError,
    PodUnreachableError,
)
from nsa_ops.local_files import expand_home
from nsa_ops.quantities import parse_count
from nsa_ops.remote.ssh.explain import explain_ssh
from nsa_ops.remote.ssh.target import Address, SshSettings

_ASK_S = 10.0
_APPLIED = re.compile(r"^debug1: (.+ line \d+: Applying options for .*?)\r?$", re.MULTILINE)
_NONE = "none"
_LINE = re.compile(r"\s*(?P<keyword>host|include)(?:\s*=\s*|\s+)(?P<rest>.+)", re.IGNORECASE)
_WORD = re.compile(r'"([^"]*)"|(\S+)')
_SYSTEM = Path("/etc/ssh/ssh_config")
#: As deep as ssh itself follows.
_MAX_DEPTH = 16
_MAX_SHOWN = 8
#: A name that no configuration means.
_NOBODY = "nsa-ops-asks-what-any-other-host-gets"


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
    return [expand_home(one) for one in resolved.identity_files]


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
    port = parse_count(single.get("port", ""))
    if "hostname" not in single or port is None:
        message = f"`ssh -G` gave no host name and port: {text[:200]!r}"
        raise ConfigurationError(message, hint="See `ssh -V`")
    jump, command = single.get("proxyjump", _NONE), single.get("proxycommand", _NONE)
    return Resolved(
        host=single["hostname"],
        port=port,
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
    message = f"ssh cannot resolve `{address}`: {words}"
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
            message, hint="Check whether a `Match exec` in ~/.ssh/config hangs"
        ) from error


def list_aliases(settings: SshSettings) -> list[str]:
    """Names of `Host` lines that are no patterns, in included files too; `Match` is passed over."""
    home = Path(settings.environment.get("HOME") or "/")
    files = [settings.config] if settings.config else [home / ".ssh" / "config", _SYSTEM]
    found = [name for file in files for name in _names(file, home, file.parent, 0)]
    return list(dict.fromkeys(found))


def _names(file: Path, home: Path, system: Path, depth: int) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # ssh passes over what is not there, and says itself what it may not read
        return
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        rest = match["rest"].partition(" #")[0]
        words = [quoted or plain for quoted, plain in _WORD.findall(rest)]
        if match["keyword"].lower() == "host":
            yield from _named(words)
        elif depth < _MAX_DEPTH:
            base = system if file == _SYSTEM else home / ".ssh"
            for word in words:
                for included in _matching(word, home, base):
                    yield from _names(included, home, system, depth + 1)


def _named(words: list[str]) -> Iterator[str]:
    """Names of one `Host` line; one that a negated pattern of the line matches is never meant."""
    refused = [word[1:] for word in words if word.startswith("!")]
    for word in words:
        if not set(word) & set("*?!") and not any(fnmatchcase(word, one) for one in refused):
            yield word


def _matching(pattern: str, home: Path, base: Path) -> list[Path]:
    """Files that an `Include` means: relative ones are in ~/.ssh or /etc/ssh."""
    path = home / pattern[2:] if pattern.startswith("~/") else base / pattern
    root = Path(path.anchor)
    return sorted(one for one in root.glob(str(path.relative_to(root))) if one.is_file())


def require_alias(address: Address, settings: SshSettings) -> None:
    """Refuse a name for which the configuration says nothing but what it says for every host.

    Raises:
        NotFoundError: With the names that were perhaps meant.
        ConfigurationError: If ssh cannot use its configuration.
    """
    nobody = replace(address, host=_NOBODY)
    for_all = blocks_of(nobody, settings)
    blocks = blocks_of(address, settings)
    if blocks - for_all:
        return
    # A `Match` block is no `Host` block. A name that a block for all hosts excludes differs, too.
    told = replace(resolve(nobody, settings), host=address.host)
    if blocks == for_all and resolve(address, settings) != told:
        return
    aliases = list_aliases(settings)
    near = get_close_matches(address.host, aliases, n=1)
    meant = f"; did you mean `{near[0]}`?" if near else ""
    message = f"`{address.host}` is no host of your ssh configuration{meant}"
    shown = ", ".join(f"`{name}`" for name in aliases[:_MAX_SHOWN])
    more = ", …" if len(aliases) > _MAX_SHOWN else ""
    known = f"It has {shown}{more}; any" if aliases else "Any"
    raise NotFoundError(message, hint=f"{known} other machine is added as `user@host[:port]`")
