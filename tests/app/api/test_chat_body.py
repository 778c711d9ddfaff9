"""Messages of a conversation, and whether the model reasons."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from folio.app.api.openai.chat_body import ChatCompletionRequest, Message
from folio.app.errors import RequestError

USER = {"role": "user", "content": "x"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": [USER]} | fields)


def test_whether_and_how_long_the_model_reasons() -> None:
    on, off = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}
    for fields, settings, budget in (
        ({}, {}, None),
        ({"reasoning_effort": "none"}, off | {"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "high"}, on | {"reasoning_effort": "high"}, None),
        ({"thinking": False}, off, None),
        ({"thinking": {"type": "disabled"}}, off, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, on, 9),
        ({"thinking_token_budget": 0}, {}, 0),
    ):
        request = chat(**fields)
        assert (request.template_settings, request.reasoning_budget) == (settings, budget)
    with pytest.raises(RequestError, match="leave one out"):
        _ = chat(thinking={"type": "enabled", "budget_tokens": 9}, thinking_token_budget=8).reasoning_budget
    for fields in ({"thinking": {"type": "adaptive?"}}, {"thinking_token_budget": -1}, {"thinking": 1}):
        with pytest.raises(ValidationError):
            chat(**fields)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": "x", "tool_call_id": "call_1"},
        {"role": "user", "content": "x", "tool_calls": [CALL]},
    ],
)
def test_invalid_messages(message: object) -> None:
    with pytest.raises(ValidationError):
        Message.model_validate(message)


def test_messages_of_tools() -> None:
    called = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert called.content is None
    assert called.tool_calls is not None
    assert called.tool_calls[0].function.name == "f"
    assert Message.model_validate({"role": "tool", "content": "4", "tool_call_id": "call_1"}).content == "4"
