import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from nsa_core.rundir.data_account import Count, DataAccount
from nsa_core.rundir.events import Event
from nsa_core.rundir.report import CheckResult
from nsa_ops.backup.backups import BackupEntry
from nsa_ops.backup.receipts import at_most_lost
from nsa_ops.cli.backup import draw_backups
from nsa_ops.cli.configuration import draw_reasons, draw_values, draw_values_with_origin
from nsa_ops.cli.console import (
    cell_text,
    draw_checks,
    draw_table,
    envelope,
    jsonable,
    make_console,
    plan_lines,
    table,
)
from nsa_ops.cli.inspection import draw_events
from nsa_ops.cli.render_run import (
    draw_status,
    frame_rows,
    frame_view,
    progress_line,
    progress_row,
    sparkline,
)
from nsa_ops.cli.session import Options, Session
from nsa_ops.cli.this_laptop import draw_audit
from nsa_ops.configure import Value
from nsa_ops.laptop.audit_log import AuditEntry, AuditView
from nsa_ops.plan import Step, plan_of
from nsa_ops.pod.messages import CheckpointFact, PhaseUse, RunFigures
from nsa_ops.pod.rules.verdict import Finding, conclude
from nsa_ops.runs.status import RunStatusLine
from nsa_ops.runs.watch import Frame
from nsa_ops.store import Receipt
from tests.ops.runs.documents import RUN, beat, report


def test_an_envelope_has_the_four_keys_and_a_version() -> None:
    document = json.loads(envelope("pod ls", [RUN]))
    assert list(document) == ["schema", "ok", "data", "errors"]
    assert document["schema"] == "nsa-ops/pod-ls/1"
    assert document["data"][0]["run_id"] == "r1"


def test_what_json_does_not_know_becomes_null() -> None:
    assert jsonable([math.nan, math.inf, 1.5]) == [None, None, 1.5]


def test_an_event_has_its_time_and_its_words_in_80_columns() -> None:
    event = Event(
        ts=1796014245.5, iso="2026-11-30T04:50:45.500+00:00", attempt=10, kind="save_failed",
        by="trainer", message="checkpoint of step 600 could not be written",
    )  # fmt: skip
    stream = io.StringIO()
    draw_events(Console(file=stream, width=80), [event])
    assert [line.rstrip() for line in stream.getvalue().splitlines()] == [
        "WHEN                     ATTEMPT  EVENT",
        "2026-11-30 04:50:45 UTC  10       save_failed by trainer: checkpoint of step 600",
        "                                  could not be written",
    ]


def test_a_table_is_one_line_a_row_where_no_terminal_shows_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console, long = make_console("never", is_color_forbidden=False), "word " * 99
    draw_table(console, ["POD", "WHY"], [("a", long), ("pod-b", "[x]\n")])
    checks = [CheckResult(name="disk", status="fail", message=long, limit=">= 2", hint="Free it")]
    draw_checks(console, checks)
    assert capsys.readouterr().out.splitlines() == [
        "POD    WHY", f"a      {long.rstrip()}", "pod-b  [x]\\n",
        f"      CHECK  {'FOUND':<{len(long)}}  LIMIT", f"FAIL  disk   {long}  >= 2",
        "disk: Free it",
    ]  # fmt: skip


def test_a_key_is_whole_on_80_columns_beside_long_values_and_reasons() -> None:
    key, long = "runtime.activation_checkpointing", "word " * 20
    values = [Value(key, long, "recipe m7c-125m-64k", long), Value("seed", 1, "default", "")]
    for draw in (draw_values, draw_values_with_origin, draw_reasons):
        stream = io.StringIO()
        draw(Console(file=stream, width=80), values)
        lines = stream.getvalue().splitlines()
        assert lines[1].startswith(f"{key}  word"), lines
        assert max(map(len, lines)) <= 80


