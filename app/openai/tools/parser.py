"""Tool use: which tools the output of a request may call, and the parser of its calls.

The parser splits a model's output into content and calls, incrementally.

Text that is not a complete and valid call of a known function is content, to the last character; only white space next
to a call is dropped. The result does not depend on how the text is cut into pieces.

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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from app.engine.sampling.params import Structure
from app.engine.sampling.token_text import overlap
from app.errors import RequestError
from app.openai.base import check_text
from app.openai.tools.bodies import FunctionCall, NamedToolChoice, Tool, ToolCall, ToolChoice
from app.openai.tools.formats import ToolFormat, tool_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# White space next to markers belongs to them and is held back until the next text decides. More characters than this
# are content.
_MAX_SPACE = 64
_SPACE = " \t\r\n"
_STRUCTURAL = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class ToolCallParser:
    """Finds the calls in one output. Each call is returned complete.

    Args:
        functions: names of the functions that may be called.
        forced: the output is constrained to calls, so the first marker may be missing.

    Attributes:
        undecided: the text that no state has consumed yet.
    """

    def __init__(self, tool_format: ToolFormat, functions: Collection[str], *, forced: bool = False) -> None:
        self.undecided = ""
        self._format = tool_format
        self._functions = frozenset(functions)
        self._is_bare = forced or tool_format.is_bare
        self._raw: list[str] = []  # consumed text of a possible call: content if it is malformed
        self._scan = _JsonScan()
        self._found: list[tuple[str, str]] = []  # calls that wait for their end marker
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        # A state looks at the undecided text and returns whether it has consumed some or changed the state.
        self._state: Callable[[], bool] = self._start if self._is_bare else self._in_content

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Append output; returns the content and the calls that are now certain."""
        self.undecided += text
        while self.undecided and self._state():
            pass
        return self._take_results()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """End the output; returns the rest. The last call may lack its end marker."""
        if self._found:
            self._emit()
        else:
            self._content += [*self._raw, self.undecided]
        self._raw, self.undecided = [], ""
        return self._take_results()

    def _take_results(self) -> tuple[str, list[ToolCall]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _start(self) -> bool:
        return self._space_then(self._begin)

    def _begin(self) -> bool:
        """At a character that is not white space, where a call may begin without a marker."""
        if self.undecided.startswith(self._format.marker):
            return self._consume(len(self._format.marker), self._before_json)
        return not self._format.marker.startswith(self.undecided) and self._open()

    def _in_content(self) -> bool:
        at = self.undecided.find(self._format.marker)
        found = at >= 0
        if not found:
            at = len(self.undecided) - overlap(self.undecided, self._format.marker)
        space = at - len(self.undecided[:at].rstrip(_SPACE))
        held = at - min(space, _MAX_SPACE)
        self._content.append(self.undecided[:held])
        self.undecided = self.undecided[held:]
        return found and self._consume(at - held + len(self._format.marker), self._before_json)

    def _before_json(self) -> bool:
        return self._space_then(self._open)

    def _open(self) -> bool:
        if not self.undecided.startswith(self._format.opening):
            return self._reject()
        self._scan = _JsonScan()
        return self._go(self._in_json)

    def _in_json(self) -> bool:
        end = self._scan.feed(self.undecided)
        self._raw.append(self.undecided[:end])
        self._scan.text.append(self._raw[-1])
        if end is None:
            self.undecided = ""
            return False
        self.undecided = self.undecided[end:]
        calls = _calls("".join(self._scan.text), self._format)
        if calls is None or not self._functions.issuperset(name for name, _ in calls):
            return self._reject()
        self._found = calls
        if self._format.end:
            return self._go(self._before_end)
        self._emit()
        return self._go(self._after)

    def _before_end(self) -> bool:
        return self._space_then(self._at_end)

    def _at_end(self) -> bool:
        end = self._format.end
        if self.undecided.startswith(end):
            self.undecided = self.undecided[len(end) :]
            self._emit()
            return self._go(self._after)
        return not end.startswith(self.undecided) and self._reject()

    def _after(self) -> bool:
        """Behind a call: white space, and a semicolon where calls have no markers, may precede another call."""
        self.undecided = self.undecided.lstrip(_SPACE)
        if not self.undecided:
            return False
        if not self._is_bare:
            return self._go(self._in_content)
        return self._consume(1, self._start) if self.undecided[0] == ";" else self._begin()

    def _space_then(self, then: Callable[[], bool]) -> bool:
        """Consume white space once other text follows; reject the call if there is too much of it."""
        rest = self.undecided.lstrip(_SPACE)
        space = len(self.undecided) - len(rest)
        if space > _MAX_SPACE:
            return self._reject()
        return bool(rest) and self._consume(space, self._state) and then()

    def _reject(self) -> bool:
        """Turn the text of a possible call into content."""
        self._content += self._raw
        self._raw, self._found = [], []
        return self._go(self._in_content)

    def _emit(self) -> None:
        for name, arguments in self._found:
            function = FunctionCall(name=name, arguments=arguments)
            self._calls.append(ToolCall(id=new_call_id(self._format), function=function))
        self._raw, self._found = [], []

    def _consume(self, length: int, state: Callable[[], bool]) -> bool:
        if length:
            self._raw.append(self.undecided[:length])
        self.undecided = self.undecided[length:]
        return self._go(state)

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True


class _JsonScan:
    """Finds the end of a JSON object or array by its brackets, reading each character once."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """The end's index in `text`, which continues the previous one; `None` if the end is not in it."""
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
    """(Name, arguments as JSON text) of each call in a JSON object, or in an array of them; `None` if malformed."""
    try:
        parsed = _strict(text)
        if tool_format.opening == "{":
            return [_call(text)]
        return [_call(element) for _, element in _values(text)] if parsed else None
    except (ValueError, RecursionError):
        return None


def _call(text: str) -> tuple[str, str]:
    """Raises `ValueError` if the JSON is not a call."""
    if not text.startswith("{"):
        raise ValueError("not an object")
    members = dict(_values(text))
    name = json.loads(members.get("name", "null"))
    arguments = members.get("arguments", members.get("parameters", "{}"))
    value = _strict(arguments)
    if isinstance(value, str):  # JSON in JSON, as in OpenAI's own bodies
        arguments, value = check_text(value), _strict(value)  # an unpaired surrogate could not be sent
    if not isinstance(name, str) or not isinstance(value, dict):
        raise ValueError("not a call")
    return name, arguments


def _values(text: str) -> Iterator[tuple[str, str]]:
    """(Key, value as written) of each member of a valid JSON object; in an array keys are empty. Parsed numbers would
    lose digits."""
    at = _skip_space(text, 1)
    while text[at] not in "}]":
        key = ""
        if text[0] == "{":
            key, at = _DECODER.raw_decode(text, at)
            at = _skip_space(text, _skip_space(text, at) + 1)  # behind the colon
        _, end = _DECODER.raw_decode(text, at)
        yield key, text[at:end]
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")  # Python accepts NaN and Infinity


_DECODER = json.JSONDecoder()
_strict = json.JSONDecoder(parse_constant=_no_constant).decode


def new_call_id(tool_format: ToolFormat) -> str:
    """An id for a call. Mistral's templates require nine letters and digits."""
    number = uuid.uuid4().hex
    return number[:9] if tool_format.name == "mistral" else f"call_{number[:24]}"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request's output may call tools.

    Attributes:
        functions: names of the functions that may be called.
        structure: the grammar of the output when a call is required.
    """

    format: ToolFormat
    functions: frozenset[str]
    structure: Structure | None

    @property
    def kept_token_ids(self) -> frozenset[int]:
        """Special tokens that are part of calls: detokenisation keeps their text."""
        return frozenset(token_id for _, token_id in self.format.special_tokens)

    def parser(self) -> ToolCallParser:
        """A parser for one output."""
        return ToolCallParser(self.format, self.functions, forced=self.structure is not None)


def tool_use(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
) -> ToolUse | None:
    """Validate a body's `tools`, `tool_choice` and `parallel_tool_calls`.

    Returns:
        `None` if all output is content: there are no tools to call, or the model's format is not supported.

    Raises:
        RequestError: the choice is not among the tools, two tools have one name, parameters are not the schema of an
            object, the template does not use tools, or a call is required in a format that is not supported.
    """
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    required = named is not None or choice == "required"
    if not tools:
        if required:
            raise RequestError("tool_choice requires a call, but there are no tools", "tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    for tool in tools:
        tool.function.arguments_schema()
        if names.count(tool.function.name) > 1:
            raise RequestError(f"two tools have the name {tool.function.name!r}; names must be unique", "tools")
    if named is not None and named not in names:
        raise RequestError(f"tool_choice names {named!r}, which is not among the tools", "tool_choice")
    if choice == "none":
        return None
    syntax = tool_format(tokenizer)
    if syntax is None:
        if required:
            raise RequestError("this model's format of calls is not supported; use 'auto' or 'none'", "tool_choice")
        return None
    callable_tools = [tool for tool in tools if named in (None, tool.function.name)]
    parallel = parallel is not False and named is None
    structure = syntax.structure(callable_tools, parallel) if required else None
    return ToolUse(syntax, frozenset(tool.function.name for tool in callable_tools), structure)
