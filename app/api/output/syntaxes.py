"""Syntaxes of tool calls: how models write them, as parsers and as grammars that force them.

A parser takes a call's text once a call is certain: after its marker, the name of a function that may be called, and
the beginning of its arguments. From then on it emits the arguments as JSON while they arrive. Before that, all text
stays in the reader, and becomes content if it is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from folio.app.api.output.json_text import call_header, stream_object, strict_json, take_object_rest
from folio.app.api.output.reader import SPACE, Emit, Reader, Reading

# Name of each function that may be called → JSON schema of its arguments.
Functions = Mapping[str, Mapping[str, Any]]
# A text as a terminal of a grammar: special tokens by their id.
Terminal = Callable[[str], str]

# The most calls of a forced answer.
MAX_PARALLEL_CALLS = 16
# JSON as templates write it, with one space after commas and colons. Forced calls allow no other white space.
_AS_TEMPLATES_WRITE = {"lenient": True, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GAP = r"[ \t\r\n]*"
SEPARATOR, NEWLINE = '", "', '"\\n"'  # as terminals
NAME = r"(?P<name>[A-Za-z0-9_.-]{1,128})"  # as `FunctionName`
# The most characters of a function's or a parameter's name with its tags.
MAX_TAG = 256


class ToolSyntax(Protocol):
    """A syntax.

    Attributes:
        markers: precede calls within content.
        bare: characters with which an answer may begin as a call, without a marker.
        literals: texts that are part of calls. Detokenisation must keep those that are special tokens.
        named: pattern of a call's beginning, name included, with the group `name`.
    """

    @property
    def markers(self) -> tuple[str, ...]: ...
    @property
    def bare(self) -> str: ...
    @property
    def literals(self) -> tuple[str, ...]: ...
    @property
    def named(self) -> re.Pattern[str]: ...

    def calls(self, r: Reader, at: int, emit: Emit, functions: Functions) -> Reading[bool]:
        """Take the calls that begin at `at`, after a marker, and emit them. False if there is none: then nothing has
        been taken."""
        ...

    def grammar(self, functions: Functions, parallel: bool, terminal: Terminal, *, marked: bool = True) -> str:
        """Lark rules, of which `calls` is an output of calls alone: one call, or also several if `parallel`. A function
        whose schema declares no properties may get any. Without `marked` the first call's marker is left out."""
        ...

    def within_text(self, functions: Functions, terminal: Terminal) -> tuple[str, str]:
        """Lark rules, of which `calls` follows a marker within free text, and `bare` is a call without a marker. And a
        pattern of the text with which calls without a marker begin; empty if there are none."""
        ...


def listed(functions: Functions, rule: Callable[[str], str], of: str = "function") -> list[str]:
    """The rule `of`, which is the rule of any function, and the functions' rules."""
    names = [f"{of}_{number}" for number in range(len(functions))]
    return [f"{of}: {' | '.join(names)}", *(f"{n}: {rule(f)}" for n, f in zip(names, functions, strict=True))]


