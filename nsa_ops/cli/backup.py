"""`backup`: pull, verify, ls, restore, push, prune."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_ops.cli.arguments import OverrideOption, PodOption, RunArgument
from nsa_ops.cli.command import command
from nsa_ops.cli.complete import complete_run
from nsa_ops.cli.session import Session
from nsa_ops.errors import ConfigurationError

if TYPE_CHECKING:
    from nsa_ops.backup.folder import BackupFolder

backup = typer.Typer(no_args_is_help=True, help="Bring runs home whole, prove it, put them back")

BackupArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|PATH",
        help="Run id or folder; may be left out where one fits",
        autocompletion=complete_run,
    ),
]
KeepOption = Annotated[
    int | None,
    typer.Option("--keep", min=1, metavar="K", help="Keep the newest K checkpoints of the backup"),
]
KeepEveryOption = Annotated[
    int,
    typer.Option(
        "--keep-every", min=0, metavar="M", help="And every one at a multiple of step M, for good"
    ),
]
_INTERRUPTED = "what has arrived is kept, and the next pull continues there"


def register(app: typer.Typer) -> None:
    """Add the group to the root command."""
    app.add_typer(backup, name="backup")


@command(backup, "pull", path="backup", changes=True)
def pull(
    session: Session,
    run: RunArgument = None,
    dest: Annotated[
        Path | None, typer.Option("--dest", metavar="DIR", help="Folder that holds backups")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="latest|all|none|STEP", help="Which checkpoints")
    ] = "latest",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Bring each new checkpoint until the run ends")
    ] = False,
    keep: KeepOption = None,
    keep_every: KeepEveryOption = 0,
) -> None:
    """Bring a run's files and checkpoints here, verified; continues where it was cut."""
    from nsa_ops.backup.locate import backup_folder
    from nsa_ops.backup.policy import choose_policy
    from nsa_ops.backup.pull import plan_pull
    from nsa_ops.cli.render_backup import draw_pulled, show_pulls
    from nsa_ops.runs.choose import choose_record, link_of
    from nsa_ops.runs.follow_backup import PullRequest, follow_pull, pull_once

    session.interrupt_note = _INTERRUPTED
    operator, policy = session.operator, choose_policy(keep, keep_every)
    known = choose_record(operator, run)
    folder = backup_folder(operator, known.run_id, dest)
    link = link_of(operator, known)
    with operator.work("comparing the pod's files with the backup"):
        planned = plan_pull(link, known.run_id, folder, checkpoint, policy=policy)
    session.agree(planned.plan)
    asked = PullRequest(known, folder, checkpoint, policy)
    if follow:
        show_pulls(session, follow_pull(operator, link, asked))
    else:
        pulled = pull_once(operator, link, asked)
        session.show(pulled, draw_pulled, failure=pulled.failure)


@command(backup, "verify", path="backup")
def verify(
    session: Session,
    run: BackupArgument = None,
    load: Annotated[bool, typer.Option("--load", help="Also open every tensor file")] = False,
) -> None:
    """Hash every file of a backup again; exit code 9 on any difference."""
    from nsa_ops.backup.locate import find_backup
    from nsa_ops.backup.verify import check_verified, renew_receipts, verify_backup
    from nsa_ops.cli.render_backup import draw_verified

    folder = find_backup(session.operator, run)
    store, now = session.operator.store, session.operator.clock.unix_s()
    with session.operator.work("hashing the backup"):
        verification = verify_backup(folder.root, load=load, receipts=store.receipts())
    renew_receipts(store, verification, now)
    for difference in verification.differences[1:]:
        session.tell(difference.sentence)
    check_verified(verification)
    session.show(verification, draw_verified)


@command(backup, "ls", path="backup")
def ls(session: Session) -> None:
    """List the backups on this machine."""
    from nsa_ops.backup.catalog import list_backups
    from nsa_ops.cli.render_backup import draw_backups

    session.show(list_backups(session.operator), draw_backups)


