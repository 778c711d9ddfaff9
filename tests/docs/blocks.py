"""Code blocks of README.md and docs/: which run, in which order, and what they print.

A block ```python, ```bash or ```console of a page runs, those of one page in order and with shared state; ```yaml and
```json are checked. `<!-- not run: reason -->` before a block exempts it. `<!-- output -->` before a block makes that
one the expected output of the block before it; `…` there stands for any text. In ```console, lines that begin with
`$ ` are commands, and the lines after them their output. Other blocks (```text, ```markdown, or none) are shown only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
RUN, CHECKED, SHOWN = ("python", "bash", "console"), ("yaml", "json"), ("text", "markdown", "")

_FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)[^\n`]*")
_COMMENT = re.compile(r"<!-- *(?P<kind>not run: *(?P<reason>.*?)|output) *-->")
_COMMAND = re.compile(r"(\$ |make |curl |pip |folio |python3? |docker |kubectl |ray |serve )")


@dataclass(frozen=True)
class Block:
    """A block. `reason`: why it does not run; `output`: what it prints."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None = None
    output: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and self.reason is None

    def steps(self) -> Iterator[tuple[str, str | None]]:
        """(code, its expected output) of a block that runs."""
        if self.language != "console":
            yield self.text, self.output
            return
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page. Raises `ValueError` for a page that does not keep to the rules."""
    found: list[Block] = []
    comment: re.Match[str] | None = None
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        place = f"{page}:{number}"
        fence = _FENCE.fullmatch(line)
        if fence is None:
            if comment is not None and line.strip():
                raise ValueError(f"{place}: {comment[0]} is not right before a code block")
            comment = _COMMENT.fullmatch(line.strip()) or comment
            continue
        content = "\n".join(_until_fence(lines, place))
        block = Block(page, number, fence["language"], dedent(content), comment and comment["reason"])
        is_output = comment is not None and comment["kind"] == "output"
        comment = None
        if is_output:
            if not found or not found[-1].runs or found[-1].output is not None:
                raise ValueError(f"{place}: an output without a block that runs before it")
            found[-1] = replace(found[-1], output=block.text)
            continue
        _check(block)
        found.append(block)
    if comment is not None:
        raise ValueError(f"{page}: {comment[0]} is not right before a code block")
    return found


def _until_fence(lines: Iterator[tuple[int, str]], place: str) -> Iterator[str]:
    for _, line in lines:
        if line.strip() == "```":
            return
        yield line
    raise ValueError(f"{place}: the block does not end")


def _check(block: Block) -> None:
    if block.language not in RUN + CHECKED + SHOWN:
        raise ValueError(f"{block.place}: a block is one of {', '.join(RUN + CHECKED)}, text")
    if block.reason == "":
        raise ValueError(f"{block.place}: not run, without a reason")
    if block.language == "" and _COMMAND.match(block.text):
        raise ValueError(f"{block.place}: a block with commands is ```bash or ```console, so that it runs")
    if block.language == "console" and not block.text.startswith("$ "):
        raise ValueError(f"{block.place}: ```console begins with '$ ' and a command")


def page_blocks(page: str) -> list[Block]:
    return blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))


def valid_pages() -> Iterator[tuple[str, list[Block]]]:
    """The pages that keep to the rules, with their blocks; a test fails for each other page."""
    for page in PAGES:
        try:
            yield page, page_blocks(page)
        except ValueError:
            continue


def is_as_expected(output: str, expected: str) -> bool:
    """Whether an output is the expected one, in which `…` stands for any text, without blanks at the ends of lines."""
    parts = [re.escape(part) for part in _trimmed(expected).split("…")]
    return re.fullmatch(".*".join(parts), _trimmed(output), re.DOTALL) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
