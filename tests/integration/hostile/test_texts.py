"""Words of a pod that drive a terminal or a browser: every command shows them as plain text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hostile.judged import told
from tests.integration.hostile.lying_pod import Side, World
from tests.integration.hostile.tree_guard import controls

pytestmark = pytest.mark.integration
EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b1m\x00\x08\x7f\r<script>alert(1)</script>"
ONLY_RAW = "\x1b[2J\x1b]52;c;ZXZpbA==\x07\r\n"


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def add_line(path: Path, **changes: Any) -> None:
    """The last line again, with other words in it."""
    lines = path.read_bytes().splitlines()
    last = json.loads(lines[-1]) | changes
    path.write_bytes(b"\n".join([*lines, json.dumps(last).encode(), b""]))


def speak(run: Path) -> None:
    """Put the words wherever a run directory holds text that somebody reads."""
    with (run / "training.log").open("ab") as log:
        log.write(b"```\n" + f"{EVIL}{ONLY_RAW}".encode() + b"\x9b\xff\n")
    add_line(run / "events.jsonl", kind=EVIL, by=EVIL, message=EVIL, facts={EVIL: EVIL})
    add_line(
        run / "heartbeat_rank0.jsonl", iso=EVIL, throttle=EVIL, kernel_paths={EVIL: EVIL},
        kernel_reasons={EVIL: EVIL},
    )  # fmt: skip
    change_json(run / "exit.json", reason=EVIL, by=EVIL)
    change_json(run / "manifest.json", code_commit=EVIL, profile=EVIL, command=[EVIL],
                overrides={EVIL: EVIL}, origins={EVIL: EVIL})  # fmt: skip
    if (run / "watchdog.json").exists():
        change_json(run / "watchdog.json", why=EVIL)
    (run / ".anomaly_type").write_text(EVIL)
    (run / "samples.json").write_text(json.dumps([{"prompt": EVIL, "text": EVIL}]))
    (run / "metrics.json").write_text(json.dumps({EVIL: EVIL}))
    (run / "stackdump_rank0.txt").write_text(ONLY_RAW)


COMMANDS = (
    ("status",), ("status", "--json"), ("run", "show"), ("watch", "--once"), ("logs",), ("events",),
    ("events", "--json"), ("health",), ("stack",), ("checkpoint",), ("resume", "--plan"),
    ("backup", "pull", "-y"), ("backup", "pull", "--plan"), ("halt", "-y"),
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_a_run_says_reaches_no_terminal_raw(world: World, command: tuple[str, ...]) -> None:
    side = world.sides["near"]
    speak(side.run_dir)
    named = [word for word in command if not word.startswith("-")]
    flags = [word for word in command if word.startswith("-")]
    heard, problems = told(
        world, side, *named, side.run_id, *flags, codes=(0, 2, 3, 6, 7, 8, 9, 10)
    )
    assert problems == [], heard.said


def test_a_list_of_runs_shows_it_as_plain_text(world: World) -> None:
    side = world.sides["near"]
    speak(side.run_dir)
    heard, problems = told(world, side, "run", "ls", codes=(0,))
    assert problems == [], heard.said


def test_the_raw_log_is_given_byte_for_byte_where_it_is_asked_for(world: World) -> None:
    side = world.sides["near"]
    speak(side.run_dir)
    heard = world("logs", side.run_id, "--raw")
    assert heard.code == 0, heard.said
    assert heard.out == (side.run_dir / "training.log").read_bytes()


def test_a_report_shows_it_as_plain_text_in_both_forms(world: World) -> None:
    side = world.sides["near"]
    run = world.laptop / "received"
    run.mkdir()
    for path in side.run_dir.iterdir():
        if path.is_file():
            (run / path.name).write_bytes(path.read_bytes())
    speak(run)
    heard = world("report", str(run), "--out", "page.html")
    assert heard.problems((0,)) == [], heard.said
    page, text = ((world.work / f"page.{suffix}").read_bytes() for suffix in ("html", "md"))
    assert controls(page) + controls(text) == []
    assert b"<script>alert" not in page
    assert "<script>alert" not in outside_fences(text.decode())


def outside_fences(markdown: str) -> str:
    """The lines that a reader of Markdown takes for more than code."""
    kept: list[str] = []
    fence = ""
    for line in markdown.splitlines():
        marks = line[: len(line) - len(line.lstrip("`"))]
        if not fence and len(marks) >= 3:
            fence = marks
        elif fence and len(marks) >= len(fence) and line.strip() == marks:
            fence = ""
        elif not fence:
            kept.append(re.sub(r"`[^`]+`", "", line))
    return "\n".join(kept)


ERRORS = {
    "the-agent": {"asked": "nsa_ops.pod", "instead": "", "code": 3},
    "a-script": {"asked": "sh -c", "instead": EVIL, "code": 74},
    "an-answer": {"asked": "", "instead": '{"x": "' + EVIL + '"}', "code": 0},
}


#: A status asks no script, and a pull no agent.
ASKED = {
    "the-agent": ("status", "logs", "resume"),
    "a-script": ("logs", "backup pull"),
    "an-answer": ("status", "logs", "backup pull", "resume"),
}


@pytest.mark.parametrize(
    ("error", "command"), [(error, command) for error in ASKED for command in ASKED[error]]
)
def test_an_error_of_the_pod_is_quoted_as_plain_text(
    world: World, error: str, command: str
) -> None:
    side: Side = world.sides["far"]
    said = {"again": EVIL + ONLY_RAW, "repeat": 1, "stream": "err"}
    side.lie(ERRORS[error] | said)
    more = ("-y",) if command in {"backup pull", "resume"} else ()
    heard, problems = told(
        world, side, *command.split(), side.run_id, *more, codes=(5, 6, 7, 8, 9, 10, 11, 0)
    )
    assert problems == [], heard.said
    assert side.num_lies, heard.said


EVIDENCE = {
    "smi.txt": f"NVIDIA-SMI {EVIL} Driver Version: 570.{EVIL}\nGPU 0: {EVIL} (UUID: GPU-{EVIL})\n",
    "dmesg.log": f"[ 12.3] NVRM: Xid (PCI:0000:01:00): 79, pid=1, name={EVIL}, {EVIL}\n",
    "dcgm.json": json.dumps({"DCGM GPU Diagnostic": {EVIL: [EVIL, {"warnings": [EVIL]}]}}),
    "training.log": f"RuntimeError: {EVIL}\nCUDA error: {EVIL}\n",
}


@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence_is_quoted_as_plain_text(world: World, name: str) -> None:
    (world.work / name).write_text(EVIDENCE[name])
    heard = world("preflight", "--evidence", name)
    assert heard.problems((0, 2, 3, 6, 9, 11, 26)) == [], heard.said