def parameters_of(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Name of each parameter that a function may get → its schema; `None`: any."""
    given = schema.get("properties")
    if given is None and schema.get("additionalProperties") is not False:
        return None
    return {name: value for name, value in (given or {}).items() if value is not False}


def any_of(functions: Functions) -> str:
    """A pattern of the functions' names."""
    return "|".join(map(re.escape, functions))


def closed_arguments(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(closed(dict(schema)) | {"x-guidance": _AS_TEMPLATES_WRITE})


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with `additionalProperties` false where it is not given.

    JSON schema allows additional properties, and a model that must continue may invent them without end. Objects
    that combine several schemas stay unchanged, since none of these names all properties.
    """
    if schema.keys() & {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties"}:
        return schema
    result = dict(schema)
    if isinstance(properties := schema.get("properties"), dict):
        result["properties"] = {name: closed(v) if isinstance(v, dict) else v for name, v in properties.items()}
        required = schema.get("required")
        if not isinstance(required, list) or all(name in properties for name in required):
            result.setdefault("additionalProperties", False)
    if isinstance(items := schema.get("items"), dict):
        result["items"] = closed(items)
    return result


def several(one: str, separator: str, parallel: bool) -> str:
    return f"{one} ({separator} {one})~0..{MAX_PARALLEL_CALLS - 1}" if parallel else one


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Objects `{"name": …, "arguments": …}`, one or a list of them, after a marker or bare.

    Attributes:
        close: follows a call or list.
        arguments: key of the arguments in forced calls.
        as_list: forced calls are a list.
        space: around a forced call, between marker and `close`.
        single: the model is trained to make one call.
        together: the calls, a line each, share one marker and one `close`.
    """

    markers: tuple[str, ...]
    close: str = ""
    bare: str = ""
    arguments: str = "arguments"
    as_list: bool = False
    space: str = ""
    single: bool = False
    together: bool = False

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.markers, self.close)

    @property
    def named(self) -> re.Pattern[str]:
        return re.compile(rf'"name": "{NAME}"')

    def calls(self, r: Reader, at: int, emit: Emit, functions: Functions) -> Reading[bool]:
        at = yield from r.behind_space(at)
        is_list = (yield from r.character(at)) == "["
        if is_list:
            at = yield from r.behind_space(at + 1)
        header = yield from call_header(r, at, functions)
        if header is None:
            return False
        while header is not None:
            r.take(header.end)
            emit("call", header.name)
            if header.arguments is None:
                yield from stream_object(r, emit)
            else:
                emit("arguments", header.arguments)
            yield from take_object_rest(r)
            header = None
            at = yield from r.behind_space(0)
            following = yield from r.character(at)
            if is_list and following == ",":
                at = yield from r.behind_space(at + 1)
                header = yield from call_header(r, at, functions)
            elif not is_list and self.close and following == "{":
                header = yield from call_header(r, at, functions)
        if is_list:
            yield from r.take_literal("]")
        yield from r.take_literal(self.close)
        return True

    def grammar(self, functions: Functions, parallel: bool, terminal: Terminal, *, marked: bool = True) -> str:
        def rule(name: str) -> str:
            begin = f'{json.dumps(name)}, "{self.arguments}": '
            return f"{json.dumps(begin)} {closed_arguments(functions[name])}"

        rules = listed(functions, rule)
        rules.append('call: "{\\"name\\": " function "}"')
        parallel = parallel and not self.single
        begin = "" if self.bare or not marked else terminal(self.markers[0])
        space, close = json.dumps(self.space), terminal(self.close) if self.close else ""
        if self.as_list:
            start = f'{begin} "[" {several("call", SEPARATOR, parallel)} "]" {close}'
        else:
            calls = several("call", NEWLINE, parallel) if self.together else "call"
            parts = (begin, space if self.space else "", calls, space if self.space else "", close)
            rules.append("marked: " + " ".join(filter(None, parts)))
            start = several("marked", NEWLINE, parallel and not self.together)
        return "\n".join([f"calls: {start}", *rules])

    def within_text(self, functions: Functions, terminal: Terminal) -> tuple[str, str]:
        """The rules allow the white space and the keys that `calls` reads."""
        key = f'(arguments|parameters)"{_GAP}:{_GAP}'

        def object_of(name: str, before: str = "") -> str:
            head = f'{before}{_GAP}\\{{{_GAP}"name"{_GAP}:{_GAP}"{re.escape(name)}"{_GAP},{_GAP}"{key}'
            return f"/{head}/ {closed_arguments(functions[name])} /{_GAP}\\}}/"

        several_objects = several("function", f"/{_GAP},/", True)
        end = f"/{_GAP}/ {terminal(self.close)}" if self.close else ""
        end = f"({end})?" if self.bare else end
        rules = [
            f"calls: ({several('function', '', bool(self.close))} | /{_GAP}\\[/ {several_objects} /{_GAP}\\]/) {end}"
        ]
        rules += listed(functions, object_of)
        if not self.bare:
            return "\n".join(rules), ""
        # After another call, as `OutputParser` reads them.
        before = f"{_GAP}(;{_GAP})?" + (r"\[" if self.bare == "[" else "")
        rules += listed(functions, lambda name: object_of(name, before), "first")
        others = f"(/{_GAP},/ function)~0..{MAX_PARALLEL_CALLS - 1} /{_GAP}\\]/ {end}" if self.bare == "[" else ""
        rules.append(f"bare: first {others}")
        return "\n".join(rules), f'{before}{_GAP}\\{{{_GAP}"name"{_GAP}:{_GAP}"({any_of(functions)})"'


@dataclass(frozen=True, slots=True)
class NamedJson:
    """A name and a JSON object, each after a mark.

    Attributes:
        markers: of a section of calls, or of each call if there is no `begin`.
        begin: of each call in its section.
        name: pattern of what precedes `mark`, with the group `name`.
        mark: between name and arguments.
        ends, close: follow a call and the section.
        written: the name of a forced call, with `{name}` and `#` for a number.
        space: of a forced call, around the mark and after the arguments.
    """

    markers: tuple[str, ...]
    begin: str
    mark: str
    ends: tuple[str, ...] = ()
    close: str = ""
    name: str = NAME
    written: str = "{name}"
    space: str = ""
    bare: str = ""

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.markers, self.begin, *re.findall(r"<[^<>()?]+>", self.name), self.mark, *self.ends, self.close)

    @property
    def named(self) -> re.Pattern[str]:
        begin = re.escape(self.begin or self.markers[0])
        return re.compile(rf"{begin}\s*{self.name}\s*{re.escape(self.mark[0])}")

    def calls(self, r: Reader, at: int, emit: Emit, functions: Functions) -> Reading[bool]:
        begin, num_calls = self.begin, 0
        while True:
            at = yield from r.behind_space(at)
            if begin:
                if not (yield from r.literal(at, begin)):
                    break
                at += len(begin)
            while (found := r.text.find(self.mark, at, at + MAX_TAG)) < 0:
                if len(r.text) - at >= MAX_TAG or not (yield from r.has(len(r.text))):
                    return num_calls > 0
            match = re.fullmatch(self.name, r.text[at:found].strip(SPACE))
            at = yield from r.behind_space(found + len(self.mark))
            if match is None or match["name"] not in functions or (yield from r.character(at)) != "{":
                return num_calls > 0
            r.take(at)
            emit("call", match["name"])
            yield from stream_object(r, emit)
            for literal in self.ends:
                yield from r.take_literal(literal)
            num_calls, at = num_calls + 1, 0
            begin = self.begin or self.markers[0]
        if num_calls:
            yield from r.take_literal(self.close)
        return num_calls > 0

    def grammar(self, functions: Functions, parallel: bool, terminal: Terminal, *, marked: bool = True) -> str:
        mark = f"{self.space}{self.mark}{self.space}"

        def rule(name: str) -> str:
            head = " /[0-9]+/ ".join(map(terminal, (self.written.format(name=name) + mark).split("#")))
            return f"{head} {closed_arguments(functions[name])}"

        marker = terminal(self.markers[0])
        end = terminal(self.space + "".join(self.ends)) if self.ends else ""
        begin = terminal(self.begin) if self.begin else marker
        calls = several("call", f"{NEWLINE}?" if self.begin else "", parallel)
        if self.begin:
            calls = f"{marker if marked else ''} {calls} {terminal(self.close)}"
        elif not marked:
            calls = f"function {end}"
        return "\n".join([f"calls: {calls}", f"call: {begin} function {end}", *listed(functions, rule)])

    def within_text(self, functions: Functions, terminal: Terminal) -> tuple[str, str]:
        return self.grammar(functions, True, terminal, marked=False), ""


