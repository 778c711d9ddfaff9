"""Pydantic AI with its OpenAI models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.client import MODEL, QUESTION, Client, Total, add
from tests.clients.scripted_model import ANSWER, CALL, THOUGHT

pydantic_ai = pytest.importorskip("pydantic_ai")

CLIENT = Client("Pydantic AI", ("pydantic-ai-slim",))


@pytest.fixture
def provider(url: str) -> Any:
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIProvider(base_url=f"{url}/v1", api_key="none")


@pytest.fixture
def model(provider: Any) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel

    return OpenAIChatModel(MODEL, provider=provider)


def _run(agent: Any, **options: Any) -> Any:
    return asyncio.run(agent.run(QUESTION, **options))


def test_chat(model: Any) -> None:
    assert _run(pydantic_ai.Agent(model, instructions="Be brief.")).output == ANSWER


def test_chat_responses(provider: Any) -> None:
    from pydantic_ai.models.openai import OpenAIResponsesModel

    assert _run(pydantic_ai.Agent(OpenAIResponsesModel(MODEL, provider=provider))).output == ANSWER


def test_stream(model: Any) -> None:
    async def read() -> str:
        async with pydantic_ai.Agent(model).run_stream(QUESTION) as stream:
            return "".join([text async for text in stream.stream_text(delta=True)])

    assert asyncio.run(read()) == ANSWER


def test_tools(model: Any) -> None:
    result = _run(pydantic_ai.Agent(model, tools=[add]))
    calls = [part for message in result.all_messages() for part in message.parts if part.part_kind == "tool-call"]
    assert [call.args_as_dict() for call in calls] == [CALL]
    assert result.output == ANSWER


@pytest.mark.parametrize("way", ["ToolOutput", "NativeOutput", "PromptedOutput"])
def test_structured(model: Any, way: str) -> None:
    assert isinstance(_run(pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, way)(Total))).output, Total)


def test_structured_with_tools(model: Any) -> None:
    result = _run(pydantic_ai.Agent(model, tools=[add], output_type=Total))
    assert isinstance(result.output, Total)


def test_reasoning(model: Any) -> None:
    agent = pydantic_ai.Agent(model)
    first = _run(agent)
    [thought] = [part for part in first.all_messages()[-1].parts if part.part_kind == "thinking"]
    assert thought.content == THOUGHT
    assert _run(agent, message_history=first.all_messages()).output == ANSWER


def test_embeddings(provider: Any) -> None:
    from pydantic_ai import Embedder
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel

    embedder = Embedder(OpenAIEmbeddingModel(MODEL, provider=provider))
    one, two = asyncio.run(embedder.embed_documents(["one", "two"])).embeddings
    assert list(one) != list(two)
