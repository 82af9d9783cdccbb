"""Text that came from another machine, made safe to print."""

from __future__ import annotations


def plain(text: object) -> str:
    """On one line: escapes, line ends and marks that turn text around become `?`."""
    return "".join(char if char.isprintable() else "?" for char in str(text))
