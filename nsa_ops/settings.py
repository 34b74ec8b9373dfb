"""The operator's settings: the only place in nsa_ops that reads the laptop's environment."""

import os
import pwd
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from nsa_core.config.base import FrozenModel
from nsa_ops.errors import ConfigurationError
from nsa_ops.local_files import expand_home
from nsa_ops.project_file import PROJECT_SETTINGS, find_project_file, read_own

PREFIX = "NSA_OPS_"
#: Names a settings file to read instead of the user's.
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

#: What a process on a local pod inherits from here, as a fresh login would have it; no secrets.
LOGIN_NAMES = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR",
        "LD_LIBRARY_PATH", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "XDG_CACHE_HOME",
        "HF_HOME", "HF_HUB_OFFLINE", "http_proxy", "https_proxy", "no_proxy",
        "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    }
)  # fmt: skip
#: What ssh gets besides: its agent and tickets, and the kind of terminal for `pod ssh`.
SSH_NAMES = frozenset({"SSH_AUTH_SOCK", "SSH_AGENT_PID", "KRB5CCNAME", "TERM"})
LOGIN_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "OMP_", "MKL_", "TRITON_")

#: Variables of earlier runbooks that configure a run though they do not begin with NSA_.
TRAINING_NAMES = ("DDP_SAFE",)


#: Settings that are paths on this machine.
PATH_SETTINGS = ("state_dir", "ssh_config")


class SettingsError(ValueError):
    """A settings file or variable cannot be used."""


class OperatorSettings(FrozenModel):
    """What can be set for every command; each has a variable NSA_OPS_<NAME>.

    Attributes:
        state_dir: Folder of the registry, the audit log and pulled backups; empty: the platform's.
        pod: Pod to use where several would fit.
        profile: Hardware profile to launch with.
        recipe: Recipe to launch.
        timeout_s: Deadline of a command; 0 leaves each command its own.
        tmux_socket: Name of the tmux socket on the pod.
        ssh_config: ssh configuration to read instead of the user's and the system's.
        color: `auto`, `always` or `never`.
    """

    state_dir: str = ""
    pod: str = ""
    profile: str = ""
    recipe: str = ""
    timeout_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    tmux_socket: str = "nsa"
    ssh_config: str = ""
    color: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True)
class Settings:
    """Resolved settings of this invocation.

    Attributes:
        values: Each setting.
        origins: Where each setting comes from.
        state_dir: Folder of the registry and the audit log.
        training_environment: NSA_* variables that configure a run, not the operator.
        login_environment: What a process on a local pod inherits from here.
        is_color_forbidden: NO_COLOR is set.
        ssh_environment: What ssh inherits from here.
        socket_dirs: Folders for the sockets of open links, the best first.
        notices: What people should know about files that were not read.
        scratch_dirs: Folders for copies that live for an instant, the best first.
    """

    values: OperatorSettings
    origins: dict[str, str]
    state_dir: Path
    training_environment: dict[str, str] = field(default_factory=dict)
    login_environment: dict[str, str] = field(default_factory=dict)
    is_color_forbidden: bool = False
    ssh_environment: dict[str, str] = field(default_factory=dict)
    socket_dirs: tuple[Path, ...] = ()
    notices: tuple[str, ...] = ()
    scratch_dirs: tuple[Path, ...] = ()


#: Settings by name, and where they come from.
Layer = tuple[str, dict[str, Any]]


def read_settings(
    environment: Mapping[str, str] | None = None, *, folder: Path | None = None
) -> Settings:
    """Settings from NSA_OPS_* variables over a trusted `nsa-ops.toml` over the user's file.

    Args:
        environment: Environment to read; this process's if None.
        folder: Folder where the project's `nsa-ops.toml` is looked for, and in its parents.

    Raises:
        SettingsError: If a file cannot be used or parsed, or a name is unknown.
    """
    found = os.environ if environment is None else environment
    user, variables = _user_layer(found), _variable_layers(found)
    own = _settings_of(found, [*user, *variables])
    project = find_project_file(folder or _current_folder(), own.state_dir)
    if project is None:
        return own
    if project.content is None:
        return replace(own, notices=(project.notice,))
    layer = parse_project(project.path, project.content)
    return _settings_of(found, [*user, (str(project.path), layer), *variables])


def parse_project(path: Path, content: bytes) -> dict[str, Any]:
    """Settings of a project's file.

    Raises:
        SettingsError: If it is not TOML, holds what a project may not decide, or no usable value.
    """
    layer = _parse_toml(path, content)
    for name in layer:
        _check_name(name, str(path))
        if name not in PROJECT_SETTINGS:
            message = (
                f"Setting `{name}` may not come from `{path}`: a project decides only "
                f"{', '.join(PROJECT_SETTINGS)}"
            )
            raise SettingsError(message)
    _validate(layer, dict.fromkeys(layer, str(path)))
    return layer


