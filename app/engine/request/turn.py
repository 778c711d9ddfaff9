"""Turn: the kind of a request. The prefix cache learns for each kind how soon a prefix is used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Tokens searched for a tool call: calls are near the end of an output, and decoding all of it would delay the step.
MOST_TOKENS_READ = 1024


@dataclass(frozen=True, slots=True)
class Turn:
    """Kind of a request in a conversation.

    Attributes:
        kind: "tools": the model may call tools; "calls": it must.
        call_markers: texts; an output that contains one of them is a tool call.
        call_starts: characters; an output that begins with one of them is a tool call, too.
    """

    kind: Literal["completion", "chat", "tools", "calls"] = "completion"
    call_markers: tuple[str, ...] = ()
    call_starts: str = ""

    @property
    def depends_on_output(self) -> bool:
        return self.kind == "tools" and bool(self.call_markers or self.call_starts)

    def kind_of(self, text: str) -> str:
        """The kind given this output, control tokens included: after a call the tool's result follows."""
        begin = text.lstrip()[:1]
        if any(marker in text for marker in self.call_markers) or (begin and begin in self.call_starts):
            return "calls"
        return self.kind


COMPLETION = Turn()
