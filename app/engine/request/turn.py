"""Turn: what kind of turn a request is. The prefix cache learns how soon each kind's prefix is used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A call stands near the end of an output; decoding all of a long one would delay the step.
MOST_TOKENS_READ = 1024


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's turn.

    Attributes:
        kind: "tools": the model may call tools; "calls": it must.
        call_markers: texts of which an output with a call contains one.
        call_starts: characters with one of which such an output may also begin.
    """

    kind: Literal["completion", "chat", "tools", "calls"] = "completion"
    call_markers: tuple[str, ...] = ()
    call_starts: str = ""

    @property
    def depends_on_output(self) -> bool:
        return self.kind == "tools" and bool(self.call_markers or self.call_starts)

    def kind_of(self, text: str) -> str:
        """The kind of a turn with this output, control tokens included: after a call the tool's result follows."""
        begin = text.lstrip()[:1]
        if any(marker in text for marker in self.call_markers) or (begin and begin in self.call_starts):
            return "calls"
        return self.kind


COMPLETION = Turn()
