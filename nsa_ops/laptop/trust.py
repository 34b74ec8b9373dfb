"""Trust a project's settings file by its content, see what is trusted, and forget it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from nsa_ops.errors import ConfigurationError, NotFoundError, RefusedError
from nsa_ops.local_files import make_private_folder
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.project_file import (
    PROJECT_FILE,
    Trusted,
    find_project_file,
    read_own,
    read_trusted,
    write_trusted,
)
from nsa_ops.settings import Settings, SettingsError, parse_project


@dataclass(frozen=True)
class TrustedFile:
    """A project file that is trusted."""

    path: str
    sha256: str  # of the content that was trusted
    state: str  # `read`, or why it is not


@dataclass(frozen=True)
class TrustPlan:
    """What is to be trusted or forgotten."""

    path: Path
    sha256: str  # of its content; empty to forget it
    plan: Plan  # what is done, for people


def plan_trust_file(settings: Settings, file: Path | None, *, is_forgotten: bool) -> TrustPlan:
    """What trusting a file means: each value that it would set.

    Raises:
        NotFoundError: If there is no such file, or it is not trusted and to be forgotten.
        RefusedError: If others can change it.
        ConfigurationError: If it holds what a project may not decide.
    """
    path = _locate(settings, file)
    if path.name != PROJECT_FILE:
        message = f"`{path}` is never read: a project's file is named `{PROJECT_FILE}`"
        raise ConfigurationError(message, hint="Or name it in the variable `NSA_OPS_CONFIG`")
    known = read_trusted(settings.state_dir).files.get(str(path), "")
    if is_forgotten:
        return _plan_forget(path, known)
    content, why = read_own(path)
    if why:
        message = f"`{path}` cannot be trusted: {why}"
        raise RefusedError(message, hint="Copy it to a folder of your own, and see what it holds")
    try:
        values = parse_project(path, content)
    except SettingsError as error:
        raise ConfigurationError(str(error), hint="See docs/variables.md") from error
    sha256 = hashlib.sha256(content).hexdigest()
    words = ", ".join(f"{name} = {value!r}" for name, value in values.items()) or "nothing"
    step = Step("trust", f"`{path}` (sha256 {sha256}) sets {words}", is_done=known == sha256)
    return TrustPlan(path, sha256, plan_of(f"Trust `{path}` as it is now", [step]))


def _plan_forget(path: Path, known: str) -> TrustPlan:
    if not known:
        message = f"`{path}` is not trusted"
        raise NotFoundError(message, hint="See `nsa-ops config trusted`")
    step = Step("forget", f"`{path}` is not read any more")
    return TrustPlan(path, "", plan_of(f"Trust `{path}` no longer", [step]))


def _locate(settings: Settings, file: Path | None) -> Path:
    """The named file, or the nearest one; its folder without links, as the shell's folder is."""
    if file is not None:
        return file.parent.resolve() / file.name
    found = find_project_file(Path.cwd(), settings.state_dir)
    if found is None:
        message = f"There is no `{PROJECT_FILE}` in this folder or its parents"
        raise NotFoundError(message, hint="Name it: `nsa-ops config trust FILE`")
    return found.path


def execute_trust_file(settings: Settings, planned: TrustPlan) -> list[TrustedFile]:
    """Keep or forget the hash of a file; all that are trusted then."""
    files = dict(read_trusted(settings.state_dir).files)
    files.pop(str(planned.path), None)
    if planned.sha256:
        files[str(planned.path)] = planned.sha256
    make_private_folder(settings.state_dir)
    write_trusted(settings.state_dir, Trusted(files=files))
    return list_trusted(settings)


def list_trusted(settings: Settings) -> list[TrustedFile]:
    """Every file that is trusted, by path."""
    files = read_trusted(settings.state_dir).files
    return [TrustedFile(path, sha256, _state(path, sha256)) for path, sha256 in files.items()]


def _state(path: str, sha256: str) -> str:
    content, why = read_own(Path(path))
    if not why and hashlib.sha256(content).hexdigest() != sha256:
        why = "it has changed since it was trusted"
    return f"not read: {why}" if why else "read"