@command(backup, "restore", path="backup", changes=True)
def restore(
    session: Session,
    run: BackupArgument = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Folder that gets the run directory")
    ] = None,
    pod: PodOption = None,
    drill: Annotated[
        bool, typer.Option("--drill", help="Try it in a folder that is removed again")
    ] = False,
    override: OverrideOption = None,
) -> None:
    """Put a backup back as a run directory, in a folder or on a pod; replaces nothing."""
    from nsa_ops.backup.locate import choose_target, find_backup
    from nsa_ops.backup.restore import plan_restore, restore_here, restore_to_pod
    from nsa_ops.cli.render_backup import draw_restored
    from nsa_ops.preflight.guardrails import parse_overrides
    from nsa_ops.runs.adopt import adopt_restored, plan_adoption
    from nsa_ops.runs.lease import OLD_POD

    overrides = parse_overrides(override or (), (OLD_POD,))
    folder = find_backup(session.operator, run)
    if drill:
        _drill(session, folder, to, pod)
        return
    root, link = choose_target(session.operator, to, pod)
    receipts = session.operator.store.receipts()
    planned = plan_restore(folder, root, link=link, receipts=receipts)
    if link:
        for note in plan_adoption(session.operator, link, folder, overrides).notes:
            session.tell(note)
    session.agree(planned.plan)
    tell = session.tell
    with session.operator.work("restoring"):
        restored = restore_to_pod(link, planned, tell) if link else restore_here(planned)
    if link:
        adopt_restored(session.operator, link, planned, overrides)
    session.show(restored, draw_restored)


def _drill(session: Session, folder: "BackupFolder", to: Path | None, pod: str | None) -> None:
    from nsa_ops.backup.restore import drill_restore
    from nsa_ops.cli.render_backup import draw_drilled

    if pod is not None:
        message = "A drill restores to a folder of this machine"
        raise ConfigurationError(message, hint="Leave out `--pod`; `--to DIR` names the disk")
    parent = folder.root.parent if to is None else to.expanduser().absolute()
    parent.mkdir(parents=True, exist_ok=True)
    operator = session.operator
    with operator.work("restoring and hashing"):
        drilled = drill_restore(folder, operator.store.receipts(), operator.clock, parent)
    session.show(drilled, draw_drilled)


@command(backup, "push", path="backup", changes=True)
def push(
    session: Session,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN|PATH] DEST",
            help="DEST is `POD:/folder`, or a folder of this machine",
            autocompletion=complete_run,
        ),
    ],
) -> None:
    """Copy a verified backup to another host or disk, and hash every file of it there."""
    from nsa_ops.backup.locate import check_destination_word, find_backup
    from nsa_ops.backup.push import execute_push, parse_destination, plan_push
    from nsa_ops.cli.render_backup import draw_pushed

    session.interrupt_note = "what has arrived is kept, and the next push continues there"
    if len(words) > 2:
        message = f"A push takes a run and one destination, and {len(words)} words were given"
        raise ConfigurationError(message, hint="See `nsa-ops backup push --help`")
    if len(words) == 1:
        check_destination_word(session.operator, words[0])
    folder = find_backup(session.operator, words[0] if len(words) > 1 else None)
    planned = plan_push(session.operator, folder, parse_destination(session.operator, words[-1]))
    session.agree(planned.plan)
    with session.operator.work("pushing"):
        pushed = execute_push(session.operator, planned)
    session.show(pushed, draw_pushed)


@command(backup, "prune", path="backup", changes=True)
def prune(
    session: Session,
    keep: KeepOption = None,
    run: BackupArgument = None,
    keep_every: KeepEveryOption = 0,
    on_pod: Annotated[
        bool,
        typer.Option("--on-pod", help="Remove from the pod, only what has a verified copy here"),
    ] = False,
) -> None:
    """Remove old checkpoints of a backup, or of its pod; the last verified one never goes."""
    from nsa_ops.backup.folder import read_backup_record
    from nsa_ops.backup.locate import find_backup
    from nsa_ops.backup.policy import choose_policy
    from nsa_ops.backup.retention import (
        plan_prune_here,
        plan_prune_there,
        prune_here,
        prune_there,
    )
    from nsa_ops.cli.render_backup import draw_pruned
    from nsa_ops.runs.choose import choose_record, link_of

    policy = choose_policy(keep, keep_every)
    if policy is None:
        message = "Nothing was said about what is kept"
        raise ConfigurationError(message, hint="Say `--keep K`, such as `--keep 3`")
    operator = session.operator
    folder = find_backup(operator, run)
    record = read_backup_record(folder)
    run_id = record.run_id if record else folder.root.name
    if on_pod:
        link = link_of(operator, choose_record(operator, run_id))
        planned = plan_prune_there(operator, link, run_id, folder, policy)
        session.agree(planned.plan, is_reversible=False)
        session.show(prune_there(operator, link, planned), draw_pruned)
        return
    planned = plan_prune_here(operator, folder, run_id, policy)
    session.agree(planned.plan, is_reversible=False)
    session.show(prune_here(operator, folder, planned), draw_pruned)