def built_in_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Defaults and the state folder alone, where the configured settings cannot be used."""
    found = os.environ if environment is None else environment
    name = f"{PREFIX}STATE_DIR"
    return _settings_of(found, [(name, {"state_dir": found[name]})] if found.get(name) else [])


def _settings_of(found: Mapping[str, str], layers: Sequence[Layer]) -> Settings:
    """Settings from layers, weakest first, and what else this environment decides."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(OperatorSettings.model_fields, "default")
    for origin, layer in layers:
        for name, value in layer.items():
            _check_name(name, origin)
            values[name], origins[name] = value, origin
    settings = _validate(values, origins)
    state_dir = _expand(settings.state_dir or _platform_state_dir(found)).absolute()
    return Settings(
        values=settings,
        origins=origins,
        state_dir=state_dir,
        training_environment=_training_environment(found),
        login_environment=_login_environment(found),
        is_color_forbidden=bool(found.get("NO_COLOR")),
        ssh_environment=_ssh_environment(found),
        socket_dirs=_socket_dirs(found, state_dir),
        scratch_dirs=_scratch_dirs(found),
    )


def _validate(values: Mapping[str, Any], origins: Mapping[str, str]) -> OperatorSettings:
    try:
        return OperatorSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        message = (
            f"Setting `{name}` from {origins[name]} cannot be used: {first['msg']}, "
            f"and it is {first['input']!r}"
        )
        raise SettingsError(message) from error


def _expand(path: str | Path) -> Path:
    try:
        return expand_home(path)
    except ConfigurationError as error:
        raise SettingsError(error.message) from error


def _user_layer(found: Mapping[str, str]) -> list[Layer]:
    """The settings file that a variable names, or the one of the user's folder if it is there."""
    named = found.get(CONFIG_VARIABLE)
    path = _expand(named or _config_home(found) / "nsa-ops" / "config.toml")
    if not named and not path.is_file():
        return []
    content, why = read_own(path, is_link_followed=True)
    if why:
        message = f"Settings file `{path}` cannot be used: {why}"
        raise SettingsError(message)
    return [(str(path), _anchored(_parse_toml(path, content), path.absolute().parent))]


def _anchored(layer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths of a settings file, relative to its folder: never to the one that somebody is in."""
    paths = {
        name: str(folder / _expand(value))
        for name, value in layer.items()
        if name in PATH_SETTINGS and isinstance(value, str) and value
    }
    return layer | paths


def _variable_layers(found: Mapping[str, str]) -> list[Layer]:
    return [
        (name, {name.removeprefix(PREFIX).lower(): value})
        for name, value in found.items()
        if name.startswith(PREFIX) and name != CONFIG_VARIABLE
    ]


def _check_name(name: str, origin: str) -> None:
    known = list(OperatorSettings.model_fields)
    if name in known:
        return
    near = get_close_matches(name, known, n=1)
    suggestion = f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(known)}"
    message = f"Unknown setting `{name}` from {origin}{suggestion}"
    raise SettingsError(message)


def _parse_toml(path: Path, content: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except RecursionError as error:
        message = f"`{path}` is not valid here: its values are nested too deep"
        raise SettingsError(message) from error
    except ValueError as error:  # also a number of more digits than Python reads
        message = f"`{path}` is not valid TOML: {error}"
        raise SettingsError(message) from error


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # somebody removed it under us
        return Path("/")


def _home(found: Mapping[str, str]) -> Path:
    """The folder that HOME names; where it is unset or empty, the one of the system's user list."""
    if named := found.get("HOME"):
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError as error:
        message = f"HOME is not set, and user {os.getuid()} has no home folder on this machine"
        raise SettingsError(message) from error


def _config_home(found: Mapping[str, str]) -> Path:
    return _folder(found, "XDG_CONFIG_HOME") or _home(found) / ".config"


def _platform_state_dir(found: Mapping[str, str]) -> Path:
    if sys.platform == "darwin":
        return _home(found) / "Library" / "Application Support" / "nsa-ops"
    return (_folder(found, "XDG_STATE_HOME") or _home(found) / ".local" / "state") / "nsa-ops"


def _folder(found: Mapping[str, str], name: str) -> Path | None:
    """The folder in a variable; a relative one counts for nothing, as its specification says."""
    value = found.get(name, "")
    return Path(value) if value.startswith("/") else None


def _training_environment(found: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in found.items()
        if (name.startswith("NSA_") and not name.startswith(PREFIX)) or name in TRAINING_NAMES
    }


def _login_environment(found: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in found.items()
        if name in LOGIN_NAMES or name.startswith(LOGIN_PREFIXES)
    }


def _ssh_environment(found: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in found.items() if name in SSH_NAMES}
    return _login_environment(found) | own


def _socket_dirs(found: Mapping[str, str], state_dir: Path) -> tuple[Path, ...]:
    """Where a socket may be: its whole path must be short, so the last one is."""
    runtime = _folder(found, "XDG_RUNTIME_DIR")
    first = [runtime / "nsa-ops"] if runtime else []
    return (*first, state_dir / "sockets", _temporary(found) / f"nsa-ops-{os.getuid()}")


def _scratch_dirs(found: Mapping[str, str]) -> tuple[Path, ...]:
    """Where a private folder may be made while the disk of the state folder is full."""
    runtime = _folder(found, "XDG_RUNTIME_DIR")
    first = [runtime] if runtime else []
    return (*first, Path("/dev/shm"), _temporary(found))  # noqa: S108 (folders of our own there)


def _temporary(found: Mapping[str, str]) -> Path:
    return _folder(found, "TMPDIR") or Path("/tmp")  # noqa: S108 (folders of our own below it)
