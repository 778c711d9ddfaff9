"""Anthropic's client, over `/v1/messages`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.client import MODEL, PARAMETERS, QUESTION, USER, Client, Total
from tests.clients.scripted_model import ANSWER, CALL, THOUGHT

anthropic = pytest.importorskip("anthropic")

CLIENT = Client(
    "anthropic (Python)",
    ("anthropic",),
    absent={"embeddings": "Anthropic's API has none"},
)
TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": PARAMETERS}
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
def client(url: str) -> Any:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_chat(client: Any) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=64, system="Be brief.", messages=[USER])
    assert _text(answer) == ANSWER
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0


def test_chat_count_tokens(client: Any) -> None:
    assert client.messages.count_tokens(model=MODEL, messages=[USER]).input_tokens > len(QUESTION)


def test_chat_error(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        client.messages.create(model="nobody", max_tokens=64, messages=[USER])


def test_stream(client: Any) -> None:
    with client.messages.stream(model=MODEL, max_tokens=64, messages=[USER]) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert _text(stream.get_final_message()) == ANSWER


def test_tools(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "tools": [TOOL]}
    answer = client.messages.create(messages=[USER], **asked)
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert (call.name, call.input, answer.stop_reason) == ("add", CALL, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    messages = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert _text(client.messages.create(messages=messages, **asked)) == ANSWER


def test_tools_forced(client: Any) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        answer = client.messages.create(model=MODEL, max_tokens=64, messages=[USER], tools=[TOOL], tool_choice=choice)
        assert answer.content[-1].name == "add"


def test_tools_runner(client: Any) -> None:
    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=64, messages=[USER], tools=[add])
    assert _text(runner.until_done()) == ANSWER


def test_structured(client: Any) -> None:
    answer = client.messages.parse(model=MODEL, max_tokens=64, messages=[USER], output_format=Total)
    assert isinstance(answer.parsed_output, Total)


def test_reasoning(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 2048, "thinking": THINKING}
    answer = client.messages.create(messages=[USER], **asked)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == THOUGHT
    more = [USER, {"role": "assistant", "content": answer.content}, USER]
    assert _text(client.messages.create(messages=more, **asked)) == ANSWER
