"""smolagents with its model for servers like OpenAI's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.client import MODEL, QUESTION, USER, Client, Total, add
from tests.clients.scripted_model import ANSWER, CALL

smolagents = pytest.importorskip("smolagents")

CLIENT = Client(
    "smolagents",
    ("smolagents",),
    absent={"reasoning": "`ChatMessage` has no field for it", "embeddings": "agents only"},
)


@pytest.fixture
def model(url: str) -> Any:
    return smolagents.OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key="none")


def test_chat(model: Any) -> None:
    assert model([USER]).content == ANSWER


def test_stream(model: Any) -> None:
    assert "".join(delta.content or "" for delta in model.generate_stream([USER])) == ANSWER


def test_tools(model: Any) -> None:
    agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(add)], model=model, max_steps=1, verbosity_level=0)
    assert agent.run(QUESTION) == ANSWER  # of the request after the last step, without tools
    [step] = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert [call.arguments for call in step.tool_calls] == [CALL]
    assert step.observations == "5"


def test_structured(model: Any) -> None:
    schema = {"name": "Total", "schema": Total.model_json_schema()}
    answer = model([USER], response_format={"type": "json_schema", "json_schema": schema})
    Total.model_validate_json(answer.content)