def test_a_backup_is_found_by_its_whole_run_on_80_columns() -> None:
    run_id = "20261130-1445-tiny-cpu-caf5"
    entry = BackupEntry(
        run_id, Path("b"), "this-machine", [160, 150, 100], 5 << 20, 0, 1796014245.5, 1796014245.5
    )
    for aside, said in ((0, ""), (2 << 20, "; 2 MiB is kept aside")):
        stream = io.StringIO()
        draw_backups(Console(file=stream, width=80), [replace(entry, aside_bytes=aside)])
        lines = stream.getvalue().splitlines()
        assert lines[0].split() == ["RUN", "POD", "STEPS", "SIZE", "PULLED", "VERIFIED"]
        assert lines[1].startswith(f"{run_id}  this")
        assert lines[-1] == f"{run_id} is in b{said}"
        assert max(map(len, lines)) <= 80


AUDITED = [
    AuditEntry(98, 1796014245.5, "a100-1", "run", "env A=b sh -c 'cd -- x; " + "y" * 90 + "'",
               "exit 0", 0.3),
    AuditEntry(100, 1796014245.5, "a100-1", "get", "/f", "error: `/f` does not exist", 0.01),
]  # fmt: skip


def draw_audited(console: Console) -> None:
    draw_audit(console, AuditView(Path("log"), 100, 50, 0, None, "", AUDITED))


def test_an_entry_of_the_audit_log_takes_two_lines_of_80_columns() -> None:
    stream = io.StringIO()
    draw_audited(Console(file=stream, width=80))
    assert stream.getvalue().splitlines() == [
        " 98  2026-11-30 04:50:45 UTC  a100-1  run of 0.3 s: exit 0",
        "     sh -c 'cd -- x; " + "y" * 21 + "…" + "y" * 36 + "'",
        "100  2026-11-30 04:50:45 UTC  a100-1  get of 10 ms: error: `/f` does not exist",
        "     /f",
        "2 of 50 entries; the chain of hashes is whole",
    ]


def test_an_entry_of_the_audit_log_is_one_whole_line_in_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw_audited(make_console("never", is_color_forbidden=False))
    when = "2026-11-30 04:50:45 UTC  a100-1"
    assert capsys.readouterr().out.splitlines() == [
        "LINE  WHEN                     POD     CALL  SECONDS  OUTCOME: WHAT",
        f"98    {when}  run   0.3      exit 0: sh -c 'cd -- x; {'y' * 90}'",
        f"100   {when}  get   0.01     error: `/f` does not exist: /f",
        "2 of 50 entries; the chain of hashes is whole",
    ]


def test_a_sparkline_shows_low_and_high_and_keeps_its_width() -> None:
    assert sparkline([0.0, 7.0]) == "▁█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([math.nan]) == ""
    assert sparkline([-1e308, 0.0, 1e308]) == "▁▄█"
    assert len(sparkline([float(number) for number in range(1000)], width=60)) <= 60


def test_a_plan_is_lines_with_commands_files_and_notes() -> None:
    step = Step("start", "a window", command=("sh", "-c", "a b"), files=("/x",))
    assert plan_lines(plan_of("Go", [step, Step("ship", "code", is_done=True)], ["mind"])) == [
        "plan: Go", "  1. start: a window", "     $ sh -c 'a b'", "     -> /x",
        "  2. ship: code (done already)", "  note: mind",
    ]  # fmt: skip


def test_a_plan_counts_the_lines_of_a_script_and_stays_on_one() -> None:
    step = Step("tools", "install rsync", ("sh", "-c", "\nset -e\necho $1\n", "sh", "a b"))
    assert plan_lines(plan_of("Do it", [step]))[2] == "     $ sh -c '(script of 2 lines)' sh 'a b'"


def test_what_a_plan_passes_over_is_told_also_where_nobody_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_of("Resume r1", [Step("start", "a window")], ["passed over step_000141"])
    Session("resume", Options(yes=True)).agree(plan)
    assert capsys.readouterr().err == "plan: Resume r1\n  note: passed over step_000141\n"


