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
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    if len(ends) < num_words:
        raise RuntimeError(f"the documentation has {len(ends)} words, and {num_words} are needed")
    return text[: ends[num_words - 1]]
