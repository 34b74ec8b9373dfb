"""Text of a pod reaches a person through one filter: nothing in it steers a terminal or a page."""

import ast
import re
from pathlib import Path

import pytest

from nsa_ops.cli.console import line, make_console, table
from nsa_ops.printable import LINE_CHARACTERS, PrintableStream, printable, printable_lines

#: One of each kind: C0, DEL, C1 as text, an 8-bit CSI, overrides, isolates, zero width, line
#: separators, a lone surrogate, private use, a tag.
STEERING = [
    "\x00", "\x07", "\x08", "\x0b", "\x0c", "\x1b", "\x1b]52;c;cm0=\x07", "\x1c", "\x7f", "\x85",
    "\x9b", "\x9d", "\u061c", "\u200b", "\u200e", "\u202e", "\u2028", "\u2066", "\u2069", "\ufeff",
    "\udc9b", "\ue000", "\U000e0041",
]  # fmt: skip


@pytest.mark.parametrize("sign", STEERING, ids=lambda sign: sign.encode("unicode_escape").decode())
def test_what_steers_a_terminal_is_an_escape(sign: str) -> None:
    for shown in (printable(f"a{sign}b"), printable_lines(f"a{sign}b")):
        assert shown.isprintable()
        assert shown == f"a{sign.encode('unicode_escape').decode()}b"


def test_text_of_every_script_stays_as_it_is() -> None:
    text = "Zürich 東京 Ω √2 \u00a05\u202f% \u3000🙂 e\u0301"
    assert printable(text) == text


def test_lines_keep_newlines_and_tabs_and_one_line_keeps_neither() -> None:
    assert printable("a\tb\nc\rd") == "a\\tb\\nc\\rd"
    assert printable_lines("a\tb\nc\r\nd\re") == "a\tb\nc\nd\ne"


def test_a_state_of_a_progress_bar_hides_no_other() -> None:
    assert printable_lines("loss nan\r100 % done  \r") == "loss nan\n100 % done  \n"


def test_pieces_are_put_together_wherever_they_are_cut() -> None:
    content = "é\r\n\x1b[2J東\r京\n".encode() + b"\xff\xc3"
    whole = "é\n\\x1b[2J東\n京\n\\xff\\xc3"
    for size in range(1, len(content) + 1):
        stream = PrintableStream()
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        said = "".join(map(stream.feed, pieces)) + stream.feed(b"", is_last=True)
        assert said == whole, size


def test_a_line_without_an_end_is_broken_wherever_its_pieces_are_cut() -> None:
    whole = "é" * LINE_CHARACTERS
    content = f"{whole}\n{whole * 2}\x0b\x1b\n\nz".encode()
    for size in (1000, LINE_CHARACTERS, 2 * LINE_CHARACTERS, len(content)):
        stream = PrintableStream()
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        said = "".join(map(stream.feed, pieces)) + stream.feed(b"", is_last=True)
        assert said.split("\n") == [whole, whole, whole, "\\x0b\\x1b", "", "z"], size


def test_text_of_a_pod_is_neither_markup_nor_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console("never", is_color_forbidden=False)
    line(console, "[bold]x[/] :fire: \x1b[2J")
    console.print(table(["A"], [("[link=http://x]y[/] :fire: \x1b[2J",)]))
    said = capsys.readouterr().out
    assert said.count(":fire: \\x1b[2J") == 2
    assert "[bold]x[/]" in said
    assert "[link=http://x]y[/]" in said


#: Who may write to a stream, and what of: the filter, JSON, and constants.
WRITERS = {
    ("runs.py", "typer.echo(envelope(session.command, _without_history(frame)))"),
    ("runs.py", "typer.echo(progress_line(beat))"),  # numbers alone
    ("inspection.py", "typer.echo(envelope(session.command, data))"),
    ("backup.py", "typer.echo(envelope(session.command, pulled))"),
    ("session.py", "typer.echo(printable_brief(line), err=True)"),
    ("session.py", "typer.echo(envelope(self.command, result, failure))"),
    ("session.py", "sys.stdout.buffer.write(content)"),  # `--raw`
    ("session.py", "sys.stdout.write(text)"),  # what a PrintableStream gave
    ("session.py", "typer.confirm('Continue?', default=is_reversible, err=True)"),
    ("pods.py", "typer.prompt('Password of the new pod', hide_input=True, err=True)"),
    ("console.py", "typer.echo(f'warning: {printable_brief(line)}', err=True)"),
    ("console.py", "typer.echo(f'error: {printable_brief(error.message)}', err=True)"),
    ("console.py", "typer.echo(f'\\nhint: {printable_brief(error.hint)}', err=True)"),
    (
        "app.py",
        "typer.echo(printable_lines(''.join(traceback.format_exception(error))), err=True)",
    ),
    ("app.py", "typer.echo(f'nsa-ops {__version__}')"),
    ("app.py", "typer.echo(envelope(_command_of(words) or 'nsa-ops', None, error))"),
    ("console.py", "console.print(printable_brief(text), markup=False, soft_wrap=True)"),
    ("console.py", "console.print(drawn)"),  # made by `cell`
    ("screen.py", "console.print(styled(row), soft_wrap=True)"),  # of printable text
    ("progress.py", "sys.stderr.write(text)"),  # a bar of printable text, or what clears it
}
_WRITES = re.compile(
    r"typer\.(echo|secho|confirm|prompt)\(|\bprint\(|print_\w+\(|\.write\(|\.log\("
)


def test_nothing_else_in_the_command_line_writes_to_a_stream(repository: Path) -> None:
    found = set()
    for path in sorted((repository / "nsa_ops" / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _WRITES.match(call := ast.unparse(node)):
                found.add((path.name, call))
            elif isinstance(node, ast.Call) and _WRITES.search(ast.unparse(node.func) + "("):
                found.add((path.name, ast.unparse(node)))
    tables = {one for one in found if one[1].startswith("console.print(table(")}
    assert {one[0] for one in tables} == {"console.py"}
    assert found - tables == WRITERS


def test_no_page_escapes_text_without_the_filter(repository: Path) -> None:
    calls = set()
    for path in (repository / "nsa_ops").rglob("*.py"):
        text = path.read_text()
        assert "from html import" not in text, path
        calls |= {
            (path.name, ast.unparse(node))
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "html.escape"
        }
    assert calls == {
        ("axes.py", "html.escape(printable(text))"),
        ("axes.py", "html.escape(printable_lines(text))"),
    }
