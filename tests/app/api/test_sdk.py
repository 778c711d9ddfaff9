"""OpenAI's client and its helpers against a server in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from folio.app.errors import OverloadedError
from tests.app.api.fake_service import FakeService
from tests.local_server import LocalServer, guarded_api, listening

QUESTION: list[Any] = [{"role": "user", "content": "What is Folio?"}]
CHAT: dict[str, Any] = {"model": "builtin", "messages": QUESTION, "temperature": 0}
TIMEOUT_S = 60

pytestmark = pytest.mark.usefixtures("server")


class Room(BaseModel):
    """Which room, and whether it is free."""

    model_config = ConfigDict(extra="forbid")

    free: bool
    room: Literal[417, 256]


class FindKey(BaseModel):
    """Look up the key of a room."""

    model_config = ConfigDict(extra="forbid")

    room: Literal[417, 256]


@pytest.fixture(scope="module")
def client(local_server: LocalServer) -> Iterator[openai.OpenAI]:
    with (
        listening(local_server.api) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client,
    ):
        yield client


def test_structured_answers_are_parsed(client: openai.OpenAI) -> None:
    """In full, and streamed with the client's own accumulation: both are equal."""
    whole = client.chat.completions.parse(response_format=Room, **CHAT).choices[0].message
    assert isinstance(whole.parsed, Room)
    with client.chat.completions.stream(response_format=Room, **CHAT) as stream:
        types = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= types
    assert (final.parsed, final.content) == (whole.parsed, whole.content)


def test_tool_calls_are_parsed_and_their_answers_sent_back(client: openai.OpenAI) -> None:
    """A call, in full and from streamed deltas; the next request has the client's own message objects."""
    tools: Any = [openai.pydantic_function_tool(FindKey), openai.pydantic_function_tool(Room)]
    calls: dict[str, Any] = CHAT | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.parse(**calls).choices[0].message
    assert message.tool_calls
    assert all(isinstance(call.function.parsed_arguments, FindKey | Room) for call in message.tool_calls)
    with client.chat.completions.stream(**calls) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0].message
    assert deltas
    assert final.tool_calls
    arguments = [call.function.arguments for call in message.tool_calls]
    assert [call.function.arguments for call in final.tool_calls] == arguments
    for choice in ("none", "auto", {"type": "function", "function": {"name": "Room"}}):
        one = client.chat.completions.create(**CHAT, tools=tools, tool_choice=choice).choices[0].message
        assert [call.function.name for call in one.tool_calls or ()] == (["Room"] if isinstance(choice, dict) else [])

    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "93"} for call in message.tool_calls]
    answered = client.chat.completions.create(**(CHAT | {"messages": [*QUESTION, message, *results], "max_tokens": 4}))
    assert answered.choices[0].finish_reason == "length"


def test_likelihoods_of_batches_of_tokens(client: openai.OpenAI) -> None:
    """Evaluation harnesses echo prompts of token ids of several lengths: likelihoods are those of single requests."""
    more: dict[str, Any] = {"model": "builtin", "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
    prompts = [[300, 301, 302, 303, 304], [5], list(range(260, 300))]
    together: list[Any] = client.completions.create(prompt=prompts, **more).choices
    assert [len(choice.logprobs.tokens) for choice in together] == [5, 1, 40]
    for prompt, choice in zip(prompts, together, strict=True):
        [alone] = client.completions.create(prompt=prompt, **more).choices
        assert choice.text == alone.text
        assert choice.logprobs.token_logprobs[:1] == [None]
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(alone.logprobs.token_logprobs[1:], abs=1e-3)


def test_an_echo_is_as_likely_as_it_was_generated(client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"model": "builtin", "logprobs": 1, "temperature": 0}
    prompt = "The key of room 417 is 93. The key of room 417 is"
    [first] = client.completions.create(prompt=prompt, max_tokens=2, **more).choices
    [echoed] = client.completions.create(prompt=prompt + first.text, max_tokens=0, echo=True, **more).choices
    at = echoed.logprobs.text_offset.index(len(prompt))
    assert echoed.logprobs.tokens[at:] == first.logprobs.tokens
    assert echoed.logprobs.token_logprobs[at:] == pytest.approx(first.logprobs.token_logprobs, abs=1e-3)


def test_a_stream_that_is_dropped_gives_its_pages_back(client: openai.OpenAI, server: LocalServer) -> None:
    more: dict[str, Any] = {"model": "builtin", "prompt": ["a", "b"], "n": 2, "max_tokens": 3000, "temperature": 2.0}
    with client.completions.create(stream=True, extra_body={"ignore_eos": True}, **more) as stream:
        next(iter(stream))
        assert server.engine.report().active_bytes > 0


class _Service(FakeService):
    """A service that refuses the first requests."""

    num_refused = 0

    def _fail(self, model: str) -> None:
        if model == "busy" and self.num_refused < 2:
            self.num_refused += 1
            raise OverloadedError("too many", 0.5)


def test_the_client_understands_errors() -> None:
    """The client retries when the server allows it, and raises the error that ends a stream."""
    service = _Service()
    with (
        listening(guarded_api(service)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=2) as client,
    ):
        assert client.completions.create(model="busy", prompt="x").choices[0].text == "x"
        assert service.num_refused == 2
        service.num_refused = 0
        with pytest.raises(openai.RateLimitError) as refused:
            client.with_options(max_retries=0).completions.create(model="busy", prompt="x", stream=True)
        assert (refused.value.response.headers["retry-after"], refused.value.code) == ("1", "overloaded")
        begun = client.completions.create(model="late", prompt="x", stream=True)
        assert next(begun).choices[0].text == "begun"
        with pytest.raises(openai.APIError, match="a step failed"):
            next(begun)
