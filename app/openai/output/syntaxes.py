"""Syntaxes of tool calls: how models write them, as parsers and as grammars that force them.

A parser takes a call's text once it is certain that one begins: behind its marker, with the name of a function that may
be called, and where its arguments begin. From then on it emits the arguments as JSON while they arrive. Before, all
text stays in the reader, and becomes content if it is no call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from app.engine.sampling.token_text import overlap
from app.openai.output.json_text import call_header, stream_object, strict_json, take_object_rest
from app.openai.output.reader import SPACE, Emit, Reader, Reading

# Name of each function that may be called → JSON schema of its arguments.
Functions = Mapping[str, Mapping[str, Any]]
# A text as a terminal of a grammar: special tokens by their id.
Terminal = Callable[[str], str]

# The most calls of a forced answer.
MAX_PARALLEL_CALLS = 16
# JSON as templates write it, with one space after commas and colons. Forced calls allow no other white space.
_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SEPARATOR, NEWLINE = '", "', '"\\n"'  # as terminals
_NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"
# Characters of a name with its tags, or of a parameter's.
_MAX_TAG = 256


class ToolSyntax(Protocol):
    """A syntax.

    Attributes:
        markers: precede calls within content.
        bare: characters with which an answer may begin as a call, without a marker.
        literals: texts that are part of calls. Detokenisation must keep those that are special tokens.
    """

    @property
    def markers(self) -> tuple[str, ...]: ...
    @property
    def bare(self) -> str: ...
    @property
    def literals(self) -> tuple[str, ...]: ...

    def calls(self, r: Reader, at: int, emit: Emit, functions: Functions) -> Reading[bool]:
        """Take the calls that begin at `at`, behind a marker, and emit them. False if there is none: then nothing has
        been taken."""
        ...

    def grammar(self, functions: Functions, parallel: bool, terminal: Terminal) -> str:
        """Lark rules of which `calls` is an output that only calls these functions: once, or also several times if
        `parallel`."""
        ...


def listed(functions: Functions, rule: Callable[[str], str]) -> list[str]:
    """The rule `function`, any of the functions."""
    names = [f"function_{number}" for number in range(len(functions))]
    return [f"function: {' | '.join(names)}", *(f"{n}: {rule(f)}" for n, f in zip(names, functions, strict=True))]


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


def _several(one: str, separator: str, parallel: bool) -> str:
    return f"{one} ({separator} {one})~0..{MAX_PARALLEL_CALLS - 1}" if parallel else one


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Objects `{"name": …, "arguments": …}`, one or a list of them, behind a marker or bare.

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

    def grammar(self, functions: Functions, parallel: bool, terminal: Terminal) -> str:
        def rule(name: str) -> str:
            begin = f'{json.dumps(name)}, "{self.arguments}": '
            return f"{json.dumps(begin)} {closed_arguments(functions[name])}"

        rules = listed(functions, rule)
        rules.append('call: "{\\"name\\": " function "}"')
        parallel = parallel and not self.single
        begin = "" if self.bare else terminal(self.markers[0])
        space, close = json.dumps(self.space), terminal(self.close) if self.close else ""
        if self.as_list:
            start = f'{begin} "[" {_several("call", SEPARATOR, parallel)} "]" {close}'
        else:
            calls = _several("call", NEWLINE, parallel) if self.together else "call"
            parts = (begin, space if self.space else "", calls, space if self.space else "", close)
            rules.append("marked: " + " ".join(filter(None, parts)))
            start = _several("marked", NEWLINE, parallel and not self.together)
        return "\n".join([f"calls: {start}", *rules])


@dataclass(frozen=True, slots=True)
class NamedJson:
    """A name and a JSON object, each behind a mark.

    Attributes:
        markers: of a section of calls, or of each call if there is no `begin`.
        begin: of each call in its section.
        name: pattern of what precedes `mark`, with the group `name`.
        mark: between name and arguments.
        ends, close: follow a call and the section.
        written, space: of a forced call, its name with `{name}`, and around the mark and behind the arguments.
    """

    markers: tuple[str, ...]
    begin: str
    mark: str
    ends: tuple[str, ...] = ()
    close: str = ""
    name: str = _NAME
    written: str = "{name}"
    space: str = ""
    bare: str = ""

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.markers, self.begin, *re.findall(r"<[^<>()?]+>", self.name), self.mark, *self.ends, self.close)

    def calls(self, r: Reader, at: int, emit: Emit, functions: Functions) -> Reading[bool]:
        begin, num_calls = self.begin, 0
        while True:
            at = yield from r.behind_space(at)
            if begin:
                if not (yield from r.literal(at, begin)):
                    break
                at += len(begin)
            while (found := r.text.find(self.mark, at, at + _MAX_TAG)) < 0:
                if len(r.text) - at >= _MAX_TAG or not (yield from r.has(len(r.text))):
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

    def grammar(self, functions: Functions, parallel: bool, terminal: Terminal) -> str:
        mark = f"{self.space}{self.mark}{self.space}"

        def rule(name: str) -> str:
            return f"{terminal(self.written.format(name=name) + mark)} {closed_arguments(functions[name])}"

        begin = terminal(self.begin or self.markers[0])
        end = terminal(self.space + "".join(self.ends)) if self.ends else ""
        calls = _several("call", "", parallel)
        if self.begin:
            calls = f"{terminal(self.markers[0])} {calls} {terminal(self.close)}"
        return "\n".join([f"calls: {calls}", f"call: {begin} function {end}", *listed(functions, rule)])


@dataclass(frozen=True, slots=True)
class TaggedParameters:
    """A name and parameters between tags. Values are texts, or JSON where the function's schema says so.

    Attributes:
        markers: of a call, or of a section of calls.
        name, key: patterns of a function's and a parameter's name with their tags, with the groups `name` and `key`.
        value_end, end, close: follow a value, a call, and the section.
        written: of a forced call's name, of a parameter's key, and of a value's end.
    """

    markers: tuple[str, ...]
    name: re.Pattern[str]
    key: re.Pattern[str]
    value_end: str
    end: str
    written: tuple[str, str, str]
    close: str = ""
    bare: str = ""

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.markers, *re.findall(r"<[^<>{}]+>", "".join(self.written)), self.end, self.close)

    def calls(self, r: Reader, at: int, emit: Emit, functions: Functions) -> Reading[bool]:
        num_calls = 0
        while True:
            at = yield from r.behind_space(at)
            match = yield from _matched(r, at, self.name)
            if match is None or match["name"] not in functions:
                break
            r.take(match.end())
            emit("call", match["name"])
            yield from self._parameters(r, emit, functions[match["name"]])
            num_calls, at = num_calls + 1, 0
        if num_calls:
            yield from r.take_literal(self.close)
        return num_calls > 0

    def _parameters(self, r: Reader, emit: Emit, schema: Mapping[str, Any]) -> Reading[None]:
        """Take parameters, and emit them as members of an object."""
        before = "{"
        while True:
            at = yield from r.behind_space(0)
            match = yield from _matched(r, at, self.key)
            if match is None:
                break
            r.take(match.end())
            emit("arguments", f"{before}{json.dumps(match['key'], ensure_ascii=False)}: ")
            before = ", "
            if _is_text(schema, match["key"]):
                yield from self._stream_text(r, emit)
            else:
                while (at := r.text.find(self.value_end)) < 0 and (yield from r.has(len(r.text))):
                    pass
                text = r.take(len(r.text) if at < 0 else at)
                r.take(len(self.value_end))
                emit("arguments", _as_json(text))
        emit("arguments", "{}" if before == "{" else "}")
        yield from r.take_literal(self.end)

    def _stream_text(self, r: Reader, emit: Emit) -> Reading[None]:
        """Emit a value as a JSON string while it arrives, without one newline at its begin and one at its end."""
        if (yield from r.character(0)) == "\n":
            r.take(1)
        emit("arguments", '"')
        end = "\n" + self.value_end
        while (at := r.text.find(self.value_end)) < 0:
            held = 0 if r.ended else max(overlap(r.text, end), overlap(r.text, self.value_end))
            emit("arguments", _escaped(r.take(len(r.text) - held)))
            if not (yield from r.has(len(r.text))):
                emit("arguments", _escaped(r.take(len(r.text))) + '"')
                return
        emit("arguments", _escaped(r.take(at).removesuffix("\n")) + '"')
        r.take(len(self.value_end))

    def grammar(self, functions: Functions, parallel: bool, terminal: Terminal) -> str:
        """A text's `maxLength` and `pattern` are not enforced: it ends at the tag."""
        begin, key, value_end = self.written
        rules: list[str] = []

        def parameter(schema: Mapping[str, Any], of: str) -> str:
            name, value = f"parameter_{len(rules)}", schema["properties"][of]
            if not _is_text(schema, of):
                body = f"{closed_arguments(_with_definitions(schema, value))} {terminal(value_end)}"
            elif "enum" in value:
                choices = (json.dumps(choice) for choice in value["enum"] if isinstance(choice, str))
                body = f"({' | '.join(choices)}) {terminal(value_end)}"
            else:
                body = "text"
            rules.append(f"{name}: {terminal(key.format(key=of))} {body}")
            return name if of in (schema.get("required") or ()) else f"{name}?"

        def rule(name: str) -> str:
            schema = functions[name]
            parameters = [parameter(schema, of) for of in schema.get("properties") or {}]
            return " ".join([terminal(begin.format(name=name)), *parameters, end])

        is_section = not begin.startswith(self.markers[0])
        end = terminal(self.end if is_section or not self.close else f"{self.end}\n{self.close}")
        called = listed(functions, rule)
        calls = _several("function", NEWLINE, parallel)
        if is_section:
            calls = f"{terminal(self.markers[0])} {NEWLINE} {calls} {NEWLINE} {terminal(self.close)}"
        return "\n".join([f"calls: {calls}", *called, *rules, up_to("text", value_end, terminal)])


