"""Syntax of tool calls that are written as in Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from folio.app.api.output.reader import SPACE, Emit, Reader, Reading
from folio.app.api.output.syntaxes import (
    MAX_PARALLEL_CALLS,
    NAME,
    SEPARATOR,
    Functions,
    Terminal,
    any_of,
    as_json,
    closed_arguments,
    listed,
    matched,
    parameters_of,
    several,
    with_definitions,
)

_PYTHON_KEY = re.compile(r"\s*(?P<key>[A-Za-z_]\w{0,63})\s*=\s*(?=\S)")


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A list of calls as in Python: `[name(key=value, …), …]`. Each argument is emitted when it is complete."""

    markers: tuple[str, ...] = ()
    close: str = ""
    bare: str = "["
    named: re.Pattern[str] = re.compile(rf"\s*{NAME}\(")

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.markers, self.close)

    def calls(self, r: Reader, at: int, emit: Emit, functions: Functions) -> Reading[bool]:
        at = yield from r.behind_space(at)
        before, num_calls = "[", 0
        while (yield from r.character(at)) == before:
            match = yield from matched(r, at + 1, self.named)
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
            written = r.take((yield from _python_end(r))).strip(SPACE)
            if not (yield from r.character(0)):
                r.is_cut = True
                return
            value = _from_python(written)
            emit("arguments", f"{before}{json.dumps(match['key'])}: {value}")
            before = ", "
            if (yield from r.character(0)) != ",":
                break
            r.take(1)
        emit("arguments", "{}" if before == "{" else "}")
        yield from r.take_literal(")")

    def grammar(self, functions: Functions, parallel: bool, terminal: Terminal, *, marked: bool = True) -> str:
        calls = f'"[" {several("function", SEPARATOR, parallel)} "]"'
        if self.markers:
            calls = f"{terminal(self.markers[0]) if marked else ''} {calls} {terminal(self.close)}"
        return "\n".join([f"calls: {calls}", *self._functions(functions)])

    def within_text(self, functions: Functions, terminal: Terminal) -> tuple[str, str]:
        def first(name: str) -> str:
            return f"/{before}{re.escape(name)}\\(/ arguments_{[*functions].index(name)}"

        before = r"[ \t\r\n]*\["
        rules = [self.grammar(functions, True, terminal, marked=False), *listed(functions, first, "first")]
        rules.append(f'bare: first ({SEPARATOR} function)~0..{MAX_PARALLEL_CALLS - 1} "]"')
        return "\n".join(rules), f"{before}({any_of(functions)})\\("

    def _functions(self, functions: Functions) -> list[str]:
        """The rules `function`, and `arguments_0` … with the bracket after them."""

        def arguments(schema: Mapping[str, Any]) -> str:
            properties, required = parameters_of(schema), schema.get("required") or ()
            if properties is None:
                return f"({several('any', SEPARATOR, True)})?"
            values = {
                of: f"{json.dumps(of + '=')} {closed_arguments(with_definitions(schema, value))}"
                for of, value in properties.items()
            }
            first = [values[of] for of in values if of in required]
            others = [values[of] for of in values if of not in required]
            behind = [f"({SEPARATOR} {value})?" for value in others]
            if first:
                return " ".join([f" {SEPARATOR} ".join(first), *behind])
            begins = (" ".join([value, *behind[i + 1 :]]) for i, value in enumerate(others))
            return f"({' | '.join(begins)})?" if others else ""

        rules = listed(functions, lambda name: f"{json.dumps(name + '(')} arguments_{[*functions].index(name)}")
        rules += [f'arguments_{i}: {arguments(schema)} ")"' for i, schema in enumerate(functions.values())]
        return [*rules, "any: /[A-Za-z_][A-Za-z0-9_]{0,63}=/ " + closed_arguments({})]


def _from_python(text: str) -> str:
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return as_json(text)


def _python_end(r: Reader) -> Reading[int]:
    """The index of the comma or bracket after the value with which the text begins."""
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
