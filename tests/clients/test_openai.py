"""The official Python client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.client import ADD_TOOL, MODEL, PARAMETERS, QUESTION, USER, Client, Total, add
from tests.clients.scripted_model import ANSWER, CALL, THOUGHT

openai = pytest.importorskip("openai")

CLIENT = Client(f"openai {openai.__version__.partition('.')[0]} (Python)", ("openai",))


@pytest.fixture
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[USER])
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_chat_completions(client: Any) -> None:
    assert client.completions.create(model=MODEL, prompt="The", max_tokens=8).choices[0].text == " sum is 5."


def test_chat_responses(client: Any) -> None:
    assert client.responses.create(model=MODEL, input=QUESTION).output_text == ANSWER
    assert [model.id for model in client.models.list()] == [MODEL]


def test_stream(client: Any) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=[USER], stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage.completion_tokens > 0


def test_stream_helper(client: Any) -> None:
    with client.chat.completions.stream(model=MODEL, messages=[USER]) as stream:
        kinds = [event.type for event in stream]
    assert "content.done" in kinds
    assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_stream_responses(client: Any) -> None:
    with client.responses.stream(model=MODEL, input=QUESTION) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == ANSWER
    assert {"response.reasoning_text.delta", "response.output_text.delta", "response.completed"} <= set(kinds)


def test_tools(client: Any) -> None:
    messages: list[Any] = [USER]
    message = client.chat.completions.create(model=MODEL, messages=messages, tools=[ADD_TOOL]).choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments) == CALL
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": str(add(**CALL))}]
    final = client.chat.completions.create(model=MODEL, messages=messages, tools=[ADD_TOOL])
    assert final.choices[0].message.content == ANSWER


def test_tools_streamed(client: Any) -> None:
    with client.chat.completions.stream(model=MODEL, messages=[USER], tools=[ADD_TOOL]) as stream:
        arguments = "".join(e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta")
    assert json.loads(arguments) == CALL
    assert stream.get_final_completion().choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_tools_forced(client: Any, choice: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[USER], tools=[ADD_TOOL], tool_choice=choice)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["add"]


def test_tools_responses(client: Any) -> None:
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
    inputs: list[Any] = [USER]
    answer = client.responses.create(model=MODEL, input=inputs, tools=[tool])
    inputs += answer.output
    [call] = [item for item in answer.output if item.type == "function_call"]
    inputs.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    assert client.responses.create(model=MODEL, input=inputs, tools=[tool]).output_text == ANSWER


def test_structured(client: Any) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=[USER], response_format=Total)
    assert isinstance(answer.choices[0].message.parsed, Total)


def test_structured_responses(client: Any) -> None:
    assert isinstance(client.responses.parse(model=MODEL, input=QUESTION, text_format=Total).output_parsed, Total)


def test_structured_json_object(client: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[USER], response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_structured_with_tools(client: Any) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[USER],
        tools=[ADD_TOOL | {"function": ADD_TOOL["function"] | {"strict": True}}],
        response_format=Total,
    )
    assert answer.choices[0].message.tool_calls


def test_reasoning(client: Any) -> None:
    message = client.chat.completions.create(model=MODEL, messages=[USER]).choices[0].message
    assert message.reasoning_content == THOUGHT
    more = [USER, message, USER]
    assert client.chat.completions.create(model=MODEL, messages=more).choices[0].message.content == ANSWER


def test_reasoning_off(client: Any) -> None:
    for extra in ({"chat_template_kwargs": {"enable_thinking": False}}, {"thinking": False}):
        answer = client.chat.completions.create(model=MODEL, messages=[USER], extra_body=extra)
        assert getattr(answer.choices[0].message, "reasoning_content", None) is None
        assert answer.choices[0].message.content == ANSWER


def test_reasoning_responses(client: Any) -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, reasoning={"effort": "low"})
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    more = [USER, *answer.output, USER]
    assert client.responses.create(model=MODEL, input=more).output_text == ANSWER


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings(client: Any, form: str) -> None:
    answer = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format=form)
    assert len(answer.data) == 2
    assert answer.data[0].embedding != answer.data[1].embedding
