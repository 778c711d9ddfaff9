"""Probes: small conversations that show how a template wants messages to be arranged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from folio.app.models.chat_template.arrangement import Arrangement, Message

Render = Callable[[Sequence[Message], Sequence[Any] | None], str]

_TOOLS = [{"type": "function", "function": {"name": "probe", "description": "x", "parameters": {"type": "object"}}}]
_ROLES = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "b": "assistant", "r": "tool", "o": "tool"}
_FILLERS = (None, "", ".")
# In this order, as each builds on those before: field, its values from the least change to the largest, and the
# conversations that it is for. s: system, u: user, a: assistant, c: a call, b: a call with broken arguments, r: its
# result, o: the result of an unknown call.
_PLAIN: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    ("folds_system", (False, True), ("su", "suau")),
    ("joins_system", (False, True), ("ssu", "sssu")),
    ("joins_users", (False, True), ("uu", "suu", "uuau", "uauu")),
    ("joins_answers", (False, True), ("uaau", "suaau")),
    ("first_user", _FILLERS, ("au", "sau")),
    ("only_user", _FILLERS, ("s", "a", "sa")),
)
_WITH_TOOLS: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    ("answer", _FILLERS, ("ucru", "ucu")),
    ("wraps_arguments", (False, True), ("ubr", "ubra")),
    ("quotes_results", (False, True), ("uoa", "uaou")),
)
_REMINDS: tuple[str, tuple[Any, ...], tuple[str, ...]] = ("reminds", (False, True), ("suasu", "uasu", "sus"))
# Whether a conversation was refused, shown in another order, or shown.
_REFUSED, _DISORDERED, _SHOWN = range(3)


@dataclass(frozen=True, slots=True)
class Probed:
    """Result of the probes. `error`: why not even a single message of the user is shown."""

    arrangement: Arrangement
    error: Exception | None = None


class NotShownError(Exception):
    """A template renders a conversation without its text."""


def probe(render: Render) -> Probed:
    """Find the arrangement for a template.

    Args:
        render: renders messages, and tools if there are any, with the template; raises anything if it cannot.
    """
    error: Exception | None = None
    for parts, text in ((False, None), (True, None), (False, ""), (False, "."), (True, ".")):
        base = Arrangement(parts=parts, system_text=text)
        found = _outcome(render, base, "u")
        if not isinstance(found, Exception):
            break
        error = error or found
        if getattr(found, "is_slow", False):
            return Probed(Arrangement(), error)
    else:
        return Probed(Arrangement(), error)
    for field, values, conversations in _PLAIN:
        base = _best(render, base, field, values, conversations)
    base = _best(render, base, *_REMINDS, ordered=True)
    for short, written in itertools.product((False, True), (False, True)):
        with_calls = replace(base, shortens_ids=short, writes_arguments=written)
        if not isinstance(_outcome(render, with_calls, "ucr"), Exception):
            for field, values, conversations in _WITH_TOOLS:
                with_calls = _best(render, with_calls, field, values, conversations)
            return Probed(with_calls)
    return Probed(base)


def _best(
    render: Render,
    base: Arrangement,
    field: str,
    values: Iterable[Any],
    conversations: Sequence[str],
    *,
    ordered: bool = False,
) -> Arrangement:
    """The arrangement with the first value that shows the most of the conversations.

    Args:
        ordered: prefer a value with which messages are shown in their order.
    """
    best, most = base, -1
    for value in values:
        tried = replace(base, **{field: value})
        outcomes = [_outcome(render, tried, letters) for letters in conversations]
        scores = [_REFUSED if isinstance(outcome, Exception) else outcome for outcome in outcomes]
        total = sum(scores if ordered else map(bool, scores))
        if total > most:
            best, most = tried, total
        if most == len(conversations) * (_SHOWN if ordered else 1):
            break
    return best


def _outcome(render: Render, arrangement: Arrangement, letters: str) -> int | Exception:
    messages = _messages(letters)
    try:
        text = render(arrangement.arranged(messages), _TOOLS if set(letters) & set("bcro") else None).lower()
    except Exception as error:  # noqa: BLE001 (whatever a template raises is a finding)
        return error
    places = [text.find(f"zq{number}{letter}") for number, letter in enumerate(letters)]
    if min(places) < 0:
        return NotShownError(f"it does not show the {messages[places.index(min(places))]['role']}'s message")
    return _SHOWN if places == sorted(places) else _DISORDERED


def _messages(letters: str) -> list[Message]:
    """A conversation; each message has a text of its own."""
    messages: list[Message] = []
    for number, letter in enumerate(letters):
        text = f"Zq{number}{letter}"
        message: Message = {"role": _ROLES[letter], "content": text}
        if letter in "bc":
            arguments: Any = {"x": text} if letter == "c" else f'{{"x": "{text}'
            function = {"name": "probe", "arguments": arguments}
            message |= {
                "content": "",
                "tool_calls": [{"id": "call_0123456789", "type": "function", "function": function}],
            }
        elif letter == "r":
            message |= {"tool_call_id": "call_0123456789", "name": "probe"}
        elif letter == "o":
            message |= {"tool_call_id": "call_unknown"}
        messages.append(message)
    return messages
