"""Input of `/v1/responses` as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence

from folio.app.api.base import joined_text
from folio.app.api.openai.chat_body import Message
from folio.app.api.responses.items import (
    CallOutput,
    GivenAction,
    GivenCustomCall,
    GivenFunctionCall,
    GivenMcpCall,
    GivenReasoning,
    InputItem,
    InputMessage,
)
from folio.app.api.responses.tools import qualified_name
from folio.app.api.tools.bodies import TEXT_ARGUMENT, FunctionCall, ToolCall


def messages_of(instructions: str | None, items: Sequence[InputItem]) -> list[Message]:
    """The messages of a conversation. Items without a meaning for the model are left out."""
    messages = [Message(role="system", content=instructions)] if instructions is not None else []
    conversation = _Conversation(messages)
    for item in items:
        conversation.add(item)
    return messages


class _Conversation:
    """Messages as items are added: reasoning, text and calls of one answer are one message of the assistant."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages
        self._answering: Message | None = None  # the assistant's message that the next item may continue

    def add(self, item: InputItem) -> None:
        if isinstance(item, GivenReasoning):
            self._reason(joined_text(item.content or item.summary))
        elif isinstance(item, GivenFunctionCall):
            self._call(item.call_id, qualified_name(item.namespace, item.name), item.arguments)
        elif isinstance(item, GivenCustomCall):
            name = qualified_name(item.namespace, item.name)
            self._call(item.call_id, name, json.dumps({TEXT_ARGUMENT: item.input}, ensure_ascii=False))
        elif isinstance(item, GivenAction):
            self._act(item)
        elif isinstance(item, GivenMcpCall):
            self._call(item.id, qualified_name(item.server_label, item.name), item.arguments)
            self._result(item.id, item.result)
        elif isinstance(item, CallOutput):
            self._result(item.call_id or item.id or "", item.text)
        elif isinstance(item, InputMessage):
            self._say(item)

    def _act(self, item: GivenAction) -> None:
        actions = {"actions": item.actions} if item.actions else {}
        arguments = json.dumps(item.action or item.operation or actions, ensure_ascii=False)
        self._call(item.call_id or item.id or "", item.type.removesuffix("_call"), arguments)

    def _reason(self, text: str) -> None:
        if not text:  # encrypted
            return
        message = self._answering
        if message is None or message.content is not None or message.tool_calls is not None:
            self._answering = Message(role="assistant", reasoning_content=text)
            self._messages.append(self._answering)
        else:
            message.reasoning_content = (message.reasoning_content or "") + text

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        call = ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))
        if self._answering is None:
            self._answering = Message(role="assistant", tool_calls=[call])
            self._messages.append(self._answering)
        else:
            self._answering.tool_calls = [*(self._answering.tool_calls or ()), call]

    def _result(self, call_id: str, text: str) -> None:
        self._answering = None
        self._messages.append(Message(role="tool", content=text, tool_call_id=call_id))

    def _say(self, item: InputMessage) -> None:
        if item.role == "tool":
            self._result(item.tool_call_id or "", item.text)
        elif item.role == "assistant" and self._answering is not None and self._answering.content is None:
            self._answering.content = item.text
        else:
            self._messages.append(Message(role=item.role, content=item.text))
            self._answering = self._messages[-1] if item.role == "assistant" else None
