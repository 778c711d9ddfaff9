"""Grammars of custom tools as regular expressions, which a JSON schema can require of a text.

A call's text is a JSON string, in which a grammar's characters are escaped: llguidance does that for the `pattern` of a
schema, but not for a Lark grammar. A Lark grammar whose rules do not refer to themselves is one regular expression.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from typing import Literal

from folio.app.api.output.schemas import MAX_PATTERN_CHARS, is_pattern

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\f]+|//[^\n]*|\#[^\n]*|\\\n)
    |(?P<line>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[imslux]*)
    |(?P<word>[%?!]*[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)
    |(?P<number>[0-9]+)
    |(?P<mark>->|\.\.|[|()\[\]?*+~:,{}])""",
    re.VERBOSE,
)
_COMMON = {
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(\\.|[^"\\\n])*"',
    "FLOAT": r"[0-9]+([eE][+-]?[0-9]+|\.[0-9]*([eE][+-]?[0-9]+)?)|\.[0-9]+([eE][+-]?[0-9]+)?",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "NUMBER": r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?",
    "SIGNED_INT": "[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?)",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_ESCAPED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class _NotRegularError(Exception):
    """The grammar refers to itself, or uses what has no meaning in a regular expression."""


@functools.lru_cache(maxsize=64)
def pattern_of(syntax: Literal["lark", "regex"], definition: str) -> str | None:
    """The anchored regular expression of a custom tool's input; `None` if there is none, or none that can be
    enforced."""
    try:
        expression = definition if syntax == "regex" else _Lark(definition).expression
    except (_NotRegularError, RecursionError):
        return None
    pattern = f"^(?:{expression})$"
    return pattern if is_pattern(pattern) else None


class _Lark:
    """A Lark grammar, parsed.

    Attributes:
        expression: the regular expression of `start`.

    Raises:
        _NotRegularError: at construction.
    """

    def __init__(self, text: str) -> None:
        self._rules: dict[str, list[str]] = {}  # name → tokens of its right side
        self._open: list[str] = []  # rules that are being expanded
        self._known: dict[str, str] = {}
        for statement in _statements(list(_tokens(text))):
            self._declare(statement)
        self.expression = self._rule("start")

    def _declare(self, statement: list[str]) -> None:
        first = statement[0]
        if first == "%import":
            named, *alias = [token for token in statement[1:] if token != "->"] or [""]
            source = named.removeprefix("common.")
            if source not in _COMMON:
                raise _NotRegularError(source)
            self._known[alias[0] if alias else source] = f"(?:{_COMMON[source]})"
        elif first.startswith("%") or ":" not in statement[1:2]:
            raise _NotRegularError(first)
        else:  # a priority is part of the name
            self._rules[first.lstrip("?!").partition(".")[0]] = statement[2:]

    def _rule(self, name: str) -> str:
        if name not in self._known:
            if name in self._open or name not in self._rules:
                raise _NotRegularError(name)
            self._open.append(name)
            expression = _Expansion(self._rules[name], self._rule).parsed()
            self._open.pop()
            self._known[name] = f"(?:{expression})"
        return self._known[name]


class _Expansion:
    """The right side of a rule, as a regular expression: alternatives of sequences of repeated atoms.

    Args:
        rule: expands another rule.
    """

    def __init__(self, tokens: list[str], rule: Callable[[str], str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._rule = rule
        self._num_chars = 0

    def parsed(self) -> str:
        expression = self._alternatives()
        if self._next() is not None:
            raise _NotRegularError(self._next())
        return expression

    def _next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, *marks: str) -> str | None:
        """The next token if it is one of the marks, or any token without marks."""
        found = self._next()
        if found is None or (marks and found not in marks):
            return None
        self._at += 1
        return found

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return "|".join(found)

    def _sequence(self) -> str:
        atoms = ""
        while (token := self._next()) is not None and token not in ("|", ")", "]"):
            if self._take("->"):  # an alternative's name
                self._take()
                continue
            before = len(atoms)
            atoms += self._repeated(self._atom())
            self._num_chars += len(atoms) - before
            if self._num_chars > MAX_PATTERN_CHARS:  # rules that are used often grow the expression
                raise _NotRegularError(token)
        return atoms

    def _repeated(self, atom: str) -> str:
        if mark := self._take("?", "*", "+"):
            return f"{atom}{mark}"
        if self._take("~"):
            least = self._take()
            most = self._take() if self._take("..") else least
            if least is None or most is None or not (least.isdigit() and most.isdigit()):
                raise _NotRegularError("~")
            return f"{atom}{{{least},{most}}}"
        return atom

    def _atom(self) -> str:
        token = self._take()
        assert token is not None
        if token in ("(", "["):
            inner = self._alternatives()
            if self._take(")" if token == "(" else "]") is None:
                raise _NotRegularError(token)
            return f"(?:{inner}){'?' if token == '[' else ''}"
        if token[0] == '"' and self._take(".."):
            return f"[{_escaped(_text(token))}-{_escaped(_text(self._take() or ''))}]"
        if token[0] == '"':
            escaped = "".join(map(_escaped, _text(token)))
            return f"(?i:{escaped})" if token[-1] == "i" else f"(?:{escaped})"
        if token[0] == "/":
            body, _, flags = token[1:].rpartition("/")
            flags = flags.replace("u", "").replace("l", "")
            return f"(?{flags}:{body.replace(chr(92) + '/', '/')})"
        if token[0].isalpha() or token[0] == "_":
            return self._rule(token)
        raise _NotRegularError(token)


def _tokens(text: str) -> Iterator[str]:
    """Tokens, with one line end instead of several."""
    at, last = 0, ""
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            raise _NotRegularError(text[at])
        at = match.end()
        if match.lastgroup != "skip" and (match[0] != "\n" or last != "\n"):
            yield (last := match[0])


def _statements(tokens: list[str]) -> Iterator[list[str]]:
    """Rules and directives. A line that begins with an alternative, or within brackets, continues the one above."""
    statement: list[str] = []
    depth = 0
    for at, token in enumerate(tokens):
        if token != "\n":
            depth += (token in ("(", "[")) - (token in (")", "]"))
            statement.append(token)
            continue
        if statement and depth <= 0 and tokens[at + 1 : at + 2] != ["|"]:
            yield statement
            statement = []
    if statement:
        yield statement


def _text(token: str) -> str:
    try:
        text = ast.literal_eval(token.removesuffix("i"))
    except (SyntaxError, ValueError):
        text = ""
    if not isinstance(text, str) or not text:
        raise _NotRegularError(token)
    return text


def _escaped(character: str) -> str:
    return _ESCAPED.get(character, re.escape(character))
