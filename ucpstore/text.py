"""Names of untrusted checkpoints as text for people."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""``text`` on one line, with everything that a terminal would not just show written as escapes.

    Names in a checkpoint may hold line breaks, terminal commands, bidirectional marks or lone surrogates.

    Examples
    --------
    >>> print(printable("layer\n\x1b[31mred"))
    layer\n\x1b[31mred
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )
