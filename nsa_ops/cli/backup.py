"""The `backup` commands: pull, verify, ls, restore, push, prune."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_ops.cli.arguments import (
    BackupArgument,
    OverrideOption,
    PodOption,
    RunArgument,
    complete_run,
)
from nsa_ops.cli.command import command
from nsa_ops.cli.console import draw_table, envelope, facts, line
from nsa_ops.cli.session import Session
from nsa_ops.errors import ConfigurationError
from nsa_ops.quantities import count_of, format_bytes, format_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from nsa_ops.backup.backups import BackupEntry
    from nsa_ops.backup.folder import BackupFolder
    from nsa_ops.backup.kept_aside import KeptAside
    from nsa_ops.backup.push import Pushed
    from nsa_ops.backup.restore import Drilled, Restored
    from nsa_ops.backup.retention import Pruned
    from nsa_ops.backup.transfer import Pulled
    from nsa_ops.backup.verification import Verification

backup_group = typer.Typer(
    name="backup",
    no_args_is_help=True,
    help="Copy runs to this laptop, verify the copies, and restore them.",
)

KeepOption = Annotated[
    int | None,
    typer.Option("--keep", min=1, metavar="K", help="Keep only the newest K checkpoints"),
]
KeepEveryOption = Annotated[
    int,
    typer.Option(
        "--keep-every",
        min=0,
        metavar="M",
        help="Also keep every checkpoint whose step is a multiple of M",
    ),
]
_INTERRUPTED = "what has arrived is kept, and the next pull continues there"


@command(backup_group, "pull", changes=True)
def pull(
    session: Session,
    run: RunArgument = None,
    dest: Annotated[
        Path | None, typer.Option("--dest", metavar="DIR", help="Folder that holds backups")
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option("--checkpoint", metavar="latest|all|none|STEP", help="Checkpoints to copy"),
    ] = "latest",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Copy each new checkpoint until the run ends")
    ] = False,
    keep: KeepOption = None,
    keep_every: KeepEveryOption = 0,
) -> None:
    """Copy a run's files and checkpoints to this laptop and verify them; resumes a partial copy."""
    from nsa_ops.backup.backups import backup_folder
    from nsa_ops.backup.pull import plan_pull
    from nsa_ops.backup.retention import choose_policy
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


@command(backup_group, "verify")
def verify(
    session: Session,
    run: BackupArgument = None,
    load: Annotated[bool, typer.Option("--load", help="Also open every tensor file")] = False,
) -> None:
    """Hash every file of a backup again; exit code 9 if any differs."""
    from nsa_ops.backup.backups import find_backup
    from nsa_ops.backup.verification import check_verified, renew_receipts, verify_backup

    folder = find_backup(session.operator, run)
    store, now = session.operator.store, session.operator.clock.unix_s()
    with session.operator.work("hashing the backup"):
        verification = verify_backup(folder.root, load=load, receipts=store.receipts())
    renew_receipts(store, verification, now)
    for difference in verification.differences[1:]:
        session.tell(difference.sentence)
    check_verified(verification)
    session.show(verification, draw_verified)


@command(backup_group, "ls")
def ls(session: Session) -> None:
    """List the backups on this machine."""
    from nsa_ops.backup.backups import list_backups

    session.show(list_backups(session.operator), draw_backups)


@command(backup_group, "restore", changes=True)
def restore(
    session: Session,
    run: BackupArgument = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="Folder in which the run directory is restored"),
    ] = None,
    pod: PodOption = None,
    drill: Annotated[
        bool, typer.Option("--drill", help="Only test a restore, in a temporary folder")
    ] = False,
    override: OverrideOption = None,
) -> None:
    """Restore a backup as a run directory, in a folder or on a pod; replaces nothing."""
    from nsa_ops.backup.backups import choose_target, find_backup
    from nsa_ops.backup.restore import plan_restore, restore_here, restore_to_pod
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
    from nsa_ops.local_files import expand_home

    if pod is not None:
        message = "A drill restores to a folder of this machine, not to a pod"
        raise ConfigurationError(message, hint="Leave out `--pod`; `--to DIR` names the disk")
    parent = folder.root.parent if to is None else expand_home(to).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    operator = session.operator
    with operator.work("restoring and hashing"):
        drilled = drill_restore(folder, operator.store.receipts(), operator.clock, parent)
    session.show(drilled, draw_drilled)


