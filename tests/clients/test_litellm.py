"""LiteLLM, with its providers for OpenAI-like servers and for vLLM's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.client import ADD_TOOL, MODEL, USER, Client, Total
from tests.clients.scripted_model import ANSWER, CALL, THOUGHT

litellm = pytest.importorskip("litellm")

CLIENT = Client("LiteLLM", ("litellm",))


@pytest.fixture(params=["openai", "hosted_vllm"])
def call(request: pytest.FixtureRequest, url: str) -> Any:
    def complete(**fields: Any) -> Any:
        return litellm.completion(
            model=f"{request.param}/{MODEL}", api_base=f"{url}/v1", api_key="none", num_retries=0, **fields
        )

    return complete


def test_chat(call: Any) -> None:
    assert call(messages=[USER]).choices[0].message.content == ANSWER


def test_stream(call: Any) -> None:
    chunks = call(messages=[USER], stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER


def test_tools(call: Any) -> None:
    message = call(messages=[USER], tools=[ADD_TOOL]).choices[0].message
    [asked] = message.tool_calls
    assert json.loads(asked.function.arguments) == CALL
    result = {"role": "tool", "tool_call_id": asked.id, "content": "5"}
    assert call(messages=[USER, message, result], tools=[ADD_TOOL]).choices[0].message.content == ANSWER


def test_structured(call: Any) -> None:
    Total.model_validate_json(call(messages=[USER], response_format=Total).choices[0].message.content)


def test_reasoning(call: Any) -> None:
    message = call(messages=[USER]).choices[0].message
    assert message.reasoning_content == THOUGHT
    assert call(messages=[USER, message, USER]).choices[0].message.content == ANSWER


def test_reasoning_effort(call: Any) -> None:
    allowed = {"allowed_openai_params": ["reasoning_effort"]}
    assert call(messages=[USER], reasoning_effort="low", **allowed).choices[0].message.reasoning_content == THOUGHT


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_embeddings(url: str, provider: str) -> None:
    answer = litellm.embedding(model=f"{provider}/{MODEL}", input=["one", "two"], api_base=f"{url}/v1", api_key="none")
    assert answer.data[0]["embedding"] != answer.data[1]["embedding"]
