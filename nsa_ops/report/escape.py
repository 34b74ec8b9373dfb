"""Text of a run as text of the page: neither markup nor control characters have an effect."""

import html

from nsa_ops.printable import printable, printable_lines


def escape(text: str) -> str:
    """Text as one line of HTML, also inside quotes of an attribute."""
    return html.escape(printable(text))


def escape_lines(text: str) -> str:
    """Text as lines of HTML, for `<pre>`."""
    return html.escape(printable_lines(text))
