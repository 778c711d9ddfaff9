"""Terminal output: text of servers without control characters, figures, tables. And the text of files."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path
from typing import Any

import typer

_DROPPED = ("Cc", "Cs")
# Marks that reorder the text around them.
_REORDERING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}


def printable(text: str) -> str:
    """Drop characters that a terminal would obey instead of showing: all controls but newline and tab, and marks that
    reorder text; and surrogates, which cannot be written."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c for c in text if c in "\n\t" or (unicodedata.category(c) not in _DROPPED and ord(c) not in _REORDERING)
    )


def counted(number: int, noun: str) -> str:
    """A number and its noun, such as 2 replicas."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show_ms(seconds: float | None) -> str:
    """Milliseconds with three digits, or those before the point; `None`: unknown."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def table(title: str | None, *columns: str) -> Any:
    """An empty table of rich. The first column is text, the others are numbers."""
    from rich.table import Table

    found = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        justify: Any = "right" if i else "left"
        found.add_column(column, overflow="fold", no_wrap=i > 0, min_width=len(column), justify=justify)
    return found


def console(least_width: int = 80) -> Any:
    """Standard output, with colours on terminals. A narrower terminal breaks lines itself: no figure is cut."""
    from rich.console import Console

    found = Console(markup=False, highlight=False)
    if found.width < least_width:
        found.width = least_width  # from then on fixed
    return found


def read_text(file: Path) -> str:
    """A file's text; `-` is standard input. Raises `typer.BadParameter`."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        name = "standard input" if str(file) == "-" else file
        raise typer.BadParameter(f"{name} cannot be read: {reason}") from None
