"""Real text: the prose of this repository's documentation."""

from __future__ import annotations

import re

from benchmarks.harness import ROOT

# In this order. Pages of figures, tables and generated lists are left out.
FOLDERS = ("concepts", "internals", "decisions", "guides", "operate", "start")
_NOT_PROSE = re.compile(r"^(```|~~~).*?^\1|<!--.*?-->|^\|.*?$|^:::.*?$", re.S | re.M)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def prose(num_words: int) -> str:
    """The first words of all pages in the order of their names, without code blocks, tables, comments and addresses."""
    pages = [page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
    text = "\n\n".join(_LINK.sub(r"\1", _NOT_PROSE.sub("", page.read_text())) for page in pages)
    text = re.sub(r"\n\s*\n", "\n\n", text).strip()
    if (found := len(text.split())) < num_words:
        raise RuntimeError(f"the documentation has {found} words, and {num_words} are needed")
    return first_words(text, num_words)


def first_words(text: str, num_words: int) -> str:
    """The text up to the end of this word, or all of it."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    return text[: ends[min(num_words, len(ends)) - 1]]
