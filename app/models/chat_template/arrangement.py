"""Arrangement of a conversation: the messages of any client as one template accepts and shows them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How messages are joined, ordered and completed. By default they stay as they are, except that results of tools
    come directly after the calls.

    A message is changed by what precedes it and not by what follows, so that the prompt of a conversation still begins
    with the prompt of its earlier messages. (Only in a conversation that has no message of the user is one filled in.)
    Texts that are filled in depend on the template: an empty one if it accepts that. Messages are dicts as templates
    get them, with texts as content; they are not changed in place.

    Attributes:
        parts: contents are lists with one part.
        system_text: system message of conversations that begin without one.
        folds_system: the system message is the beginning of the first user's message.
        joins_system: several system messages at the beginning become one.
        reminds: a later system message becomes a reminder in the user's message, as Claude Code writes them.
        joins_users, joins_answers: neighbours of the role become one message.
        first_user: user's message before an assistant that begins.
        only_user: user's message of a conversation without one, after the system messages.
        answer: the assistant's message between results, or a call without result, and the user's next message.
        shortens_ids: ids of calls have nine letters and digits.
        writes_arguments: arguments of calls are JSON as text, and not objects.
        wraps_arguments: arguments that are no JSON object are shown as an object with their text.
        quotes_results: a result whose call is unknown is a text of the user.
    """

    parts: bool = False
    system_text: str | None = None
    folds_system: bool = False
    joins_system: bool = False
    reminds: bool = False
    joins_users: bool = False
    joins_answers: bool = False
    first_user: str | None = None
    only_user: str | None = None
    answer: str | None = None
    shortens_ids: bool = False
    writes_arguments: bool = False
    wraps_arguments: bool = False
    quotes_results: bool = False

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """The messages for the template."""
        shown: list[Message] = []
        for message in self._converted(_results_first(messages)):
            self._add(message, shown)
        if self.joins_system or self.joins_users or self.joins_answers or self.folds_system:
            shown = [_with_joined_texts(message) for message in shown]
        if self.only_user is not None and all(message["role"] != "user" for message in shown):
            place = next((i for i, message in enumerate(shown) if message["role"] != "system"), len(shown))
            shown.insert(place, {"role": "user", "content": self.only_user})
        if self.parts:
            return [one | {"content": [{"type": "text", "text": one["content"]}]} for one in shown]
        return shown

    def _converted(self, messages: Sequence[Message]) -> Iterator[Message]:
        """The messages, converted one by one."""
        begins, known = True, set[str]()
        for message in messages:
            role = message["role"]
            if role == "system":
                if begins and self.folds_system:
                    message = message | {"role": "user", "folds": True}
                elif not begins and self.reminds:
                    text = f"<system-reminder>\n{message['content']}\n</system-reminder>"
                    message = {"role": "user", "content": text}
            else:
                begins = False
            if calls := message.get("tool_calls"):
                known.update(call["id"] for call in calls)
                message = message | {"tool_calls": [self._call(call) for call in calls]}
            elif role == "tool":
                if self.quotes_results and message.get("tool_call_id") not in known:
                    message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
                elif self.shortens_ids:
                    message = message | {"tool_call_id": _short(message.get("tool_call_id", ""))}
            yield message

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        given = function["arguments"]
        if self.writes_arguments and not isinstance(given, str):
            function = function | {"arguments": json.dumps(given, ensure_ascii=False)}
        elif self.wraps_arguments and isinstance(given, str):
            function = function | {"arguments": {"arguments": given}}
        return call | {"id": _short(call["id"]) if self.shortens_ids else call["id"], "function": function}

    def _add(self, message: Message, shown: list[Message]) -> None:
        """Append a message, or join it to the last one."""
        role, last = message["role"], next(reversed(shown), Message())
        if not last and role != "system" and self.system_text is not None:
            shown.append(last := {"role": "system", "content": self.system_text})
        if role == last.get("role") and self._joins(role, last):
            shown[-1] = _joined(last, message)
            return
        if role in ("assistant", "tool") and self.first_user is not None and _are_systems(shown):
            shown.append({"role": "user", "content": self.first_user})
        if role == "user" and self.answer is not None and (last.get("role") == "tool" or last.get("tool_calls")):
            shown.append({"role": "assistant", "content": self.answer})
        shown.append(message)

    def _joins(self, role: str, last: Message) -> bool:
        if role == "user":
            return self.joins_users or "folds" in last
        return self.joins_system if role == "system" else self.joins_answers and role == "assistant"


def _are_systems(messages: Sequence[Message]) -> bool:
    return all(message["role"] == "system" for message in messages)


def _results_first(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, with results of tools first among those between two messages of the assistant."""
    for place, message in enumerate(messages):
        if message["role"] == "tool" and place and messages[place - 1]["role"] in ("user", "system"):
            break
    else:
        return messages
    shown: list[Message] = []
    begin = 0  # of the turn's messages that are no results
    for message in messages:
        if message["role"] == "assistant":
            begin = len(shown) + 1
        if message["role"] == "tool" and begin:
            shown.insert(begin, message)
            begin += 1
        else:
            shown.append(message)
    return shown


def _joined(first: Message, second: Message) -> Message:
    """Two messages of one role as one."""
    joined = dict(first)
    for name in _TEXTS:
        if text := second.get(name):
            texts = first.get(name) or []
            if isinstance(texts, str):
                texts = [texts]
            texts.append(text)  # joined at the end: a long turn would be copied for each of its messages
            joined[name] = texts
    if first.get("tool_calls") or second.get("tool_calls"):
        joined["tool_calls"] = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if "folds" in first and "folds" not in second:
        del joined["folds"]
    return joined


def _with_joined_texts(message: Message) -> Message:
    lists = {name: "\n".join(message[name]) for name in _TEXTS if isinstance(message.get(name), list)}
    message = message | lists if lists else message
    return {name: value for name, value in message.items() if name != "folds"} if "folds" in message else message


def _short(call_id: str) -> str:
    """An id of nine letters and digits, the same in every request."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
