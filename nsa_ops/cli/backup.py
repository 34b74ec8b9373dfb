"""`backup`: pull, verify, ls, restore."""

from pathlib import Path
from typing import Annotated

import typer

from nsa_ops.cli.arguments import PodOption, RunArgument
from nsa_ops.cli.command import command
from nsa_ops.cli.session import Session

backup = typer.Typer(no_args_is_help=True, help="Bring runs home whole, prove it, put them back")

BackupArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN|PATH", help="Run id or folder; may be left out where one fits"),
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
) -> None:
    """Bring a run's files and checkpoints here, verified; continues where it was cut."""
    from nsa_ops.cli.render_backup import draw_pulled
    from nsa_ops.runs.backup.locate import backup_folder
    from nsa_ops.runs.backup.pull import execute_pull, plan_pull
    from nsa_ops.runs.choose import choose_record, link_of

    session.interrupt_note = _INTERRUPTED
    known = choose_record(session.operator, run)
    folder = backup_folder(session.operator, known.run_id, dest)
    link = link_of(session.operator, known)
    planned = plan_pull(link, known.run_id, folder, checkpoint)
    session.agree(planned.plan)
    session.show(execute_pull(session.operator, link, planned), draw_pulled)


@command(backup, "verify", path="backup")
def verify(
    session: Session,
    run: BackupArgument = None,
    load: Annotated[bool, typer.Option("--load", help="Also open every tensor file")] = False,
) -> None:
    """Hash every file of a backup again; exit code 9 on any difference."""
    from nsa_ops.cli.render_backup import draw_verified
    from nsa_ops.runs.backup.locate import find_backup
    from nsa_ops.runs.backup.verify import check_verified, renew_receipts, verify_backup

    folder = find_backup(session.operator, run)
    store, now = session.operator.store, session.operator.clock.unix_s()
    verification = verify_backup(folder.root, load=load, receipts=store.receipts())
    renew_receipts(store, verification, now)
    for difference in verification.differences[1:]:
        session.tell(difference.sentence)
    check_verified(verification)
    session.show(verification, draw_verified)


@command(backup, "ls", path="backup")
def ls(session: Session) -> None:
    """List the backups on this machine."""
    from nsa_ops.cli.render_backup import draw_backups
    from nsa_ops.runs.backup.catalog import list_backups

    session.show(list_backups(session.operator), draw_backups)


@command(backup, "restore", path="backup", changes=True)
def restore(
    session: Session,
    run: BackupArgument = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Folder that gets the run directory")
    ] = None,
    pod: PodOption = None,
) -> None:
    """Put a backup back as a run directory, in a folder or on a pod; replaces nothing."""
    from nsa_ops.cli.render_backup import draw_restored
    from nsa_ops.runs.backup.adopt import adopt_run
    from nsa_ops.runs.backup.locate import choose_target, find_backup
    from nsa_ops.runs.backup.restore import plan_restore, restore_here, restore_to_pod

    folder = find_backup(session.operator, run)
    root, link = choose_target(session.operator, to, pod)
    receipts = session.operator.store.receipts()
    planned = plan_restore(folder, root, link=link, receipts=receipts)
    session.agree(planned.plan)
    tell = session.tell
    restored = restore_to_pod(link, planned, tell) if link else restore_here(planned)
    if link:
        adopt_run(session.operator, link, planned)
    session.show(restored, draw_restored)
