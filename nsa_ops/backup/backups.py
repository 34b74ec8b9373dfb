"""The backups on this machine: list them, and find the one that RUN or PATH means."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath

from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.layout import check_run_id
from nsa_ops.backup.folder import BackupFolder, read_backup_record
from nsa_ops.backup.kept_aside import bytes_of, list_kept_aside
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import ConfigurationError, NotFoundError
from nsa_ops.local_files import expand_home
from nsa_ops.pods.known import choose_pod

BACKUPS = "backups"


def backup_folder(operator: Operator, run_id: str, dest: Path | None = None) -> BackupFolder:
    """Where the backup of a run is or will be.

    Raises:
        ConfigurationError: If the run id cannot be the name of a folder, or the destination belongs
            to the registry or to another backup.
    """
    try:
        name = check_run_id(run_id)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if dest is None:
        return BackupFolder(operator.settings.state_dir.absolute() / BACKUPS / name)
    _check_destination(expand_home(dest), operator.settings.state_dir)
    return BackupFolder(expand_home(dest).absolute() / name)


def _check_destination(dest: Path, state_dir: Path) -> None:
    """Refuse the state folder itself, and a folder inside another backup."""
    place, state = dest.resolve(), state_dir.resolve()
    inside = [place, *place.parents]
    if state in inside and state / BACKUPS not in inside:
        message = f"`--dest {dest}` is in the state folder `{state_dir}`, whose names are reserved"
        raise ConfigurationError(message, hint="Name another folder, or leave `--dest` out")
    within = next((folder for folder in inside if BackupFolder(folder).record.is_file()), None)
    if within is not None:
        message = f"`--dest {dest}` is inside the backup `{within}`"
        raise ConfigurationError(message, hint="Name another folder, or leave `--dest` out")


def find_backup(operator: Operator, text: str | None) -> BackupFolder:
    """The backup that RUN or PATH means; without either, the only one here.

    A known backup is preferred to a folder of that name; `./NAME` always means the folder.

    Raises:
        NotFoundError: If there is no such backup.
        ConfigurationError: If there are several.
    """
    if text is None:
        return _only_backup(operator)
    known = known_backups(operator)
    for folder in known:
        if folder.root.name == text:
            return folder
    path = expand_home(text)
    if path.is_dir():
        return BackupFolder(path.absolute())
    near = get_close_matches(text, [folder.root.name for folder in known], n=1)
    meant = f"; did you mean `{near[0]}`?" if near else ""
    message = f"`{text}` is neither a folder nor a known backup{meant}"
    raise NotFoundError(message, hint="See `nsa-ops backup ls` and `nsa-ops run ls`")


def _only_backup(operator: Operator) -> BackupFolder:
    known = known_backups(operator)
    if len(known) == 1:
        return known[0]
    if not known:
        message = "There is no backup here"
        raise NotFoundError(message, hint="Pull one with `nsa-ops backup pull`")
    names = ", ".join(folder.root.name for folder in known[:4])
    message = f"{len(known)} backups are here; name one: {names}"
    raise ConfigurationError(message, hint="See `nsa-ops backup ls`")


def check_destination_word(operator: Operator, word: str) -> None:
    """Raise ConfigurationError if the only word of a push names a backup and no destination."""
    if word in {folder.root.name for folder in known_backups(operator)}:
        message = f"`{word}` is a backup, and no destination was given"
        hint = f"Use `nsa-ops backup push {word} DEST`; a folder of that name here is `./{word}`"
        raise ConfigurationError(message, hint=hint)


def known_backups(operator: Operator) -> list[BackupFolder]:
    """Backups in the state folder and in the folders that receipts name, sorted by name."""
    default = operator.settings.state_dir / BACKUPS
    found = {path for path in default.iterdir() if path.is_dir()} if default.is_dir() else set()
    # A receipt names checkpoints/step_N inside the backup.
    found |= {Path(receipt.path).parent.parent for receipt in operator.store.receipts()}
    return [BackupFolder(path) for path in sorted(found) if path.is_dir()]


def choose_target(
    operator: Operator, to: Path | None, pod: str | None
) -> tuple[PurePosixPath, PodLink | None]:
    """Where a restore puts the run: the runs folder of a pod, or a folder of this machine.

    Raises:
        ConfigurationError: If both or neither are named.
    """
    if (to is None) == (pod is None):
        message = "A restore needs either `--to DIR` or `--pod POD`"
        raise ConfigurationError(message, hint="See `nsa-ops backup restore --help`")
    if to is not None:
        return PurePosixPath(expand_home(to).absolute()), None
    link = operator.link(choose_pod(operator.store, pod))
    return link.runs, link


@dataclass(frozen=True)
class BackupEntry:
    """One backup as `backup ls` shows it; nothing is hashed.

    Attributes:
        pod: Pod it came from; empty if no pull was finished.
        steps: Steps of its checkpoints, newest first.
        total_bytes: Size of those checkpoints.
        aside_bytes: Size of what pulls have kept aside.
        pulled_unix_s: When the last pull ended; None if none did.
        verified_unix_s: When the newest checkpoint's hashes last agreed; None without a receipt.
    """

    run_id: str
    folder: Path
    pod: str
    steps: list[int]
    total_bytes: int
    aside_bytes: int
    pulled_unix_s: float | None
    verified_unix_s: float | None


def list_backups(operator: Operator) -> list[BackupEntry]:
    """All backups that this laptop knows of."""
    return [_entry(operator, folder) for folder in known_backups(operator)]


def _entry(operator: Operator, folder: BackupFolder) -> BackupEntry:
    checkpoints = list_checkpoints(folder.run)
    record = read_backup_record(folder)
    run_id = record.run_id if record else folder.root.name
    verified = {one.path: one.verified_unix_s for one in operator.store.receipts(run_id)}
    return BackupEntry(
        run_id=run_id,
        folder=folder.root,
        pod=record.pod if record else "",
        steps=[one.step for one in checkpoints],
        total_bytes=sum(one.manifest.total_bytes for one in checkpoints),
        aside_bytes=bytes_of(list_kept_aside(folder)),
        pulled_unix_s=record.pulled_unix_s if record else None,
        verified_unix_s=verified.get(str(checkpoints[0].path)) if checkpoints else None,
    )
