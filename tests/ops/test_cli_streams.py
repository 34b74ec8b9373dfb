"""What the shell may do to stdout and stderr: a full disk, a closed pipe, an old encoding."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from rich.console import Console

from nsa_ops.cli.render_run import draw_frame, frame_rows
from nsa_ops.printable import printable
from nsa_ops.runs.watch import Frame
from tests.ops.cli_case import CommandLine
from tests.ops.runs.documents import beat, report

_FULL = Path("/dev/full")
_OLD_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
_WORDS = [("--help",), ("profile", "ls"), ("profile", "ls", "--json")]


def run(
    *words: str, stdout: int | IO[bytes] = subprocess.PIPE, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "nsa_ops", *words],
        stdout=stdout, stderr=subprocess.PIPE, check=False, timeout=120,
        env=os.environ | (env or {}),
    )  # fmt: skip


@pytest.mark.skipif(not _FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", _WORDS)
def test_a_result_that_cannot_be_written_is_one_line_and_11(words: tuple[str, ...]) -> None:
    with _FULL.open("wb") as full:
        done = run(*words, stdout=full)
    assert done.returncode == 11
    (line,) = [text for text in done.stderr.splitlines() if text.startswith(b"error: ")]
    assert b"No space left on device" in line
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("words", _WORDS)
def test_a_reader_that_left_ends_it_as_sigpipe_would(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(*words, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not _FULL.exists(), reason="this system has no /dev/full")
def test_an_error_keeps_its_code_where_its_envelope_cannot_be_written() -> None:
    with _FULL.open("wb") as full:
        done = run("pod", "show", "nope", "--json", stdout=full)
    assert done.returncode == 6
    assert done.stderr.startswith(b"error: There is no pod `nope`\n\nhint: ")
    assert b"Traceback" not in done.stderr


def test_a_closed_stdout_takes_nothing_and_ends_nothing() -> None:
    words = [sys.executable, "-m", "nsa_ops", "profile", "ls"]
    script = 'exec "$@" >&-'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *words], capture_output=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_signs_that_the_encoding_lacks_end_nothing(
    cli: CommandLine, tmp_path: Path, json_flag: tuple[str, ...]
) -> None:
    cli("pod", "add", "here", f"local:{tmp_path / 'ü'}")
    done = run("pod", "ls", *json_flag, env=_OLD_LOCALE)
    assert (done.returncode, done.stderr) == (0, b"")
    if json_flag:
        assert json.loads(done.stdout)["data"][0]["root"] == str(tmp_path / "ü")
    else:
        assert str(tmp_path / "?").encode() in done.stdout


def test_words_that_are_no_text_here_are_refused() -> None:
    done = run("pod", "show", "ü", env=_OLD_LOCALE)
    assert done.returncode == 2
    assert b"is no text in this shell's encoding (ascii)" in done.stderr


def test_a_curve_is_drawn_in_signs_that_the_terminal_has() -> None:
    frame = Frame(report(), [], [], [beat(n, loss=5.0 - n) for n in range(3)])
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, "ascii", write_through=True)
    draw_frame(Console(file=terminal), frame)
    assert b"loss curve   #:_\n" in written.getvalue()
    assert "loss curve   █▄▁" in [row.text for row in frame_rows(frame)]


def test_what_people_typed_moves_no_cursor() -> None:
    assert printable("a\x1b[2Jb\nc\x9bü `x`") == "a\\x1b[2Jb\\nc\\x9bü `x`"


@pytest.mark.parametrize(
    "words",
    [
        ("pod", "show", "a\x1b[31m\nb"),
        ("pod", "add", "a\x1b[31m\nb", "local"),
        ("backup", "verify", "a\x1b[31m\nb"),
        ("config", "check", "--set", "a\x1b[31m\nb=1"),
        ("config", "check", "--set", "model.dim=a\x1b[31m\nb"),
        ("launch", "--run-id", "a\x1b[31m\nb", "--profile", "a\x1b[31m\nb"),
        ("watch", "--a\x1b[31m\nb"),
        ("a\x1b[31m\nb",),
    ],
)
def test_an_error_shows_control_characters_and_obeys_none(
    cli: CommandLine, words: tuple[str, ...]
) -> None:
    outcome = cli(*words)
    assert outcome.exit_code in {2, 6}
    assert "\x1b" not in outcome.err
    assert outcome.err.splitlines()[0].startswith("error: ")
    assert outcome.err.splitlines()[1:2] in ([], [""])
