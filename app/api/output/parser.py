"""Output parser: splits an output, while it is generated, into reasoning, content and calls of functions.

```
 REASONING ──end of reasoning──> START ──bare call──> CALLS ──> START
     ^                             │ other              ^ │ no call after all
     └──begin of reasoning── CONTENT <──────────────────┼─┘
                                │ marker                │
                                └───────────────────────┘
```

The parts do not depend on how the text is cut into pieces. Text that only looks like a call is content, to the last
character; white space next to calls and reasoning is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from folio.app.api.output.json_text import PairedSurrogates, stream_object
from folio.app.api.output.reader import MAX_SPACE, SPACE, Kind, Reader, Reading
from folio.app.api.output.syntaxes import Functions, ToolSyntax
from folio.app.engine.sampling.token_text import overlap

# The most characters read after markers that began no call. Calls are no longer looked for after more: each marker may
# cost a look-ahead of `MAX_HEADER`.
_MAX_WASTED = 256 << 10
# Characters that are parsed at once: taking a part of the reader's text copies the rest.
_PIECE = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an output. The text of a "call" is the function's name; "arguments" continue the latest call's."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """Reasoning between two literals.

    Attributes:
        implied: an output is reasoning from its first character, unless the prompt has ended the reasoning.
    """

    begin: str
    end: str
    implied: bool = False


class OutputParser:
    """Parses one output.

    Args:
        reasons: the prompt has begun the reasoning.
        forced: the output is constrained to calls, so the first marker may be missing, and text that is no call is the
            beginning of one.
        begun: the beginning of a call with which the prompt ends. The call is part of the output.

    Attributes:
        is_reasoning: the text so far ends within reasoning.
    """

    def __init__(
        self,
        reasoning: ReasoningSyntax | None,
        tools: ToolSyntax | None,
        functions: Functions,
        *,
        reasons: bool = False,
        forced: bool = False,
        begun: str = "",
    ) -> None:
        self.is_reasoning = reasons
        self._reader = Reader()
        self._reasoning = reasoning
        self._tools = tools
        self._functions = functions
        self._forced = forced
        self._parts: list[Part] = []
        self._begun = ""  # of a forced call
        self._arguments = PairedSurrogates()
        self._parsing = self._parse()
        if begun:
            self._reader.text = begun
            self._advance()

    @property
    def is_cut(self) -> bool:
        """Whether the output has ended within a call."""
        return self._reader.is_cut

    @property
    def num_held(self) -> int:
        """Number of characters held back until later text decides what they are."""
        return len(self._reader.text)

    def push(self, text: str) -> list[Part]:
        """Append output; returns the parts that later text cannot change."""
        for begin in range(0, len(text), _PIECE):
            self._reader.text += text[begin : begin + _PIECE]
            self._advance()
        return self._take_parts()

    def finish(self) -> list[Part]:
        """End the output; returns the rest."""
        self._reader.ended = True
        self._advance()
        if begun := self._begun:
            self._reader.is_cut = True
            if (name := self._name_in(begun)) in self._functions:
                self._emit("call", name)
        self._end_arguments()
        return self._take_parts()

    def _advance(self) -> None:
        next(self._parsing, None)

    def _take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _emit(self, kind: Kind, text: str) -> None:
        if kind == "arguments":
            self._append(kind, self._arguments.push(text))
        elif kind == "content" and self._forced:
            self._begun += text
        else:
            self._begun = ""
            self._end_arguments()
            self._append(kind, text)

    def _name_in(self, begun: str) -> str:
        """The function of a call whose arguments have not begun; empty if it is not known."""
        if len(self._functions) == 1:
            return next(iter(self._functions))
        found = self._named.search(begun)
        return found["name"] if found is not None else ""

    @property
    def _named(self) -> re.Pattern[str]:
        assert self._tools is not None
        return self._tools.named

    def _end_arguments(self) -> None:
        self._append("arguments", self._arguments.finish())

    def _append(self, kind: Kind, text: str) -> None:
        if kind != "call":
            if not text:
                return
            if self._parts and self._parts[-1].kind == kind:
                text = self._parts.pop().text + text
        self._parts.append(Part(kind, text))

    def _parse(self) -> Reading[None]:
        r, reasoning, tools = self._reader, self._reasoning, self._tools
        markers = tools.markers if tools is not None else ()
        if reasoning is not None:
            markers = (*markers, reasoning.begin)
        if self.is_reasoning:
            yield from self._reason()
        wasted = 0
        starts = True  # no content since the beginning, the reasoning or a call
        while True:
            if starts and tools is not None:
                at = yield from r.behind_space(0)
                first = yield from r.character(at)
                begins = first and (self._forced or first in tools.bare)
                if begins and (yield from tools.calls(r, at, self._emit, self._functions)):
                    yield from self._end_calls()
                    continue
            found = yield from self._until("content", markers)
            if found is None:
                return
            at, marker = found
            starts = False
            r.looked_ahead = 0
            if reasoning is not None and marker == reasoning.begin:
                r.take(at + len(marker))
                yield from self._reason()
                starts = True
            elif tools is not None and (yield from tools.calls(r, at + len(marker), self._emit, self._functions)):
                yield from self._end_calls()
                starts = True
            else:
                self._emit("content", r.take(at + 1))
                wasted += r.looked_ahead
                if wasted > _MAX_WASTED:
                    tools, markers = None, markers[-1:] if reasoning is not None else ()

    def _end_calls(self) -> Reading[None]:
        """Take the white space after calls, and a semicolon where calls have no markers and another one follows."""
        r, tools = self._reader, self._tools
        r.take((yield from r.behind_space(0)))
        if tools is not None and tools.bare and (yield from r.character(0)) == ";":
            at = yield from r.behind_space(1)
            if (yield from r.character(at)) in tuple(tools.bare):
                r.take(at)

    def _reason(self) -> Reading[None]:
        r, syntax = self._reader, self._reasoning
        assert syntax is not None
        self.is_reasoning = True
        r.take((yield from r.behind_space(0)))
        if (found := (yield from self._until("reasoning", (syntax.end,)))) is not None:
            r.take(found[0] + len(syntax.end))
            self.is_reasoning = False
            r.take((yield from r.behind_space(0)))

    def _until(self, kind: Kind, markers: Sequence[str]) -> Reading[tuple[int, str] | None]:
        """Emit the text before the first marker; returns the marker's index in the rest, where only white space
        precedes it, and the marker. `None` at the end of the output."""
        r = self._reader
        while True:
            found = min((at for marker in markers if (at := r.text.find(marker)) >= 0), default=None)
            end = len(r.text) if found is None else found
            if found is None and not r.ended:
                end -= max((overlap(r.text, marker) for marker in markers), default=0)
            if markers and (found is not None or not r.ended):
                end -= min(end - len(r.text[:end].rstrip(SPACE)), MAX_SPACE)
            self._emit(kind, r.take(end))
            if found is not None:
                return found - end, (yield from r.literal(found - end, *markers))
            if not (yield from r.has(len(r.text))):
                self._emit(kind, r.take(len(r.text)))
                return None


_HARMONY_HEAD = re.compile(
    r"(?:<\|start\|>\s*[a-z]*(?: to=(?P<to>[^\s<]+))?)?\s*"
    r"<\|channel\|>(?P<channel>[a-z]+)(?: to=(?P<then_to>[^\s<]+))?\s*(?:<\|constrain\|>)?\s*[a-z]*\s*<\|message\|>"
)
_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")
HARMONY_LITERALS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", *_HARMONY_ENDS)
_MAX_HEAD = 256


class HarmonyParser(OutputParser):
    """gpt-oss: messages in channels. "analysis" is reasoning; messages to functions are calls; all else is content."""

    @property
    def _named(self) -> re.Pattern[str]:
        return re.compile(r" to=functions\.(?P<name>[A-Za-z0-9_.-]+)(?![A-Za-z0-9_.-]|\Z)")

    def _parse(self) -> Reading[None]:
        r = self._reader
        while (yield from r.has(0)):
            while (head := _HARMONY_HEAD.match(r.text, 0, _MAX_HEAD)) is None:
                if len(r.text) >= _MAX_HEAD or not (yield from r.has(len(r.text))):
                    break
            if head is not None:
                r.take(head.end())
            to = (head["to"] or head["then_to"] or "") if head is not None else ""
            name = to.removeprefix("functions.")
            kind: Kind = "reasoning" if head is not None and head["channel"] == "analysis" else "content"
            at = yield from r.behind_space(0)
            if name in self._functions and (yield from r.character(at)) == "{":
                r.take(at)
                self._emit("call", name)
                yield from stream_object(r, self._emit)
                r.take((yield from r.behind_space(0)))
            self.is_reasoning = kind == "reasoning"
            if (found := (yield from self._until(kind, _HARMONY_ENDS))) is None:
                return
            r.take(found[0] + len(found[1]))
            r.take((yield from r.behind_space(0)))
            self.is_reasoning = False
