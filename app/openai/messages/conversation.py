"""Anthropic's messages as the messages of a chat completion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from pydantic import model_validator

from app.openai.base import StrictBody
from app.openai.chat_body import Message
from app.openai.messages.blocks import Block, Blocks, TextBlock, ThinkingBlock, ToolResultBlock, ToolUseBlock
from app.openai.tools.bodies import FunctionCall, ToolCall

# Blocks that only messages of this role have.
_ROLES = {"tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant", "tool_result": "user"}
# Claude Code's first line of the system prompt. It has another checksum in every request, and nothing behind it would
# ever be found in the prefix cache.
_BILLING_HEADER = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")


class MessageParam(StrictBody):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    """A "system" message behind the first message is shown as a reminder in the user's turn."""
    content: Blocks
    """Text, or a list of blocks."""

    @model_validator(mode="after")
    def _check_role(self) -> MessageParam:
        for block in self.blocks:
            if self.role != _ROLES.get(block.type, self.role):
                raise ValueError(f"a block of the type {block.type!r} belongs to a message of the {_ROLES[block.type]}")
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


def chat_messages(system: str | Sequence[TextBlock] | None, messages: Sequence[MessageParam]) -> list[Message]:
    """The messages of the chat completion. Neighbours of one role become one message: chat templates want alternating
    roles. Results of tools precede all else in the user's turn, next to the calls."""
    shown: list[Message] = []
    for role, items in groupby(_items(system, messages), lambda item: item.role if isinstance(item, _Said) else None):
        if role is None:
            shown += (item for item in items if isinstance(item, Message))
        else:
            shown.append(Message(role=role, content="\n".join(item.text for item in items if isinstance(item, _Said))))
    return shown


@dataclass(frozen=True, slots=True)
class _Said:
    """A text of the system prompt or of the user's turn."""

    role: Literal["system", "user"]
    text: str


def _items(system: str | Sequence[TextBlock] | None, messages: Sequence[MessageParam]) -> Iterator[_Said | Message]:
    if prompt := _BILLING_HEADER.sub("", _joined(system)):
        yield _Said("system", prompt)
    begins = True
    for is_answer, turn in groupby(messages, lambda message: message.role == "assistant"):
        given = [(message.role, block) for message in turn for block in message.blocks]
        if is_answer:
            yield _answer([block for _, block in given])
            begins = False
            continue
        yield from (_result(block) for _, block in given if isinstance(block, ToolResultBlock))
        for role, block in given:
            if not isinstance(block, TextBlock):
                continue
            begins = begins and role == "system"
            if role == "user" or begins:
                yield _Said("system" if begins else "user", block.text)
            else:  # templates know no later system messages; Claude Code itself gives reminders this form
                yield _Said("user", f"<system-reminder>\n{block.text}\n</system-reminder>")


def _joined(content: str | Sequence[TextBlock] | None) -> str:
    return (content or "") if content is None or isinstance(content, str) else _lines(content)


def _lines(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _answer(given: Sequence[Block]) -> Message:
    """One message of the assistant: reasoning, text and calls."""
    text = _lines(block for block in given if isinstance(block, TextBlock))
    reasoning = "".join(block.thinking for block in given if isinstance(block, ThinkingBlock))
    calls = [
        ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=json.dumps(block.input)))
        for block in given
        if isinstance(block, ToolUseBlock)
    ]
    return Message(
        role="assistant",
        content=text if text or not calls else None,
        reasoning_content=reasoning or None,
        tool_calls=calls or None,
    )


def _result(block: ToolResultBlock) -> Message:
    text = _joined(block.content)
    return Message(role="tool", content=f"Error: {text}" if block.is_error else text, tool_call_id=block.tool_use_id)
