r"""The one filter between others' text and a person: what steers a terminal is shown as `\x1b`.

Escaped are the control characters (C0, DEL, C1), the invisible ones that reorder or hide text
(bidirectional overrides and isolates, zero-width signs), surrogates, private and unassigned code
points, and bytes that are not UTF-8. Letters, marks, symbols and spaces of every script stay.
"""

import codecs
import io
from collections.abc import Iterator


def printable(text: str) -> str:
    """Text as one line that moves no cursor; newlines and tabs are escaped too."""
    if text.isprintable():
        return text
    from nsa_core.rundir.names import show_sign  # here: `--help` loads nothing of nsa_core

    return "".join(map(show_sign, text))


#: No sentence that we write is longer; what a pod says may have megabytes.
MOST_CHARACTERS = 4000


def printable_brief(text: str) -> str:
    """`printable`, cut where nobody would read on; `--json` has all of it."""
    left_out = len(text) - MOST_CHARACTERS
    if left_out <= 0:
        return printable(text)
    return f"{printable(text[:MOST_CHARACTERS])}… ({left_out:,} more characters)"


def printable_lines(text: str) -> str:
    """The same with newlines and tabs kept; a carriage return ends a line, as a newline does."""
    whole = text.replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in whole.split("\n"))


#: Longest line of a stream, before escapes: no trainer writes longer ones, and a pager, `grep` or a
#: terminal keeps one line whole in memory.
LINE_CHARACTERS = 16_384


class PrintableStream:
    r"""Bytes that come piece by piece as printable lines.

    A character or a `\r\n` that a piece cuts in two is put together. A progress bar rewrites its
    line with carriage returns: each of its states becomes a line, so that none hides another.
    A line that may never end is broken after `LINE_CHARACTERS`.
    """

    def __init__(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
        self._num_in_line = 0

    def feed(self, piece: bytes, *, is_last: bool = False) -> str:
        """The next lines; what the next piece may still belong to waits, unless `is_last`."""
        return printable_lines("".join(self._break(self._decoder.decode(piece, final=is_last))))

    def _break(self, text: str) -> Iterator[str]:
        """The same text with a newline wherever a line would get too long."""
        for number, line in enumerate(text.split("\n")):
            if number > 0:
                yield "\n"
                self._num_in_line = 0
            start = 0
            while start < len(line):
                if self._num_in_line == LINE_CHARACTERS:
                    yield "\n"
                    self._num_in_line = 0
                part = line[start : start + LINE_CHARACTERS - self._num_in_line]
                yield part
                self._num_in_line += len(part)
                start += len(part)
