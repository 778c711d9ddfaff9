"""Syntax of tool calls that are written as in Python."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass

from app.openai.output.reader import SPACE, Emit, Reader, Reading
from app.openai.output.syntaxes import (
    NAME,
    SEPARATOR,
    Functions,
    Terminal,
    as_json,
    closed_arguments,
    listed,
    matched,
    several,
    with_definitions,
)

_PYTHON_NAME = re.compile(rf"\s*{NAME}\(")
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
            match = yield from matched(r, at + 1, _PYTHON_NAME)
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
        while (match := (yield from matched(r, 0, _PYTHON_KEY))) is not None:
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
            values = {of: closed_arguments(with_definitions(schema, properties[of])) for of in properties}
            first = [of for of in properties if of in required]
            parts = [f"{json.dumps((', ' if i else '') + of + '=')} {values[of]}" for i, of in enumerate(first)]
            others = [of for of in properties if of not in required]
            if first:
                parts += [f"({json.dumps(f', {of}=')} {values[of]})?" for of in others]
            elif others:  # one at most: any of them may be the first, without a comma
                parts.append(f"({' | '.join(f'{json.dumps(of + chr(61))} {values[of]}' for of in others)})?")
            return " ".join([json.dumps(f"{name}("), *parts, '")"'])

        calls = f'"[" {several("function", SEPARATOR, parallel)} "]"'
        if self.markers:
            calls = f"{terminal(self.markers[0])} {calls} {terminal(self.close)}"
        return "\n".join([f"calls: {calls}", *listed(functions, rule)])


def _from_python(text: str) -> str:
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return as_json(text)


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