def test_status_names_what_is_damaged_beside_what_is_sound() -> None:
    console = Console(file=io.StringIO(), width=200)
    facts = [
        CheckpointFact(name="c", step=141, size_bytes=1, whole=False, damage="x is missing"),
        CheckpointFact(name="b", step=140, size_bytes=1, whole=True),
    ]
    draw_status(console, RunStatusLine(RUN, report(checkpoints=facts)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "checkpoint   step 140; step 141 is damaged: x is missing\n" in text


def test_status_says_what_was_dropped_of_the_data_and_nothing_where_nothing_was() -> None:
    lost = DataAccount(num_documents=3, num_lost=1, rejected={"malformed JSON": Count(count=1)})
    for account, is_shown in ((lost, True), (DataAccount(num_documents=4), False), (None, False)):
        console = Console(file=io.StringIO(), width=200)
        draw_status(console, RunStatusLine(RUN, report(data=account)))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("25.00 % dropped (malformed JSON: 1)" in text) == is_shown


def test_a_record_is_one_line_without_what_is_not_known() -> None:
    assert progress_line(beat(5, loss=1.25)) == "step      5  loss 1.2500"


def frame_lines(frame: Frame, encoding: str = "utf-8") -> list[str]:
    return [row.text for row in frame_rows(frame, encoding)]


def test_a_watched_run_shows_verdict_state_curves_and_gates() -> None:
    records = [beat(n, loss=5.0 - n, gate_branch_shares=[0.2, 0.3, 0.5]) for n in range(3)]
    lines = frame_lines(Frame(report(flags=["stale"]), [], [], records))
    assert lines[:2] == [
        "verdict      healthy: no rule found anything",
        "run          r1 is running [stale]: it is running",
    ]
    assert "loss curve   █▄▁" in lines
    assert "branches     compressed 0.20, selected 0.30, sliding 0.50" in lines
    assert "checkpoint   none yet" in lines


def test_a_watched_run_says_what_a_crash_and_what_a_lost_pod_would_cost() -> None:
    facts = [CheckpointFact(name="b", step=60, size_bytes=1, whole=True)]
    at_risk = at_most_lost(last_step=90, saved=None)
    seen = report(last_beat=beat(90), checkpoints=facts)
    lines = frame_lines(Frame(seen, [], [], [], at_risk))
    assert "checkpoint   step 60, a crash loses at most 30 steps" in lines
    assert "backup       nothing is backed up: you lose all 90 steps" in lines
    ended = frame_lines(Frame(report("halted", last_beat=beat(90), checkpoints=facts), [], [], []))
    assert "checkpoint   step 60" in ended


def test_a_card_shows_what_it_can_tell_and_nothing_else() -> None:
    record = beat(1, loss=1.0, gpu_mem_peak=20_480, gpu_util=97.4)
    lines = frame_lines(Frame(report(), [], [], [record]))
    assert {"memory       peak 20,480 MiB", "card         busy 97 %"} <= set(lines)


def test_progress_is_a_bar_a_share_and_the_time_that_is_left_while_it_runs() -> None:
    seen = report(last_beat=beat(25), figures=RunFigures(pace_s=4.0))
    summary = seen.manifest.model_copy(update={"steps": 1000})
    running = seen.model_copy(update={"manifest": summary})
    bar = "█" + 29 * "░"
    assert progress_row(running, "utf-8").text == (
        f"progress     {bar} 2.5 %, step 25 of 1,000, about 1 h 5 min left"
    )
    ended = running.model_copy(update={"state": "halted"})
    assert progress_row(ended, "ascii").text == (
        f"progress     #{29 * '-'} 2.5 %, step 25 of 1,000"
    )


def test_staging_shows_what_it_does_and_a_bar_where_its_end_is_known() -> None:
    doing = "tokenise: 3,000 documents, 40,000 tokens (x)"
    known = beat(0, phase="data", staging=doing, staging_share=0.5)
    rows = frame_lines(Frame(report("staging", last_beat=known), [], [], []))
    assert f"staging      {15 * '█'}{15 * '░'} 50.0 %, {doing}" in rows
    open_end = beat(0, phase="data", staging=doing)
    rows = frame_lines(Frame(report("staging", last_beat=open_end), [], [], []))
    assert f"staging      {doing}" in rows


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1.0])
def test_numbers_of_a_pod_that_make_no_sense_are_drawn_and_end_nothing(value: float) -> None:
    record = beat(
        10**400, loss=value, lr=value, grad_norm=value, tokens_per_s=value, mfu=value,
        step_s=value, fetch_p50_ms=value, fetch_p95_ms=value, gate_entropy_mean=value,
        gate_collapse_frac=value, gate_max_gate=value, gate_branch_shares=[value], gpu_util=value,
        kernel_paths={"\x1b[2J": "\x1b[2J"}, staging="\x1b[2J", staging_share=value,
    )  # fmt: skip
    use = PhaseUse(phase="train", still_s=value, limit_s=value, warn_s=value)
    figures = RunFigures(
        record=record, gates=record, usual_tokens_per_s=value, pace_s=value, phase=use
    )
    for state, last in (("running", record), ("staging", record), ("running", beat(5))):
        seen = report(state, last_beat=last, figures=figures)
        at_risk = at_most_lost(last_step=last.step, saved=None, step_s=value)
        assert "\x1b" not in frame_view(Frame(seen, [], [], [record], at_risk), "utf-8").plain