@command(backup_group, "push", changes=True)
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
    """Copy a verified backup to another host or disk, and verify every file there."""
    from nsa_ops.backup.backups import check_destination_word, find_backup
    from nsa_ops.backup.push import execute_push, parse_destination, plan_push

    session.interrupt_note = "what has arrived is kept, and the next push continues there"
    if len(words) > 2:
        message = f"A push takes a run and one destination, but {len(words)} arguments were given"
        raise ConfigurationError(message, hint="See `nsa-ops backup push --help`")
    if len(words) == 1:
        check_destination_word(session.operator, words[0])
    folder = find_backup(session.operator, words[0] if len(words) > 1 else None)
    planned = plan_push(session.operator, folder, parse_destination(session.operator, words[-1]))
    session.agree(planned.plan)
    with session.operator.work("pushing"):
        pushed = execute_push(session.operator, planned)
    session.show(pushed, draw_pushed)


@command(backup_group, "prune", changes=True)
def prune(
    session: Session,
    keep: KeepOption = None,
    run: BackupArgument = None,
    keep_every: KeepEveryOption = 0,
    on_pod: Annotated[
        bool,
        typer.Option(
            "--on-pod", help="Remove from the pod; only checkpoints with a verified copy here"
        ),
    ] = False,
    aside: Annotated[
        bool,
        typer.Option(
            "--aside", help="Also remove what pulls kept aside: abandoned, conflicting, damaged"
        ),
    ] = False,
) -> None:
    """Remove old checkpoints of a backup or of its pod; always keeps the last verified one."""
    from nsa_ops.backup.backups import find_backup
    from nsa_ops.backup.folder import read_backup_record
    from nsa_ops.backup.retention import (
        choose_policy,
        plan_prune_here,
        plan_prune_there,
        prune_here,
        prune_there,
    )
    from nsa_ops.runs.choose import choose_record, link_of

    policy = choose_policy(keep, keep_every)
    if policy is None and (on_pod or not aside):
        message = "`backup prune` needs to know how many checkpoints to keep"
        raise ConfigurationError(message, hint="Add `--keep K`, such as `--keep 3`")
    if on_pod and aside:
        message = "`--aside` is about a backup on this machine, and `--on-pod` about its pod"
        raise ConfigurationError(message, hint="Leave one of the two out")
    operator = session.operator
    folder = find_backup(operator, run)
    record = read_backup_record(folder)
    run_id = record.run_id if record else folder.root.name
    if on_pod and policy is not None:
        link = link_of(operator, choose_record(operator, run_id))
        planned = plan_prune_there(operator, link, run_id, folder, policy)
        session.agree(planned.plan, is_reversible=False)
        session.show(prune_there(operator, link, planned), draw_pruned)
        return
    planned = plan_prune_here(operator, folder, run_id, policy, aside=aside)
    session.agree(planned.plan, is_reversible=False)
    session.show(prune_here(operator, folder, planned), draw_pruned)


def show_pulls(session: Session, pulls: "Iterator[Pulled]") -> None:
    """A JSON line for each pull with `--json`, else a message each and the last one drawn."""
    last = None
    for pulled in pulls:
        if session.options.json:
            typer.echo(envelope(session.command, pulled))
        elif pulled.pulled_steps:
            steps = ", ".join(map(str, pulled.pulled_steps))
            session.tell(f"here and verified: step {steps}; {pulled.at_risk.sentence}")
        last = pulled
    if last is not None and not session.options.json:
        draw_pulled(session.console, last)


