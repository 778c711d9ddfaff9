"""Anthropic's messages as the messages of a chat completion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import model_validator

from folio.app.api.anthropic.blocks import (
    Block,
    Blocks,
    LeftOutBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    readable,
)
from folio.app.api.base import StrictBody
from folio.app.api.openai.chat_body import Message
from folio.app.api.tools.bodies import FunctionCall, ToolCall

# Type of block → the only role whose messages have it.
_ROLES = {"tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant", "tool_result": "user"}
# Claude Code's first line of the system prompt. It has another checksum in every request, so that nothing after it
# would ever be found in the prefix cache.
_BILLING_HEADER = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")


class MessageParam(StrictBody):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    """A "system" message is shown where it is, or as a reminder in the user's turn if the chat template refuses it."""
    content: Blocks
    """Text, or a list of blocks."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and isinstance(fields.get("content"), list):
            return fields | {"content": readable(fields["content"], of_user=fields.get("role") == "user")}
        return fields

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
    """The messages of the chat completion. Results of tools are messages of their own, before the turn's text."""
    shown: list[Message] = []
    if prompt := _BILLING_HEADER.sub("", _joined(system)):
        shown.append(Message(role="system", content=prompt))
    for message in messages:
        if message.role == "assistant":
            shown.append(_answer(message.blocks))
            continue
        shown += [_result(block) for block in message.blocks if isinstance(block, ToolResultBlock)]
        if texts := [block for block in message.blocks if isinstance(block, TextBlock)]:
            shown.append(Message(role=message.role, content=_lines(texts)))
    if len(shown) > 1 and shown[-1].role == "assistant" and not (shown[-1].text.strip() or shown[-1].tool_calls):
        shown.pop()  # there is nothing to continue
    return shown


def _joined(content: str | Sequence[TextBlock] | None) -> str:
    return (content or "") if content is None or isinstance(content, str) else _lines(content)


def _lines(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks if block.text or not isinstance(block, LeftOutBlock))


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
