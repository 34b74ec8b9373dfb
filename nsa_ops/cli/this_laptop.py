"""Commands about this laptop: `doctor`, `audit`, `reconcile`, and the `demo` that runs on it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_ops.cli.arguments import complete_pod
from nsa_ops.cli.command import command
from nsa_ops.cli.console import draw_checks, draw_table, facts, line
from nsa_ops.cli.session import Session
from nsa_ops.errors import ConfigurationError
from nsa_ops.printable import printable_brief
from nsa_ops.quantities import count_of, format_duration, format_time, shorten_middle

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_ops.demo import Demo
    from nsa_ops.laptop.audit_log import AuditEntry, AuditView
    from nsa_ops.laptop.laptop_checks import Examined
    from nsa_ops.runs.reconcile import Settled

commands = typer.Typer()
_SAMPLE_LINES = 8


@command(commands, "audit")
def audit(
    session: Session,
    pod: Annotated[
        str,
        typer.Option(
            "--pod", metavar="POD", help="Only calls to this pod", autocompletion=complete_pod
        ),
    ] = "",
    call: Annotated[
        str,
        typer.Option(
            "--call", metavar="run|put|get|stream|tail|rsync", help="Only calls of this kind"
        ),
    ] = "",
    text: Annotated[
        str, typer.Option("--text", metavar="TEXT", help="Only calls that contain this text")
    ] = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only calls that failed")] = False,
    last: Annotated[
        int, typer.Option("--last", min=0, metavar="N", help="Only the newest N calls; 0 shows all")
    ] = 20,
) -> None:
    """Show the log of all calls to pods and check that it is complete; exit code 9 if it is not."""
    from nsa_ops.context import AUDIT_NAME, audit_log
    from nsa_ops.laptop.audit_log import AuditQuery, is_pod_unseen, read_audit, refusal_of
    from nsa_ops.pods.known import choose_pod

    session.close_state(session.settings)
    path = session.settings.state_dir / AUDIT_NAME
    head = audit_log(session.settings).head
    view = read_audit(path, AuditQuery(pod, call, text, failed, last), head)
    if not view.entries and is_pod_unseen(path, pod):
        choose_pod(session.operator.store, pod)  # refuses a name that is no pod's
    session.show(view, draw_audit, failure=refusal_of(view))


def draw_audit(console: "Console", view: "AuditView") -> None:
    """Entries in a table, then the state of the chain of hashes."""
    if not view.num_lines and not view.missing:
        line(console, f"no command was run on a pod yet: {view.path}")
        return
    if console.soft_wrap:
        headings = ["LINE", "WHEN", "POD", "CALL", "SECONDS", "OUTCOME: WHAT"]
        rows = [
            (one.line, format_time(one.at), one.pod, one.call, one.seconds, one.outcome_first)
            for one in view.entries
        ]
        draw_table(console, headings, rows)
    else:
        _draw_entries(console, view.entries)
    if view.num_cut_off:
        line(console, f"interrupted, end unknown: {view.num_cut_off}; see `--failed --last 0`")
    whole = "whole" if view.is_whole else "broken" if view.broken_line else "incomplete"
    entries = count_of(view.num_entries, "entry", "entries")
    line(console, f"{len(view.entries)} of {entries}; the chain of hashes is {whole}")


def _draw_entries(console: "Console", entries: "list[AuditEntry]") -> None:
    """Two lines an entry: how it went, and what was done, from which the middle may be left out."""
    width = max((len(str(one.line)) for one in entries), default=0)
    for one in entries:
        when, took = format_time(one.at), format_duration(one.seconds)
        line(
            console,
            f"{one.line:>{width}}  {when}  {one.pod}  {one.call} of {took}: {one.outcome}",
        )
        what = shorten_middle(printable_brief(one.command), console.width - width - 2)
        line(console, f"{'':{width}}  {what}")


@command(commands, "reconcile", changes=True)
def reconcile(session: Session) -> None:
    """Finish or roll back commands that were interrupted, after asking their pods."""
    from nsa_ops.runs.reconcile import execute_reconcile, plan_reconcile, unsettled

    planned = plan_reconcile(session.operator)
    session.agree(planned.plan)
    session.interrupt_note = "repeat it: nothing is settled twice"
    settled = execute_reconcile(session.operator, planned)
    session.show(settled, draw_settled, failure=unsettled(settled))


def draw_settled(console: "Console", settled: "list[Settled]") -> None:
    """One line for each command that was interrupted."""
    if not settled:
        line(console, "no command was interrupted")
        return
    rows = [
        (one.number, one.act, one.subject, format_time(one.began_unix_s), one.way, one.found)
        for one in settled
    ]
    draw_table(console, ["INTENT", "ACT", "SUBJECT", "BEGUN", "NOW", "FOUND"], rows)


@command(commands, "doctor", is_without_settings=True)
def doctor(session: Session) -> None:
    """Check this laptop: programs, state, registry, audit log, connections, host keys, clock."""
    from nsa_ops.laptop.laptop_checks import examine, refusal_of

    problem = ""
    try:
        settings = session.settings
    except ConfigurationError as error:
        settings, problem = session.use_built_in_settings(), error.message
    found = examine(settings, problem)
    session.show(found, draw_examined, failure=refusal_of(found))


def draw_examined(console: "Console", found: "Examined") -> None:
    """The checks of this laptop in one table, and their one verdict."""
    draw_checks(console, found.checks)
    words = {
        "pass": "fit to operate",
        "warn": "fit to operate, with warnings",
        "fail": "not fit to operate",
    }
    line(console, f"verdict: this laptop is {words[found.verdict]}")


@command(commands, "demo")
def demo(
    session: Session,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder for everything that the demo makes")
    ] = Path("nsa-demo"),
) -> None:
    """Try every step of a run on this machine, without GPU, network or SSH."""
    from nsa_ops.demo import demo_settings, prepare_folder, run_demo

    folder = folder.absolute()
    prepare_folder(folder)
    session.interrupt_note = f"see `NSA_OPS_STATE_DIR={folder / 'state'} nsa-ops status`"
    operator = session.operator_of(demo_settings(session.settings, folder))
    try:
        session.show(run_demo(operator, folder), draw_demo)
    finally:
        operator.store.close()


def draw_demo(console: "Console", demo: "Demo") -> None:
    """Every part with its command, the figures, the generated text and where the page is."""
    from shlex import quote

    rows = [(part.name, f"{part.seconds:.1f} s", part.found) for part in demo.parts]
    draw_table(console, ("part", "time", "found"), rows)
    line(console, "")
    before, after = demo.bits_per_byte or (float("nan"), float("nan"))
    replayed = count_of(demo.replay.num_compared if demo.replay else 0, "step")
    facts(
        console,
        [
            ("held-out text", f"{before:.3f} bits per byte before, {after:.3f} after training"),
            ("exact resume", f"{replayed} done twice, every loss the same to the last digit"),
            ("report page", str(demo.page)),
            ("run", f"{demo.run_id} in {demo.folder}"),
            ("took", f"{demo.seconds:.0f} s"),
            ("look around", f"export NSA_OPS_STATE_DIR={quote(str(demo.folder / 'state'))}"),
        ],
    )
    line(console, "")
    line(console, "generated text:")
    for sample_line in demo.sample.splitlines()[:_SAMPLE_LINES]:
        line(console, f"  {sample_line}")
