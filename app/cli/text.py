"""Text of others on a terminal."""

from __future__ import annotations

import unicodedata

# Marks that reorder the text around them.
_REORDERING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}


def printable(text: str) -> str:
    """Drop characters that a terminal would obey instead of showing: all controls but newline and tab, and marks that
    reorder text."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if c in "\n\t" or (unicodedata.category(c) != "Cc" and ord(c) not in _REORDERING))