def up_to(rule: str, end: str, terminal: Terminal) -> str:
    """A grammar's rule for any text up to `end`, which is part of it."""
    written = terminal(end)
    if (special := written.find("<[")) >= 0:  # no text contains a special token
        return f"{rule}: /(?s:.*)/ {written[special:]}"
    return f"{rule}[suffix={written}]: /(?s:.*)/"


def with_definitions(schema: Mapping[str, Any], value: Mapping[str, Any] | bool) -> dict[str, Any]:
    """A part of a schema, with the definitions that it may refer to."""
    return (dict(value) if isinstance(value, Mapping) else {}) | {
        key: schema[key] for key in ("$defs", "definitions") if key in schema
    }


def as_json(text: str) -> str:
    """A value that is JSON, or else a text."""
    try:
        strict_json(text)
    except ValueError:
        return json.dumps(text.removeprefix("\n").removesuffix("\n"), ensure_ascii=False)
    return text.strip(SPACE)


def matched(r: Reader, at: int, pattern: re.Pattern[str]) -> Reading[re.Match[str] | None]:
    """The match at `at` of a pattern. Text after a match must not be able to change it."""
    while (match := pattern.match(r.text, at, at + MAX_TAG)) is None:
        if len(r.text) - at >= MAX_TAG or not (yield from r.has(len(r.text))):
            return None
    return match
