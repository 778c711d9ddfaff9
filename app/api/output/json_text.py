"""JSON in an output that is still being generated: where values end, and the call that an object describes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from folio.app.api.output.reader import Emit, Reader, Reading

# The most characters of a call before its arguments; they are held back until it is certain that they are a call.
MAX_HEADER = 16 << 10
_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_BEHIND_SCALAR = re.compile(r"[,:}\]\s]")
# An escape of JSON: an incomplete surrogate at the text's end, a pair, an unpaired surrogate, or any other escape.
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = f"u[dD][89abAB]{_HEX}{{2}}", f"u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE = re.compile(
    rf"(?s:\\(?:(?P<open>{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?\Z|(?:u(?:[dD](?:[89a-fA-F]{_HEX}?)?)?)?\Z)"
    rf"|{_HIGH}\\{_LOW}|(?P<unpaired>{_HIGH}|{_LOW})|.))"
)
_UNPAIRED = re.compile(rf"\\(?:{_HIGH}|{_LOW})")  # in held text, which has no other escapes before
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Header:
    """The beginning of a call.

    Attributes:
        end: index after the header.
        arguments: the complete arguments, if they are part of the header; `None`: they begin at `end`.
    """

    name: str
    end: int
    arguments: str | None = None


class PairedSurrogates:
    """Replaces unpaired surrogates in JSON that arrives in pieces by U+FFFD, as escapes and as characters.

    All JSON from models goes through it: UTF-8 has no unpaired surrogates, and clients' parsers refuse them.
    """

    def __init__(self) -> None:
        self._held = ""  # an escape that may be the first half of a pair

    def push(self, text: str) -> str:
        """Append JSON; returns the part that later text cannot change."""
        text, self._held = self._held + text, ""
        if _SURROGATE.search(text):
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return _ESCAPE.sub(self._replaced, text) if "\\" in text else text

    def finish(self) -> str:
        """End the JSON; returns the rest."""
        held, self._held = self._held, ""
        return _UNPAIRED.sub(r"\\ufffd", held)

    def _replaced(self, escape: re.Match[str]) -> str:
        if escape["open"] is not None:
            self._held = escape[0]
            return ""
        return r"\ufffd" if escape["unpaired"] is not None else escape[0]


def paired_surrogates(text: str) -> str:
    """The whole JSON text with U+FFFD instead of unpaired surrogates."""
    pairing = PairedSurrogates()
    return pairing.push(text) + pairing.finish()


def strict_json(text: str) -> Any:
    """The value of a JSON text. Raises `ValueError`, also for `NaN` and `Infinity`."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def value_end(r: Reader, begin: int) -> Reading[int | None]:
    """The index after the JSON value at `begin`, by brackets and quotes; `None` if there is none or it is too long."""
    scan, at = Scan(), begin
    is_scalar = (yield from r.character(begin)) not in tuple('{["')
    while True:
        end = _scalar_end(r.text, at) if is_scalar else scan.feed(r.text, at)
        at = len(r.text)
        if end is not None or at - begin > MAX_HEADER or not (yield from r.has(at)):
            break
    most = begin + MAX_HEADER
    r.looked_ahead += MAX_HEADER if end is None or end > most else end - begin
    return end if end is not None and begin < end <= most else None


def _scalar_end(text: str, at: int) -> int | None:
    found = _BEHIND_SCALAR.search(text, at)
    return None if found is None else found.start()


def stream_object(r: Reader, emit: Emit) -> Reading[None]:
    """Take the JSON object with which the text begins, and emit it as arguments while it arrives."""
    scan = Scan()
    while (yield from r.has(0)):
        end = scan.feed(r.text, 0)
        emit("arguments", r.take(len(r.text) if end is None else end))
        if end is not None:
            return
    r.is_cut = True


class Scan:
    """Finds the end of a JSON value that begins with a bracket or quote, reading each character once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, at: int) -> int | None:
        """The end's index in `text`, which continues at `at`; `None` if the end is not in it."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_QUOTE_OR_ESCAPE if self._in_string else _BRACKET_OR_QUOTE).search(text, at)
            if match is None:
                return None
            at = match.end()
            if match[0] == "\\":
                self._escaped = True
            elif match[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if match[0] in "{[" else -1
            if self._depth <= 0 and not self._in_string and not self._escaped:
                return at
        return None


def call_header(r: Reader, begin: int, functions: Collection[str]) -> Reading[Header | None]:
    """Read the object `{"name": …, "arguments": …}` at `begin` as far as its arguments. `None`: it is no call of one of
    the functions. Arguments are also called `parameters`, may precede the name, and may be JSON in a string."""
    name: str | None = None
    arguments: str | None = None
    at, before = begin, "{"
    while True:
        if (yield from r.character(at)) != before:
            return None
        at = yield from r.behind_space(at + 1)
        if before == "{" and (yield from r.character(at)) == "}":
            return None
        if (yield from r.character(at)) != '"' or (end := (yield from value_end(r, at))) is None:
            return None
        key = r.text[at + 1 : end - 1]
        at = yield from r.behind_space(end)
        if (yield from r.character(at)) != ":":
            return None
        at = yield from r.behind_space(at + 1)
        is_arguments = key in ("arguments", "parameters")
        if is_arguments and name is not None and (yield from r.character(at)) == "{":
            return Header(name, at)
        if (end := (yield from value_end(r, at))) is None:
            return None
        try:
            value = strict_json(r.text[at:end])
            if is_arguments:
                arguments = _arguments(r.text[at:end], value)
        except ValueError:
            return None
        if key == "name":
            if not isinstance(value, str) or value not in functions:
                return None
            name = value
        if end - begin > MAX_HEADER:
            return None
        at = yield from r.behind_space(end)
        if (yield from r.character(at)) == "}":
            return None if name is None else Header(name, at, "{}" if arguments is None else arguments)
        before = ","


def _arguments(text: str, value: Any) -> str:
    """The JSON object of a call's arguments. Raises `ValueError` if it is none."""
    if isinstance(value, str):
        text, value = value, strict_json(value)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return text


def take_object_rest(r: Reader) -> Reading[None]:
    """Take the members after the arguments, and the brace that ends the object."""
    while True:
        at = yield from r.behind_space(0)
        if (yield from r.character(at)) == "}":
            r.take(at + 1)
            return
        if (yield from r.character(at)) != ",":
            return
        at = yield from r.behind_space(at + 1)
        for behind in (":", ""):  # key and value
            end = yield from value_end(r, at)
            if end is None:
                return
            at = yield from r.behind_space(end)
            if behind:
                if (yield from r.character(at)) != behind:
                    return
                at = yield from r.behind_space(at + 1)
        r.take(at)