def test_colour_stresses_the_verdict_and_says_nothing_alone() -> None:
    halted = conclude([Finding(rule="stall", level="halt", sentence="Nothing moves")])
    found = frame_view(Frame(report(verdict=halted), [], [], []), "utf-8")
    assert "verdict      halt stall: Nothing moves" in found.plain
    assert any(span.style == "bold red" for span in found.spans)


def test_status_says_what_a_lost_pod_would_cost() -> None:
    console = Console(file=io.StringIO(), width=200)
    at_risk = at_most_lost(last_step=90, saved=Receipt("r1", 60, "/b", 5, "sha", 1.0, 2.0))
    draw_status(console, RunStatusLine(RUN, report(last_beat=beat(90)), "", at_risk))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "you lose at most 30 steps: the newest verified backup is step 60" in text


@pytest.mark.parametrize(
    ("color", "forbidden", "colored"),
    [
        ("auto", False, False),
        ("always", False, True),
        ("always", True, True),
        ("never", False, False),
    ],
)
def test_colour_is_for_terminals_or_on_demand(color: str, forbidden: bool, colored: bool) -> None:
    console = make_console(color, is_color_forbidden=forbidden)
    for style in ("red", "bold"):
        with console.capture() as captured:
            console.print(f"[{style}]x[/]")
        assert ("\x1b[" in captured.get()) == colored


def test_values_are_shown_as_people_read_them() -> None:
    assert [cell_text(value) for value in (True, 0.5, [1, 2], "x")] == ["yes", "0.5", "1, 2", "x"]
    assert cell_text({"compile": True, "tokens_per_s": 392_000.0}) == (
        "compile yes, tokens_per_s 392000"
    )


def test_a_control_character_is_shown_in_what_is_drawn_and_never_obeyed() -> None:
    console = Console(file=io.StringIO(), width=200)
    hostile = "x\x1b[2J\r\x07y"
    draw_status(console, RunStatusLine(RUN, report(why=hostile)))
    console.print(table(["A"], [(hostile,)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert not any(sign in text for sign in "\x1b\r\x07")
    assert text.count("x\\x1b[2J\\r\\x07y") == 2
    frame = frame_view(Frame(report(why=hostile), [], [], []), "utf-8")
    assert "\x1b" not in frame.plain
