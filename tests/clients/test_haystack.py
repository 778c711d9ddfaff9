"""Haystack's OpenAI components."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.client import MODEL, PARAMETERS, QUESTION, Client, Total, add
from tests.clients.scripted_model import ANSWER, CALL, THOUGHT

haystack = pytest.importorskip("haystack")

CLIENT = Client(
    "Haystack",
    ("haystack-ai",),
    notes={"reasoning": "in `OpenAIResponsesChatGenerator` only: `OpenAIChatGenerator` drops the reasoning"},
)


@pytest.fixture
def generator(url: str) -> Any:
    from haystack.components.generators.chat import OpenAIChatGenerator

    return lambda **options: OpenAIChatGenerator(model=MODEL, api_base_url=f"{url}/v1", **options)


@pytest.fixture
def question() -> Any:
    from haystack.dataclasses import ChatMessage

    return [ChatMessage.from_user(QUESTION)]


@pytest.fixture
def tool() -> Any:
    from haystack.tools import Tool

    return Tool(name="add", description="Add two numbers.", parameters=PARAMETERS, function=add)


def test_chat(generator: Any, question: Any) -> None:
    assert generator().run(question)["replies"][0].text == ANSWER


def test_stream(generator: Any, question: Any) -> None:
    chunks: list[str] = []
    generator(streaming_callback=lambda chunk: chunks.append(chunk.content)).run(question)
    assert "".join(chunks) == ANSWER


def test_tools(generator: Any, question: Any, tool: Any) -> None:
    from haystack.components.agents import Agent

    result = Agent(chat_generator=generator(), tools=[tool]).run(messages=question)
    calls = [call.arguments for message in result["messages"] for call in message.tool_calls]
    assert calls == [CALL]
    assert result["messages"][-1].text == ANSWER


def test_structured(generator: Any, question: Any) -> None:
    replies = generator(generation_kwargs={"response_format": Total}).run(question)["replies"]
    Total.model_validate_json(replies[0].text)


def test_reasoning(url: str, question: Any) -> None:
    from haystack.components.generators.chat import OpenAIResponsesChatGenerator

    generator = OpenAIResponsesChatGenerator(model=MODEL, api_base_url=f"{url}/v1")
    [first] = generator.run(question)["replies"]
    assert THOUGHT in str(first.reasoning)
    [second] = generator.run([*question, first, *question])["replies"]
    assert second.text == ANSWER


def test_embeddings(url: str) -> None:
    from haystack.components.embedders import OpenAITextEmbedder

    embedder = OpenAITextEmbedder(model=MODEL, api_base_url=f"{url}/v1")
    assert embedder.run("one")["embedding"] != embedder.run("two")["embedding"]