def draw_pulled(console: "Console", pulled: "Pulled") -> None:
    """What a pull brought."""
    newest = pulled.newest_step
    facts(
        console,
        [
            ("run", pulled.run_id),
            ("backup", str(pulled.folder)),
            ("files brought", pulled.num_files),
            ("checkpoints brought", _steps(pulled.pulled_steps)),
            ("checkpoints already here", _steps(pulled.present_steps)),
            (
                "newest whole",
                "none" if newest is None else f"step {newest}",
            ),
            ("transferred", format_bytes(pulled.num_bytes)),
        ],
    )
    line(console, pulled.at_risk.sentence)


def draw_verified(console: "Console", found: "Verification") -> None:
    """A backup without a difference."""
    opened = f", {count_of(found.num_tensors, 'tensor')} in place" if found.num_tensors else ""
    files = count_of(found.num_files, "file")
    line(console, f"every sha256 of {files} agrees{opened}: {found.folder}")
    line(console, f"whole checkpoints: {_steps(found.steps)}")
    _draw_aside(console, found.kept_aside)


def draw_backups(console: "Console", entries: "list[BackupEntry]") -> None:
    """Backups in a table."""
    if not entries:
        line(console, "no backups; pull one with `nsa-ops backup pull RUN`")
        return
    headings = ["RUN", "POD", "STEPS", "SIZE", "PULLED", "VERIFIED"]
    rows = [
        (
            entry.run_id,
            entry.pod or "-",
            _steps(entry.steps),
            format_bytes(entry.total_bytes),
            "never finished" if entry.pulled_unix_s is None else format_time(entry.pulled_unix_s),
            "never" if entry.verified_unix_s is None else format_time(entry.verified_unix_s),
        )
        for entry in entries
    ]
    draw_table(console, headings, rows, never_folded=0)
    for entry in entries:
        aside = f"; {format_bytes(entry.aside_bytes)} is kept aside" if entry.aside_bytes else ""
        line(console, f"{entry.run_id} is in {entry.folder}{aside}")


def draw_restored(console: "Console", restored: "Restored") -> None:
    """Where the run now is, and how to go on."""
    files = count_of(restored.num_files, "file")
    line(console, f"{files} verified at the new place: {restored.target}")
    line(console, f"a resume continues from step {restored.step}")


def draw_drilled(console: "Console", drilled: "Drilled") -> None:
    """A restore drill."""
    what = f"{count_of(drilled.num_files, 'file')} and {count_of(drilled.num_tensors, 'tensor')}"
    line(console, f"{drilled.run_id}: {what} restored and verified in {drilled.seconds:.0f} s")
    line(console, f"a resume would continue from step {drilled.step}; the restored copy is removed")


def draw_pushed(console: "Console", pushed: "Pushed") -> None:
    """A second copy."""
    sent = format_bytes(pushed.sent_bytes)
    files = count_of(pushed.num_files, "file")
    line(console, f"every sha256 of {files} agrees at {pushed.destination}")
    line(console, f"checkpoints sent: {_steps(pushed.steps)}; {sent} in all")


def draw_pruned(console: "Console", pruned: "Pruned") -> None:
    """What went and what stayed."""
    facts(
        console,
        [
            ("in", pruned.where),
            ("checkpoints removed", _steps(pruned.removed_steps)),
            ("checkpoints kept", _steps(pruned.kept_steps)),
            ("kept aside, removed", ", ".join(one.name for one in pruned.removed_aside)),
            ("freed", format_bytes(pruned.freed_bytes)),
        ],
    )
    if pruned.unproven_steps:
        line(console, f"no verified copy here, so it stays: {_steps(pruned.unproven_steps)}")
    _draw_aside(console, pruned.kept_aside)


def _draw_aside(console: "Console", kept: "list[KeptAside]") -> None:
    """What pulls have kept aside, each with its size, and how it goes."""
    for one in kept:
        line(console, f"kept aside: {one.words}")
    if kept:
        line(console, "`nsa-ops backup prune --aside` removes what is kept aside")


def _steps(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if steps else "none"
