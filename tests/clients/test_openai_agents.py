"""OpenAI's agents SDK over chat completions and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.client import MODEL, QUESTION, Client, Total
from tests.clients.client import add as add_numbers
from tests.clients.scripted_model import ANSWER, THOUGHT

agents = pytest.importorskip("agents")

CLIENT = Client("OpenAI Agents", ("openai-agents",), absent={"embeddings": "agents only"})


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def model(request: pytest.FixtureRequest, url: str) -> Any:
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return getattr(agents, request.param)(model=MODEL, openai_client=client)


def _run(agent: Any) -> Any:
    return asyncio.run(agents.Runner.run(agent, QUESTION))


def test_chat(model: Any) -> None:
    assert _run(agents.Agent(name="a", instructions="Be brief.", model=model)).final_output == ANSWER


def test_stream(model: Any) -> None:
    async def read() -> str:
        result = agents.Runner.run_streamed(agents.Agent(name="a", model=model), QUESTION)
        events = [event async for event in result.stream_events() if event.type == "raw_response_event"]
        return "".join(e.data.delta for e in events if e.data.type == "response.output_text.delta")

    assert asyncio.run(read()) == ANSWER


def test_tools(model: Any) -> None:
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(add_numbers)])
    result = _run(agent)
    assert "tool_call_output_item" in [item.type for item in result.new_items]
    assert result.final_output == ANSWER


@pytest.mark.parametrize("model", ["OpenAIResponsesModel"], indirect=True)
def test_tools_with_stored_responses(model: Any) -> None:
    """Each request has the new items alone, and the id of the response before them."""
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(add_numbers)])

    async def two_turns() -> tuple[Any, Any]:
        first = await agents.Runner.run(agent, QUESTION, auto_previous_response_id=True)
        return first, await agents.Runner.run(agent, QUESTION, previous_response_id=first.last_response_id)

    first, second = asyncio.run(two_turns())
    assert "tool_call_output_item" in [item.type for item in first.new_items]
    assert first.final_output == second.final_output == ANSWER
    assert "tool_call_output_item" not in [item.type for item in second.new_items]  # it knows the result


def test_structured(model: Any) -> None:
    assert isinstance(_run(agents.Agent(name="a", model=model, output_type=Total)).final_output, Total)


def test_structured_with_tools(model: Any) -> None:
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(add_numbers)], output_type=Total)
    assert isinstance(_run(agent).final_output, Total)


def test_reasoning(model: Any) -> None:
    agent = agents.Agent(name="a", model=model)

    async def two_turns() -> tuple[Any, Any]:
        first = await agents.Runner.run(agent, QUESTION)
        more = [*first.to_input_list(), {"role": "user", "content": QUESTION}]
        return first, await agents.Runner.run(agent, more)

    first, second = asyncio.run(two_turns())
    [thought] = [item for item in first.new_items if item.type == "reasoning_item"]
    assert THOUGHT in thought.raw_item.model_dump_json()
    assert second.final_output == ANSWER
