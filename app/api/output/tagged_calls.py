"""Syntax of tool calls whose parameters stand between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from folio.app.api.output.reader import SPACE, Emit, Reader, Reading
from folio.app.api.output.syntaxes import (
    NEWLINE,
    Functions,
    Terminal,
    as_json,
    closed_arguments,
    listed,
    matched,
    parameters_of,
    several,
    up_to,
    with_definitions,
)
from folio.app.engine.sampling.token_text import overlap


@dataclass(frozen=True, slots=True)
class TaggedParameters:
    """A name and parameters between tags. Values are texts, or JSON where the function's schema says so.

    Attributes:
        markers: of a call, or of a section of calls.
        named, key: patterns of a function's and a parameter's name with their tags, with the groups `name` and `key`.
        value_end, end, close: follow a value, a call, and the section.
        written: a forced call's name, a parameter's key, and a value's end, as the model writes them.
    """

    markers: tuple[str, ...]
    named: re.Pattern[str]
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
            match = yield from matched(r, at, self.named)
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
            match = yield from matched(r, at, self.key)
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
                r.is_cut = at < 0
                emit("arguments", text.strip(SPACE) if r.is_cut else as_json(text))
            if r.is_cut:
                return
        emit("arguments", "{}" if before == "{" else "}")
        yield from r.take_literal(self.end)

    def _stream_text(self, r: Reader, emit: Emit) -> Reading[None]:
        """Emit a value as a JSON string while it arrives, without one newline at its beginning and one at its end."""
        if (yield from r.character(0)) == "\n":
            r.take(1)
        emit("arguments", '"')
        end = "\n" + self.value_end
        while (at := r.text.find(self.value_end)) < 0:
            held = 0 if r.ended else max(overlap(r.text, end), overlap(r.text, self.value_end))
            emit("arguments", _escaped(r.take(len(r.text) - held)))
            if not (yield from r.has(len(r.text))):
                emit("arguments", _escaped(r.take(len(r.text))))
                r.is_cut = True
                return
        emit("arguments", _escaped(r.take(at).removesuffix("\n")) + '"')
        r.take(len(self.value_end))

    def grammar(self, functions: Functions, parallel: bool, terminal: Terminal, *, marked: bool = True) -> str:
        """A text's `maxLength` and `pattern` are not enforced: it ends at the tag."""
        begin, key, value_end = self.written
        is_section = not begin.startswith(self.markers[0])
        if not marked:
            begin = begin.removeprefix(self.markers[0])
        rules: list[str] = []

        def parameter(schema: Mapping[str, Any], of: str) -> str:
            name, value = f"parameter_{len(rules)}", schema["properties"][of]
            if not _is_text(schema, of):
                body = f"{closed_arguments(with_definitions(schema, value))} {terminal(value_end)}"
            elif choices := _choices(value):
                body = f"({' | '.join(choices)}) {terminal(value_end)}"
            else:
                body = "text"
            rules.append(f"{name}: {terminal(key.format(key=of))} {body}")
            return name if of in (schema.get("required") or ()) else f"{name}?"

        def rule(name: str) -> str:
            schema = functions[name]
            if (given := parameters_of(schema)) is None:
                return " ".join([terminal(begin.format(name=name)), "any*", end])
            parameters = [parameter(schema, of) for of in given]
            return " ".join([terminal(begin.format(name=name)), *parameters, end])

        end = terminal(self.end if is_section or not self.close else f"{self.end}\n{self.close}")
        called = listed(functions, rule)
        calls = several("function", NEWLINE, parallel) if marked or is_section else "function"
        if is_section:
            marker = terminal(self.markers[0]) if marked else ""
            calls = f"{marker} {NEWLINE} {calls} {NEWLINE} {terminal(self.close)}"
        before, behind = key.split("{key}")
        rules.append(f'any: {terminal(before)} /[^<>"\\n]{{1,128}}/ {terminal(behind)} text')
        return "\n".join([f"calls: {calls}", *called, *rules, up_to("text", value_end, terminal)])

    def within_text(self, functions: Functions, terminal: Terminal) -> tuple[str, str]:
        return self.grammar(functions, True, terminal, marked=False), ""


def _is_text(schema: Mapping[str, Any], key: str) -> bool:
    properties = schema.get("properties")
    of_key = properties.get(key) if isinstance(properties, Mapping) else None
    return isinstance(of_key, Mapping) and of_key.get("type") == "string"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _choices(schema: Mapping[str, Any]) -> list[str]:
    return [json.dumps(choice) for choice in schema.get("enum") or () if isinstance(choice, str)]
