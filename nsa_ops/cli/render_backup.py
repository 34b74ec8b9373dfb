"""Draw what backups and reports give back."""

from collections.abc import Iterator

import typer
from rich.console import Console

from nsa_ops.backup.catalog import BackupEntry
from nsa_ops.backup.pulled import Pulled
from nsa_ops.backup.push import Pushed
from nsa_ops.backup.restore import Drilled, Restored
from nsa_ops.backup.retention import Pruned
from nsa_ops.backup.verify import Verification
from nsa_ops.cli.output import envelope
from nsa_ops.cli.render import facts, line, table
from nsa_ops.cli.session import Session
from nsa_ops.quantities import count_of, format_bytes, format_time
from nsa_ops.report.write import WrittenReport


def _steps(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if steps else "none"


def draw_pulled(console: Console, pulled: Pulled) -> None:
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


def draw_verified(console: Console, found: Verification) -> None:
    """A backup without a difference."""
    opened = f", {count_of(found.num_tensors, 'tensor')} in place" if found.num_tensors else ""
    files = count_of(found.num_files, "file")
    line(console, f"every sha256 of {files} agrees{opened}: {found.folder}")
    line(console, f"whole checkpoints: {_steps(found.steps)}")


def draw_backups(console: Console, entries: list[BackupEntry]) -> None:
    """Backups in a table."""
    if not entries:
        line(console, "no backups; pull one with `nsa-ops backup pull RUN`")
        return
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
    headings = ["RUN", "POD", "CHECKPOINTS", "SIZE", "PULLED", "VERIFIED"]
    console.print(table(headings, rows))
    for entry in entries:
        line(console, f"{entry.run_id} is in {entry.folder}")


def draw_restored(console: Console, restored: Restored) -> None:
    """Where the run now is, and how to go on."""
    files = count_of(restored.num_files, "file")
    line(console, f"{files} verified at the new place: {restored.target}")
    line(console, f"a resume continues from step {restored.step}")


def draw_drilled(console: Console, drilled: Drilled) -> None:
    """A restore that was tried."""
    what = f"{count_of(drilled.num_files, 'file')} and {count_of(drilled.num_tensors, 'tensor')}"
    line(console, f"{drilled.run_id}: {what} stood at a new place after {drilled.seconds:.0f} s")
    line(console, f"a resume would continue from step {drilled.step}; the copy is removed again")


def draw_pushed(console: Console, pushed: Pushed) -> None:
    """A second copy."""
    sent = format_bytes(pushed.sent_bytes)
    files = count_of(pushed.num_files, "file")
    line(console, f"every sha256 of {files} agrees at {pushed.destination}")
    line(console, f"checkpoints sent: {_steps(pushed.steps)}; {sent} in all")


def draw_pruned(console: Console, pruned: Pruned) -> None:
    """What went and what stayed."""
    facts(
        console,
        [
            ("in", pruned.where),
            ("checkpoints removed", _steps(pruned.removed_steps)),
            ("checkpoints kept", _steps(pruned.kept_steps)),
            ("freed", format_bytes(pruned.freed_bytes)),
        ],
    )
    if pruned.unproven_steps:
        line(console, f"no verified copy here, so it stays: {_steps(pruned.unproven_steps)}")


def draw_written(console: Console, written: WrittenReport) -> None:
    """Where the report is, and the outcome in one sentence."""
    line(console, written.outcome)
    facts(console, [("page", str(written.page)), ("markdown", str(written.markdown))])
    for missing in written.missing:
        line(console, f"missing: {missing}")


def show_pulls(session: Session, pulls: Iterator[Pulled]) -> None:
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
