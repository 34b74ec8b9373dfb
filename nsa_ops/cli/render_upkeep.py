"""Draw the audit log, and what became of acts that were cut off."""

from rich.console import Console

from nsa_ops.cli.render import line, table
from nsa_ops.laptop.audit_log import AuditView
from nsa_ops.quantities import count_of, format_time
from nsa_ops.runs.reconcile import Settled


def draw_audit(console: Console, view: AuditView) -> None:
    """Entries in a table, then the state of the chain."""
    if not view.num_lines and not view.missing:
        line(console, f"no command was run on a pod yet: {view.path}")
        return
    rows = [
        (one.line, format_time(one.at), one.pod, one.call, one.what, one.outcome, one.seconds)
        for one in view.entries
    ]
    if rows:
        headings = ["LINE", "WHEN", "POD", "CALL", "WHAT", "OUTCOME", "SECONDS"]
        console.print(table(headings, rows))
    if view.num_cut_off:
        line(console, f"cut off, without an end: {view.num_cut_off}; see `--failed --last 0`")
    whole = "whole" if view.is_whole else "broken" if view.broken_line else "incomplete"
    entries = count_of(view.num_entries, "entry", "entries")
    line(console, f"{len(rows)} of {entries}; the chain of hashes is {whole}")


def draw_settled(console: Console, settled: list[Settled]) -> None:
    """One line an act."""
    if not settled:
        line(console, "nothing was cut off")
        return
    rows = [
        (one.number, one.act, one.subject, format_time(one.began_unix_s), one.way, one.found)
        for one in settled
    ]
    console.print(table(["INTENT", "ACT", "SUBJECT", "BEGUN", "NOW", "FOUND"], rows))
