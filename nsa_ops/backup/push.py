"""Push: a second copy of a verified backup, on another host or another disk, hashed there again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nsa_core.rundir.checkpoint import hash_file
from nsa_ops.backup.disk import ask, check_copies, check_space_there, send_file, send_folder
from nsa_ops.backup.folder import RECORD_NAME, BackupFolder, read_backup_record
from nsa_ops.backup.restore import files_of, run_id_of
from nsa_ops.backup.verification import check_verified, verify_backup
from nsa_ops.context import Operator
from nsa_ops.errors import ConfigurationError, NotFoundError
from nsa_ops.local_files import expand_home
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pods.known import choose_pod
from nsa_ops.quantities import count_of, format_bytes
from nsa_ops.remote.files import list_files
from nsa_ops.remote.inbound import check_folder
from nsa_ops.remote.local import LocalTransport
from nsa_ops.remote.transport import Transport

_CHECKPOINTS = "checkpoints"
_PUSHING = ".pushing_"
# A checkpoint gets its name when it is whole; an earlier folder of that name gets another one.
_PLACE = """
cd -- "$1" || exit 1
if [ -e "$3" ]; then
  n=0
  while [ -e "replaced_$3_$n" ]; do n=$((n + 1)); done
  mv -T -- "$3" "replaced_$3_$n" || exit 1
