"""Read our own pages: fenced blocks, the commands in them, and links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("runbooks/*.md")]
)
FENCE = re.compile(r"^[ ]*```(\w*)\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(nsa-ops [^`]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Command:
    """One line that a reader may type.

    Attributes:
        page: File name.
        line: As written, without the prompt and the comment.
        words: What follows `nsa-ops`.
    """

    page: str
    line: str
    words: tuple[str, ...]


def fenced_commands(page: Path) -> Iterator[Command]:
    """Every `$ …` line that runs nsa-ops in a fenced console block."""
    for language, block in FENCE.findall(page.read_text()):
        lines = block.replace("\\\n", " ").splitlines()
        for line in (raw.strip() for raw in lines):
            if language == "console" and line.startswith("$ nsa-ops"):
                yield _command(page, line.removeprefix("$ "))


def inline_commands(page: Path) -> Iterator[Command]:
    """Every `nsa-ops …` in running text that is a command and not an abbreviation of one."""
    prose = FENCE.sub("", page.read_text())
    for line in INLINE.findall(prose):
        if "…" not in line and "NAME" not in line:
            yield _command(page, line)


def _command(page: Path, line: str) -> Command:
    words = tuple(shlex.split(line, comments=True))
    return Command(str(page.relative_to(REPOSITORY)), " ".join(words), words[1:])
