"""Reader: a text that arrives in pieces, for parsers that are written as generators.

A parser asks for text with `yield from` and is suspended while there is too little of it. What it has not taken stays
in the reader: it may look ahead, find that this is no call, and leave the text to others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Literal, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Kind = Literal["reasoning", "content", "call", "arguments"]
# Takes a kind of output and its text; of a "call" the function's name.
Emit = Callable[[Kind, str], None]

SPACE = " \t\r\n"
# White space between the parts of a call. More than this is no part of it.
MAX_SPACE = 64


class Reader:
    """The text of one output.

    Attributes:
        text: received, and not taken yet.
        ended: no more text will come.
        is_cut: the text ended within the arguments of a call.
        looked_ahead: characters that were read in search of a call, since a parser has set it to 0.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.is_cut = False
        self.looked_ahead = 0

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def has(self, index: int) -> Reading[bool]:
        """Wait for the character at `index`; false if the output ends before."""
        while len(self.text) <= index:
            if self.ended:
                return False
            yield
        return True

    def behind_space(self, index: int) -> Reading[int]:
        """The index after the white space that begins at `index`."""
        end = index
        while end - index < MAX_SPACE and (yield from self.has(end)) and self.text[end] in SPACE:
            end += 1
        return end

    def character(self, index: int) -> Reading[str]:
        """The character at `index`; empty at the end of the output."""
        return self.text[index] if (yield from self.has(index)) else ""

    def literal(self, index: int, *literals: str) -> Reading[str]:
        """The longest of the literals that stands at `index`; empty if none does."""
        while True:
            rest = self.text[index : index + max(map(len, literals), default=0)]
            undecided = any(len(one) > len(rest) and one.startswith(rest) for one in literals)
            if not undecided or self.ended:
                return max((one for one in literals if rest.startswith(one)), key=len, default="")
            yield

    def take_literal(self, literal: str) -> Reading[None]:
        """Take a literal that follows, perhaps after white space; without it nothing is taken."""
        if literal:
            at = yield from self.behind_space(0)
            if (yield from self.literal(at, literal)):
                self.take(at + len(literal))