fi
mv -T -n -- "$2" "$3" && [ ! -e "$2" ]
"""


@dataclass(frozen=True)
class Destination:
    """Where a second copy goes: `root` holds backups, and `words` is what the operator typed."""

    transport: Transport
    root: PurePosixPath
    words: str


@dataclass(frozen=True)
class PushPlan:
    """What a push will send.

    Attributes:
        files: All files of the copy, relative to the backup.
        small: Files outside checkpoints/ that are missing in the copy or differ.
        checkpoints: Folders of checkpoints that are missing in the copy or differ.
        pending_bytes: Bytes to send.
    """

    run_id: str
    folder: BackupFolder
    destination: Destination
    files: list[PurePosixPath]
    small: list[PurePosixPath]
    checkpoints: list[PurePosixPath]
    pending_bytes: int
    plan: Plan

    @property
    def target(self) -> PurePosixPath:
        """Folder of the copy."""
        return self.destination.root / self.run_id


@dataclass(frozen=True)
class Pushed:
    """A second copy, every file of it hashed where it now is; `steps` were sent."""

    run_id: str
    destination: str
    num_files: int
    sent_bytes: int
    steps: list[int]


def parse_destination(operator: Operator, text: str) -> Destination:
    """`POD:/folder` on a machine whose key is pinned, or a folder of this machine.

    Raises:
        ConfigurationError: If the folder on a pod is not absolute.
        NotFoundError: If there is no such pod.
    """
    name, colon, path = text.partition(":")
    if not colon or "/" in name:
        root = expand_home(text).absolute()
        transport = LocalTransport(operator.settings.login_environment)
        return Destination(transport, PurePosixPath(root), text)
    if operator.store.find_pod(name) is None:
        message = f"There is no pod `{name}` to push to"
        hint = f"Pin its host key first: `nsa-ops pod add {name.rpartition('@')[2]} USER@HOST`"
        raise NotFoundError(message, hint=hint)
    if not path.startswith("/"):
        message = f"The folder `{path}` on pod `{name}` is not absolute"
        raise ConfigurationError(message, hint=f"Write `{name}:/folder/for/backups`")
    link = operator.link(choose_pod(operator.store, name))
    return Destination(link.transport, PurePosixPath(path), text)


def plan_push(operator: Operator, folder: BackupFolder, to: Destination) -> PushPlan:
    """Verify the backup, list the far side with its hashes, and say what would be sent.

    Raises:
        VerificationError: If the backup is damaged.
        NotFoundError: If there is nothing to push.
        ConfigurationError: If the destination is the backup itself.
    """
    record = read_backup_record(folder)
    run_id = run_id_of(folder)
    target = to.root / run_id
    if isinstance(to.transport, LocalTransport) and Path(target) == folder.root:
        message = f"`{target}` is the backup itself"
        raise ConfigurationError(message, hint="Name a folder on another disk or host")
    verification = verify_backup(folder.root, load=True, receipts=operator.store.receipts())
    check_verified(verification)
    files = files_of(folder, verification)
    if record is not None:
        files.append(PurePosixPath(RECORD_NAME))
    there = _list_there(to.transport, target)
    missing = [file for file in files if there.get(str(file)) != hash_file(folder.root / file)]
    checkpoints = sorted({file.parent for file in missing if file.parts[0] == _CHECKPOINTS})
    small = [file for file in missing if file.parts[0] != _CHECKPOINTS]
    large = [file for file in files if file.parent in checkpoints]
    pending = sum((folder.root / file).stat().st_size for file in [*small, *large])
    plan = _describe(run_id, target, to, small, checkpoints, pending)
    return PushPlan(run_id, folder, to, files, small, checkpoints, pending, plan)


def _list_there(transport: Transport, target: PurePosixPath) -> dict[str, str]:
    """Hashes of the files that the copy has already, by name."""
    try:
        return {file.name: file.sha256 for file in list_files(transport, target).files}
    except NotFoundError:
        return {}


def _describe(
    run_id: str,
    target: PurePosixPath,
    to: Destination,
    small: Sequence[PurePosixPath],
    checkpoints: Sequence[PurePosixPath],
    pending_bytes: int,
) -> Plan:
    names = tuple(map(str, small))
    steps = [Step("files", f"send {count_of(len(small), 'file')}", files=names, is_done=not small)]
    steps += [Step(folder.name, f"send it whole to `{target / folder}`") for folder in checkpoints]
    title = f"Push `{run_id}` to {to.words}: {format_bytes(pending_bytes)}"
    return plan_of(title, steps)


def execute_push(operator: Operator, planned: PushPlan) -> Pushed:
    """Send what is missing, each checkpoint whole before it gets its name; then hash it all there.

    Raises:
        LocalResourceError: If the far disk has no room.
        VerificationError: If anything there does not have its hash.
        PodUnreachableError, DeadlineError: If the link was lost; the next push continues.
    """
    to, folder, target = planned.destination, planned.folder, planned.target
    check_space_there(to.transport, target, planned.pending_bytes)
    intent = operator.store.intent("backup push", planned.run_id, destination=to.words)
    with intent, folder.locked():
        ask(to.transport, "mkdir", "-p", "--", str(target / _CHECKPOINTS))
        for checkpoint in planned.checkpoints:
            operator.tell(f"sending `{checkpoint.name}`")
            _send_checkpoint(operator, planned, checkpoint)
        folders = {str(target / file.parent) for file in planned.small}
        if folders:
            ask(to.transport, "mkdir", "-p", "--", *sorted(folders))
        for file in planned.small:
            send_file(to.transport, folder.root, str(file), target)
        _compare(to.transport, folder.root, list(map(str, planned.files)), target)
    steps = sorted(int(one.name.rpartition("_")[2]) for one in planned.checkpoints)
    return Pushed(planned.run_id, to.words, len(planned.files), planned.pending_bytes, steps)


def _send_checkpoint(operator: Operator, planned: PushPlan, checkpoint: PurePosixPath) -> None:
    """Collect beside the final name, compare, and rename."""
    transport, source = planned.destination.transport, planned.folder.root / checkpoint
    parent = planned.target / _CHECKPOINTS
    pushing = parent / f"{_PUSHING}{checkpoint.name}"
    check_folder(planned.folder.root, str(checkpoint))
    names = [file.name for file in planned.files if file.parent == checkpoint]
    send_folder(transport, source, pushing, names, operator.tell)
    _compare(transport, source, names, pushing)
    ask(transport, "sh", "-c", _PLACE, "sh", str(parent), pushing.name, checkpoint.name)


def _compare(
    transport: Transport, source: Path, names: Sequence[str], target: PurePosixPath
) -> None:
    there = {file.name: file.sha256 for file in list_files(transport, target).files}
    check_copies(transport, there, source, target, names)
