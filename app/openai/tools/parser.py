"""From a model's text to content and tool calls, piece by piece.

Whatever is not a whole and valid call of a known function is content, to the last character; only white space next to
a call is dropped. How the text is cut into pieces changes nothing but when things are known.

```
START ──marker, or bare JSON──> JSON ──complete and valid──> END ──end marker──> AFTER
  │                           ^   │                           │                    │  │
  │ other                marker   │ malformed                 │ other     another  │  │ other
  └────────> CONTENT ─────────┘   └──────> CONTENT <──────────┘        JSON <──────┘  └──> CONTENT
```
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from typing import NoReturn

from app.engine.sampling.token_text import overlap
from app.openai.tools.bodies import FunctionCallDelta, ToolCallDelta
from app.openai.tools.formats import ToolFormat

# White space next to markers belongs to them, and is held back until it is known whether one follows; beyond so many
# characters it is content.
_MAX_SPACE = 64
_SPACE = " \t\r\n"
_STRUCTURAL = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class ToolCallParser:
    """Finds the calls in one output. Each is told whole, in one delta, as soon as it is complete.

    Args:
        functions: names of the functions that may be called.
        forced: the output is nothing but calls, so the first may lack its marker.
    """

    def __init__(self, tool_format: ToolFormat, functions: Collection[str], *, forced: bool = False) -> None:
        self._format = tool_format
        self._functions = frozenset(functions)
        self._is_bare = forced or tool_format.is_bare
        self._buffer = ""  # not looked at for good
        self._raw: list[str] = []  # what may be a call so far, as content if it is none
        self._scan = _JsonScan()
        self._found: list[tuple[str, str]] = []  # calls whose end marker is still to come
        self._num_calls = 0
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        # A state looks at the buffer and returns whether it got any further.
        self._state: Callable[[], bool] = self._start if self._is_bare else self._in_content

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """More of the output; returns the content and the calls that are now certain."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._taken()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """The output is complete; returns the rest. A last call may lack its end marker."""
        if self._found:
            self._tell()
        else:
            self._content += [*self._raw, self._buffer]
        self._raw, self._buffer = [], ""
        return self._taken()

    def _taken(self) -> tuple[str, list[ToolCallDelta]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _start(self) -> bool:
        return self._space_then(self._begin, self._no_call)

    def _begin(self) -> bool:
        """At something that is no white space, where a call may begin without a marker."""
        if self._buffer.startswith(self._format.marker):
            return self._move(len(self._format.marker), self._before_json)
        if self._format.marker.startswith(self._buffer):
            return False
        return self._begin_json() if self._buffer.startswith(self._format.opening) else self._no_call()

    def _in_content(self) -> bool:
        at = self._buffer.find(self._format.marker)
        found = at >= 0
        if not found:
            at = len(self._buffer) - overlap(self._buffer, self._format.marker)
        space = at - len(self._buffer[:at].rstrip(_SPACE))
        held = at - min(space, _MAX_SPACE)
        self._content.append(self._buffer[:held])
        self._buffer = self._buffer[held:]
        return found and self._move(at - held + len(self._format.marker), self._before_json)

    def _before_json(self) -> bool:
        return self._space_then(self._open, self._no_call)

    def _open(self) -> bool:
        return self._begin_json() if self._buffer.startswith(self._format.opening) else self._no_call()

    def _begin_json(self) -> bool:
        self._scan = _JsonScan()
        return self._go(self._in_json)

    def _in_json(self) -> bool:
        end = self._scan.feed(self._buffer)
        self._raw.append(self._buffer[:end])
        self._scan.text.append(self._raw[-1])
        if end is None:
            self._buffer = ""
            return False
        self._buffer = self._buffer[end:]
        calls = _calls("".join(self._scan.text), self._format)
        if calls is None or not self._functions.issuperset(name for name, _ in calls):
            return self._no_call()
        self._found = calls
        if self._format.end:
            return self._go(self._before_end)
        self._tell()
        return self._go(self._after)

    def _before_end(self) -> bool:
        return self._space_then(self._at_end, self._no_call)

    def _at_end(self) -> bool:
        end = self._format.end
        if self._buffer.startswith(end):
            self._buffer = self._buffer[len(end) :]
            self._tell()
            return self._go(self._after)
        return not end.startswith(self._buffer) and self._no_call()

    def _after(self) -> bool:
        """Behind a call: white space, and where calls have no markers a semicolon, may lead to another."""
        self._buffer = self._buffer.lstrip(_SPACE)
        if not self._buffer:
            return False
        if not self._is_bare:
            return self._go(self._in_content)
        return self._move(1, self._start) if self._buffer[0] == ";" else self._begin()

    def _space_then(self, then: Callable[[], bool], otherwise: Callable[[], bool]) -> bool:
        """Go over white space, once something else is there; `otherwise` when there is too much of it."""
        rest = self._buffer.lstrip(_SPACE)
        space = len(self._buffer) - len(rest)
        if space > _MAX_SPACE:
            return otherwise()
        return bool(rest) and self._move(space, self._state) and then()

    def _no_call(self) -> bool:
        """What may have been a call is content."""
        self._content += self._raw
        self._raw, self._found = [], []
        return self._go(self._in_content)

    def _tell(self) -> None:
        for name, arguments in self._found:
            function = FunctionCallDelta(name=name, arguments=arguments)
            call_id = new_call_id(self._format)
            self._calls.append(ToolCallDelta(index=self._num_calls, id=call_id, type="function", function=function))
            self._num_calls += 1
        self._raw, self._found = [], []

    def _move(self, length: int, state: Callable[[], bool]) -> bool:
        """Take so much of the buffer for part of a call."""
        if length:
            self._raw.append(self._buffer[:length])
        self._buffer = self._buffer[length:]
        return self._go(state)

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True


class _JsonScan:
    """Finds the end of a JSON object or array by its brackets, looking at each character once."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Where in `text`, which goes on from the last one, it ends; `None`: not in here."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_IN_STRING if self._in_string else _STRUCTURAL).search(text, at)
            if match is None:
                return None
            at = match.end()
            if match[0] == "\\":
                self._escaped = True
            elif match[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    return at
        return None


def _calls(text: str, tool_format: ToolFormat) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON text) of each call in a JSON object, or array of some; `None` if it is none."""
    try:
        parsed = _strict(text)
        if tool_format.opening == "{":
            return [_call(text)]
        if not parsed:
            return None
        return [_call(element) for element in _elements(text)]
    except (ValueError, RecursionError):
        return None


def _call(text: str) -> tuple[str, str]:
    """Raises `ValueError` if it is no call."""
    if not text.startswith("{"):
        raise ValueError("not an object")
    members = _members(text)
    name = json.loads(members.get("name", "null"))
    arguments = members.get("arguments", members.get("parameters", "{}"))
    value = _strict(arguments)
    if isinstance(value, str):  # JSON in JSON, as in OpenAI's own bodies
        arguments, value = value, _strict(value)
    if not isinstance(name, str) or not isinstance(value, dict):
        raise ValueError("not a call")
    return name, arguments


def _members(text: str) -> dict[str, str]:
    """The members of a valid JSON object, each value as it is written: numbers lose digits when they are parsed."""
    members = {}
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)  # behind the colon
        _, end = _DECODER.raw_decode(text, begin)
        members[key] = text[begin:end]
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members


def _elements(text: str) -> list[str]:
    """The elements of a valid JSON array, as they are written."""
    elements = []
    at = _skip(text, 1)
    while text[at] != "]":
        _, end = _DECODER.raw_decode(text, at)
        elements.append(text[at:end])
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return elements


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")  # Python would take it


_DECODER = json.JSONDecoder()
_strict = json.JSONDecoder(parse_constant=_no_constant).decode


def new_call_id(tool_format: ToolFormat) -> str:
    """Mistral's templates refuse ids that are not nine letters and digits."""
    number = uuid.uuid4().hex
    return number[:9] if tool_format.name == "mistral" else f"call_{number[:24]}"
