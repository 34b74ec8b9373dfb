"""Which hosts the user's ssh configuration names, to say which one was meant; ssh decides."""

import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from nsa_ops.errors import NotFoundError
from nsa_ops.remote.ssh.config import blocks_of, resolve
from nsa_ops.remote.ssh.target import Address, SshSettings

_LINE = re.compile(r"\s*(?P<keyword>host|include)(?:\s*=\s*|\s+)(?P<rest>.+)", re.IGNORECASE)
_WORD = re.compile(r'"([^"]*)"|(\S+)')
_SYSTEM = Path("/etc/ssh/ssh_config")
#: As deep as ssh itself follows.
_MAX_DEPTH = 16
_MAX_SHOWN = 8
#: A name that no configuration means.
_NOBODY = "nsa-ops-asks-what-any-other-host-gets"


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
