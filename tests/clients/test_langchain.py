"""LangChain's OpenAI integration, and an agent of LangGraph with it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.client import MODEL, QUESTION, Client, Total, add
from tests.clients.scripted_model import ANSWER, CALL, THOUGHT

langchain_openai = pytest.importorskip("langchain_openai")

CLIENT = Client(
    "LangChain",
    ("langchain-openai", "langgraph"),
    notes={
        "reasoning": "in `ChatOpenAI` with `use_responses_api=True` only: with chat completions it drops the reasoning",
        "embeddings": "with `check_embedding_ctx_length=False`, or it sends token ids of OpenAI's tokenizer",
    },
)


@pytest.fixture
def model(url: str) -> Any:
    return langchain_openai.ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_chat(model: Any) -> None:
    answer = model.invoke([("system", "Be brief."), ("user", QUESTION)])
    assert answer.content == ANSWER
    assert answer.usage_metadata["output_tokens"] > 0


def test_stream(model: Any) -> None:
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == ANSWER


def test_tools(model: Any) -> None:
    from langchain.agents import create_agent

    state = create_agent(model, [add]).invoke({"messages": [("user", QUESTION)]})
    assert state["messages"][1].tool_calls[0]["args"] == CALL
    assert state["messages"][-1].content == ANSWER


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured(model: Any, method: str) -> None:
    schema = dict if method == "json_mode" else Total
    answer = model.with_structured_output(Total if schema is Total else None, method=method).invoke(QUESTION)
    assert isinstance(answer, schema)


def test_reasoning(url: str) -> None:
    model = langchain_openai.ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", use_responses_api=True, reasoning={"effort": "low"}
    )
    answer = model.invoke(QUESTION)
    [thought] = [block for block in answer.content if block["type"] == "reasoning"]
    assert thought["content"][0]["text"] == THOUGHT
    assert model.invoke([("user", QUESTION), answer, ("user", QUESTION)]).text == ANSWER


def test_embeddings(url: str) -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    one, two = embeddings.embed_documents(["one", "two"])
    assert one != two
