"""OpenAI's client and its helpers against a server in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from folio.app.errors import EngineError, OverloadedError
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
def url(local_server: LocalServer) -> Iterator[str]:
    with listening(local_server.api) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
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


def test_the_stream_helper_adds_up(client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**CHAT, **more) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    assert final.choices[0].logprobs is not None
    assert whole.choices[0].logprobs is not None
    tokens = [entry.token for entry in whole.choices[0].logprobs.content or ()]
    assert [entry.token for entry in final.choices[0].logprobs.content or ()] == tokens
    done = next(event for event in events if event.type == "logprobs.content.done")
    assert len(done.content) == len(tokens)


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


def test_several_tool_calls_up_to_the_limit(client: openai.OpenAI) -> None:
    """A limit may end the answer in the middle of a call; the complete ones are the same, whole and streamed."""
    tools: Any = [openai.pydantic_function_tool(FindKey), openai.pydantic_function_tool(Room)]
    calls: dict[str, Any] = CHAT | {"tools": tools, "tool_choice": "required", "max_tokens": 200}
    calls["extra_body"] = {"min_tokens": 200}  # the toy may be content with one call
    whole = client.chat.completions.create(**calls).choices[0].message.tool_calls or []
    streamed: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**calls, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            call = streamed.setdefault(delta.index, ["", ""])
            call[0] += delta.function.name or ""
            call[1] += delta.function.arguments or ""
    assert len(whole) > 1
    assert streamed == {i: [call.function.name, call.function.arguments] for i, call in enumerate(whole)}


def test_an_answer_goes_back_with_all_its_nulls(client: openai.OpenAI) -> None:
    """The client's dump of a message has fields that this server never sets."""
    message = client.chat.completions.create(**CHAT).choices[0].message
    messages = [*QUESTION, message.model_dump(), *QUESTION]
    assert client.chat.completions.create(**(CHAT | {"messages": messages})).choices[0].message.content


def test_raw_and_streaming_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers["content-type"] == "application/json"
    content = raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(stream=True, **CHAT) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events) == content


def test_async_clients_at_once(url: str) -> None:
    async def stream(client: openai.AsyncOpenAI, seed: int) -> str:
        chunks = await client.completions.create(
            model="builtin", prompt="What is", temperature=1.5, seed=seed, max_tokens=12, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            alone = [await stream(client, seed) for seed in range(3)]
            together = await asyncio.gather(*(stream(client, seed) for seed in range(3)))
            assert together == alone
            return alone

    assert len(set(asyncio.run(main()))) > 1


def test_likelihoods_of_batches_of_tokens(client: openai.OpenAI) -> None:
    """Evaluation harnesses echo prompts of token ids of several lengths: likelihoods are those of single requests."""
    more: dict[str, Any] = {"model": "builtin", "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
    prompts = [[300, 301, 302, 303, 304], [5], list(range(260, 300))]
    together = client.completions.create(prompt=prompts, **more).choices
    assert [len(choice.logprobs.tokens) for choice in together if choice.logprobs] == [5, 1, 40]
    for prompt, choice in zip(prompts, together, strict=True):
        [alone] = client.completions.create(prompt=prompt, **more).choices
        assert choice.logprobs is not None
        assert alone.logprobs is not None
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
        if model == "down":
            raise EngineError("a step failed")


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
        once = client.with_options(max_retries=0)
        with pytest.raises(openai.RateLimitError) as refused:
            once.completions.create(model="busy", prompt="x", stream=True)
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.code == "overloaded"
        with pytest.raises(openai.InternalServerError):
            once.completions.create(model="down", prompt="x")
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="m", prompt="x", top_p=7)
        assert bad.value.param == "top_p"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nothing")
        begun = client.completions.create(model="late", prompt="x", stream=True)
        assert next(begun).choices[0].text == "begun"
        with pytest.raises(openai.APIError, match="a step failed"):
            next(begun)
