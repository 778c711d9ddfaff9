"""LlamaIndex's clients for servers like OpenAI's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.client import MODEL, QUESTION, Client, Total, add
from tests.clients.scripted_model import ANSWER, THOUGHT

openai_like = pytest.importorskip("llama_index.llms.openai_like")

CLIENT = Client(
    "LlamaIndex",
    ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    notes={"structured": "with `should_use_structured_outputs=True`, or by a forced call of a function"},
)


@pytest.fixture
def model(url: str) -> Any:
    return openai_like.OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )


def test_chat(model: Any) -> None:
    from llama_index.core.llms import ChatMessage

    assert model.chat([ChatMessage(role="user", content=QUESTION)]).message.content == ANSWER


def test_stream(model: Any) -> None:
    assert "".join(chunk.delta or "" for chunk in model.stream_complete(QUESTION)) == ANSWER


def test_tools(model: Any) -> None:
    from llama_index.core.agent.workflow import FunctionAgent

    async def run() -> Any:
        return await FunctionAgent(tools=[add], llm=model).run(QUESTION)

    answer = asyncio.run(run())
    assert [(call.tool_name, str(call.tool_output)) for call in answer.tool_calls] == [("add", "5")]
    assert str(answer) == ANSWER


def test_structured(model: Any) -> None:
    assert isinstance(model.as_structured_llm(Total).complete(QUESTION).raw, Total)


def test_structured_schema(model: Any) -> None:
    model.should_use_structured_outputs = True
    assert isinstance(model.as_structured_llm(Total).complete(QUESTION).raw, Total)


def test_reasoning(model: Any) -> None:
    from llama_index.core.llms import ChatMessage

    question = ChatMessage(role="user", content=QUESTION)
    first = model.chat([question]).message
    assert [block.content for block in first.blocks if block.block_type == "thinking"] == [THOUGHT]
    assert model.chat([question, first, question]).message.content == ANSWER


def test_embeddings(url: str) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    embeddings = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="none")
    one, two = embeddings.get_text_embedding_batch(["one", "two"])
    assert one != two