def up_to(rule: str, end: str, terminal: Terminal) -> str:
    """A grammar's rule for any text up to `end`, which is part of it."""
    written = terminal(end)
    if (special := written.find("<[")) >= 0:  # no text contains a special token
        return f"{rule}: /(?s:.*)/ {written[special:]}"
    return f"{rule}[suffix={written}]: /(?s:.*)/"


def _with_definitions(schema: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema, with the definitions that it may refer to."""
    return dict(value) | {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _is_text(schema: Mapping[str, Any], key: str) -> bool:
    properties = schema.get("properties")
    of_key = properties.get(key) if isinstance(properties, Mapping) else None
    return isinstance(of_key, Mapping) and of_key.get("type") == "string"


def _as_json(text: str) -> str:
    """A value that is JSON, or else a text."""
    try:
        strict_json(text)
    except ValueError:
        return json.dumps(text.removeprefix("\n").removesuffix("\n"), ensure_ascii=False)
    return text.strip(SPACE)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _matched(r: Reader, at: int, pattern: re.Pattern[str]) -> Reading[re.Match[str] | None]:
    """The match at `at` of a pattern that nothing behind its match can change."""
    while (match := pattern.match(r.text, at, at + _MAX_TAG)) is None:
        if len(r.text) - at >= _MAX_TAG or not (yield from r.has(len(r.text))):
            return None
    return match


_PYTHON_NAME = re.compile(rf"\s*{_NAME}\(")
_PYTHON_KEY = re.compile(r"\s*(?P<key>[A-Za-z_]\w{0,63})\s*=\s*(?=\S)")


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A list of calls as in Python: `[name(key=value, …), …]`. Each argument is emitted when it is complete."""

    markers: tuple[str, ...] = ()
    close: str = ""
    bare: str = "["

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.markers, self.close)

    def calls(self, r: Reader, at: int, emit: Emit, functions: Functions) -> Reading[bool]:
        at = yield from r.behind_space(at)
        before, num_calls = "[", 0
        while (yield from r.character(at)) == before:
            match = yield from _matched(r, at + 1, _PYTHON_NAME)
            if match is None or match["name"] not in functions:
                return num_calls > 0
            r.take(match.end())
            emit("call", match["name"])
            yield from self._arguments(r, emit)
            num_calls += 1
            at = yield from r.behind_space(0)
            before = ","
        if num_calls:
            yield from r.take_literal("]")
            yield from r.take_literal(self.close)
        return num_calls > 0

    def _arguments(self, r: Reader, emit: Emit) -> Reading[None]:
        before = "{"
        while (match := (yield from _matched(r, 0, _PYTHON_KEY))) is not None:
            r.take(match.end())
            value = _from_python(r.take((yield from _python_end(r))).strip(SPACE))
            emit("arguments", f"{before}{json.dumps(match['key'])}: {value}")
            before = ", "
            if (yield from r.character(0)) != ",":
                break
            r.take(1)
        emit("arguments", "{}" if before == "{" else "}")
        yield from r.take_literal(")")

    def grammar(self, functions: Functions, parallel: bool, terminal: Terminal) -> str:
        def rule(name: str) -> str:
            schema = functions[name]
            properties, required = schema.get("properties") or {}, schema.get("required") or ()
            values = {of: closed_arguments(_with_definitions(schema, properties[of])) for of in properties}
            first = [of for of in properties if of in required]
            parts = [f"{json.dumps((', ' if i else '') + of + '=')} {values[of]}" for i, of in enumerate(first)]
            others = [of for of in properties if of not in required]
            if first:
                parts += [f"({json.dumps(f', {of}=')} {values[of]})?" for of in others]
            elif others:  # one at most: any of them may be the first, without a comma
                parts.append(f"({' | '.join(f'{json.dumps(of + chr(61))} {values[of]}' for of in others)})?")
            return " ".join([json.dumps(f"{name}("), *parts, '")"'])

        calls = f'"[" {_several("function", SEPARATOR, parallel)} "]"'
        if self.markers:
            calls = f"{terminal(self.markers[0])} {calls} {terminal(self.close)}"
        return "\n".join([f"calls: {calls}", *listed(functions, rule)])


def _from_python(text: str) -> str:
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return _as_json(text)


def _python_end(r: Reader) -> Reading[int]:
    """The index of the comma or bracket behind the value with which the text begins."""
    depth, quote, at = 0, "", 0
    while character := (yield from r.character(at)):
        if quote:
            at += character == "\\"
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif depth and character in ")]}":
            depth -= 1
        elif character in ",)]}":
            return at
        at += 1
    return len(r.text)
