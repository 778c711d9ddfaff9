"""The client over HTTP and gRPC, with a server and a real engine in this process."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import pytest

from folio.app.api.responses.body import ResponsesRequest
from folio.app.client import (
    AddModelRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ContextLengthError,
    DeadlineError,
    EngineError,
    Folio,
    FolioError,
    ForbiddenError,
    ForkRequest,
    LoadAdapterRequest,
    MemoryReport,
    Message,
    OverloadedError,
    PinRequest,
    RequestError,
    UnavailableError,
    UnknownModelError,
    UnknownPinError,
    UnloadAdapterRequest,
)
from folio.app.client.over_grpc import call_error
from folio.app.config.http import HttpSettings, KeySource
from tests.app.api.fake_service import FakeService
from tests.grpc_server import grpc_listening
from tests.local_server import LocalServer, guarded_api, listening
from tests.processes import until_async

ROOT = Path(__file__).parents[3]
SCHEMES = ("http", "grpc")
PROMPT = "The key of room 417 is 93. The key of room 417 is"
QUESTION: dict[str, Any] = {"model": "builtin", "messages": [{"role": "user", "content": "What is Folio?"}]}
# In this order, which is not that of the names.
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"const": 1}, "a": {"const": 2}},
    "required": ["b", "a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"b": 1, "a": 2}'}}
CALLED, RESULT = {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "1", "content": "93"}


@contextmanager
def url_of(scheme: str, api: Any) -> Iterator[str]:
    with listening(api) if scheme == "http" else grpc_listening(api) as url:
        yield url


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    local = LocalServer()
    yield local
    local.close()


@pytest.fixture(scope="module")
def urls(server: LocalServer) -> Iterator[dict[str, str]]:
    with url_of("http", server.api) as over_http, url_of("grpc", server.api) as over_grpc:
        yield {"http": over_http, "grpc": over_grpc}


@pytest.fixture(params=SCHEMES)
def url(request: pytest.FixtureRequest, urls: dict[str, str], server: LocalServer) -> Iterator[str]:
    yield urls[request.param]
    server.wait_until_idle()


def stable_fields(answer: Any) -> dict[str, Any]:
    """The fields that do not change from call to call."""
    fields: dict[str, Any] = answer.model_dump(exclude={"id", "created"})
    if fields["usage"] is not None:
        del fields["usage"]["prompt_tokens_details"]
    for choice in fields["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or ():
            del call["id"]
    return fields


async def everything(url: str) -> list[Any]:
    """Answers of every kind, each with a field that the others lack."""
    completions: list[dict[str, Any]] = [
        {"prompt": PROMPT, "max_tokens": 8},
        {"prompt": [PROMPT, "a"], "n": 2, "seed": 2**40, "temperature": 1.5, "max_tokens": 4, "stop": " "},
        {"prompt": [[5, 6, 7], [8]], "max_tokens": 2, "stop_token_ids": list(range(100)), "min_tokens": 1},
        {"prompt": [5, 6, 7], "max_tokens": 2, "echo": True, "logprobs": 2, "prompt_logprobs": 2},
        {"prompt": "a", "max_tokens": 3, "n": 2, "best_of": 2, "use_beam_search": True, "early_stopping": "never"},
        {"prompt": "a", "max_tokens": 16, "guided_json": PARAMETERS},
        {"prompt": "a", "max_tokens": 4, "logit_bias": {"70": 100.0}, "bad_words": ["b"], "ignore_eos": True},
    ]  # fmt: skip
    chats: list[dict[str, Any]] = [
        {"max_tokens": 8},
        {"max_tokens": 4, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
        {"max_tokens": 60, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "const": 5}}}},
        {"max_tokens": 40, "response_format": {"type": "json_object"}},
        {"messages": [*QUESTION["messages"], CALLED, RESULT], "max_tokens": 4, "tools": [TOOL]},
    ]  # fmt: skip
    answers: list[Any] = []
    async with Folio(url) as folio:
        for fields in completions:
            fields = {"model": "builtin", "temperature": 0} | fields
            if fields.get("use_beam_search"):
                del fields["temperature"]
            completion = CompletionRequest(**fields)
            answers.append(stable_fields(await folio.generate(completion)))
            answers.append(await texts_of(folio.generate_stream(completion)))
        for fields in chats:
            chat = ChatCompletionRequest.model_validate(QUESTION | {"temperature": 0} | fields)
            answers.append(stable_fields(await folio.chat(chat, "session")))
            answers.append(await texts_of(folio.chat_stream(chat, "session")))
        usage = CompletionRequest(model="builtin", prompt="a", max_tokens=2, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in folio.generate_stream(usage)]
        answers.append((chunks[-1].choices, chunks[-1].usage))
    return answers


async def texts_of(chunks: Any) -> dict[int, list[Any]]:
    """Each output of a stream, however it is cut into chunks."""
    texts: dict[int, list[Any]] = {}
    async for chunk in chunks:
        for choice in chunk.choices:
            text, ends, entries, calls = texts.setdefault(choice.index, ["", [], [], []])
            delta = choice.delta if hasattr(choice, "delta") else None
            text += choice.text if delta is None else delta.content or ""
            if choice.finish_reason is not None:
                ends.append((choice.finish_reason, choice.stop_reason, choice.score))
            if choice.logprobs is not None:
                logprobs = choice.logprobs.model_dump()
                entries += logprobs.get("content") or list(zip(*logprobs.values(), strict=True))
            if delta is not None and delta.tool_calls:
                calls += [call.function.arguments or call.function.name for call in delta.tool_calls]
            texts[choice.index] = [text, ends, entries, ["".join(calls)]]
    return texts


async def test_answers_are_the_same_over_http_and_grpc(urls: dict[str, str]) -> None:
    """Every field of bodies and answers has the same value and type over gRPC as over HTTP."""
    over_http, over_grpc = await everything(urls["http"]), await everything(urls["grpc"])
    assert len(over_http) == 27
    for expected, answer in zip(over_http, over_grpc, strict=True):
        assert answer == expected
    [call] = over_http[18]["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"b": 1, "a": 2}


async def test_pins_and_load(url: str) -> None:
    async with Folio(url) as folio:
        await folio.ready()
        await folio.pin(PinRequest(name="a/ü b", prompt=PROMPT * 4))
        await folio.pin(PinRequest(name="talk", messages=[Message(role="user", content=PROMPT * 4)]))
        assert sorted(card.id for card in (await folio.pins()).data) == ["a/ü b", "talk"]
        with pytest.raises(UnknownModelError):
            await folio.unpin("a/ü b", "an ü/model")
        [card, _] = (await folio.pins()).data
        await folio.unpin("a/ü b", card.model)
        await folio.unpin("talk")
        with pytest.raises(UnknownPinError):
            await folio.unpin("talk")
        assert (await folio.pins()).data == []
        load = await folio.load()
        assert [replica.name for replica in load.replicas] == ["local"]


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "other"}, UnknownModelError, "model"),
        ({"prompt": "a" * 50_000, "max_tokens": 4}, ContextLengthError, "prompt"),
        ({"n": -1}, RequestError, "n"),
        ({"timeout_s": 0.001, "max_tokens": 500, "ignore_eos": True}, DeadlineError, None),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_errors_are_those_of_the_server(
    url: str, fields: dict[str, Any], kind: type[FolioError], param: str | None, streams: bool
) -> None:
    request = CompletionRequest(**({"model": "builtin", "prompt": PROMPT} | fields))
    async with Folio(url) as folio:
        call = texts_of(folio.generate_stream(request)) if streams else folio.generate(request)
        with pytest.raises(kind) as caught:
            await call
        assert type(caught.value) is kind
        assert getattr(caught.value, "param", None) == param


async def test_a_stream_that_is_closed_ends_the_request(url: str, server: LocalServer) -> None:
    """So does a call whose task is cancelled. The fixture waits for the memory."""
    request = CompletionRequest(model="builtin", prompt="a", max_tokens=1000, ignore_eos=True)
    async with Folio(url) as folio:
        async with aclosing(folio.generate_stream(request)) as chunks:
            async for _ in chunks:
                break
        call = asyncio.create_task(folio.generate(request))
        await until_async(lambda: server.engine.load(most_keys=0).num_running)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        # Closing the connections would end the requests, too: wait before.
        await asyncio.to_thread(server.wait_until_idle)


async def test_a_hundred_streams_at_once(url: str) -> None:
    async with Folio(url) as folio:
        requests = [
            CompletionRequest(model="builtin", prompt=f"The key of room {i}", max_tokens=8, temperature=0)
            for i in range(100)
        ]
        alone = await asyncio.gather(*(folio.generate(request) for request in requests))
        together = await asyncio.gather(*(texts_of(folio.generate_stream(request)) for request in requests))
        assert [texts[0][0] for texts in together] == [answer.choices[0].text for answer in alone]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_server_that_cannot_be_reached(scheme: str) -> None:
    async with Folio(f"{scheme}://127.0.0.1:1") as folio:
        with pytest.raises(UnavailableError, match=r"127.0.0.1:1.*send the request again"):
            await folio.generate(CompletionRequest(model="m", prompt="a"))
        with pytest.raises(UnavailableError, match="not ready after 0"):
            await folio.ready(timeout_s=0)


async def test_a_server_that_starts_late_is_found_soon() -> None:
    """Regression: gRPC tried to connect at growing intervals: by default 1, 1.6, 2.6 and 4.1 s, up to two minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        async with Folio(f"grpc://127.0.0.1:{server.getsockname()[1]}") as folio:
            waiting = asyncio.create_task(folio.ready(timeout_s=60))
            attempts = []
            for _ in range(5):
                connection, _ = await asyncio.to_thread(server.accept)
                connection.close()
                attempts.append(time.monotonic())
            assert max(after - before for before, after in itertools.pairwise(attempts)) < 3
            assert not waiting.done()
            waiting.cancel()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_keys_reports_and_retry_after(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a-key-of-an-operator\n")
    report = MemoryReport(**{field.name: 7 for field in fields(MemoryReport)} | {"pins": (), "groups": ()})

    class Service(FakeService):
        async def reports(self) -> dict[str, MemoryReport]:
            return {"r1": report, "r2": report}

    api = guarded_api(Service(), HttpSettings(api_keys=KeySource(file=tmp_path / "keys")))

    with url_of(scheme, api) as url:
        async with Folio(url) as folio:
            with pytest.raises(ForbiddenError, match="API key is missing"):
                await folio.report()
        async with Folio(url, api_key="a-key-of-an-operator") as folio:
            assert await folio.report() == {"r1": report, "r2": report}
            with pytest.raises(OverloadedError) as caught:
                await folio.generate(CompletionRequest(model="full for a while", prompt="a"))
            assert caught.value.retry_after_s == 3
            if scheme == "http":
                assert await folio.set_budget(1 << 30, 8) == ["applied"]
            answer = await folio.generate(CompletionRequest(model="m", prompt="a"), "s")
            assert answer.choices[0].text == "a of s"
            fork, load = ForkRequest(model="m", request_id="r"), LoadAdapterRequest(lora_name="a", lora_path="p")
            if scheme == "http":
                assert (await folio.fork(fork)).choices[0].text == "r 0"
                assert [chunk.choices[0].text async for chunk in folio.fork_stream(fork)] == ["a"]
                add = AddModelRequest(name="b", path="p", keep=3.0)
                assert (await folio.add_model(add)).state == "new"
                with pytest.raises(RequestError, match="there is a model already"):
                    await folio.add_model(add)
                await folio.remove_model("b")
                with pytest.raises(UnknownModelError):
                    await folio.remove_model("b")
                assert [card.id for card in (await folio.models()).data] == ["m"]
                await folio.load_adapter(load)
                with pytest.raises(RequestError, match="it has been loaded"):
                    await folio.load_adapter(load)
                await folio.unload_adapter(UnloadAdapterRequest(lora_name="a"))
                with pytest.raises(UnknownModelError):
                    await folio.unload_adapter(UnloadAdapterRequest(lora_name="a"))
                return
            with pytest.raises(RequestError, match="fork is not available"):
                await folio.fork(fork)
            with pytest.raises(RequestError, match="load_adapter is not available"):
                await folio.load_adapter(load)


@pytest.mark.parametrize(
    ("status", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "refused", UnavailableError),
        (grpc.StatusCode.NOT_FOUND, "Application metadata not set.", UnavailableError),  # while Serve starts
        (grpc.StatusCode.CANCELLED, "", UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Request dropped due to backpressure", OverloadedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (2 vs. 1)", RequestError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineError),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", RequestError),
        (grpc.StatusCode.UNKNOWN, "?", EngineError),
    ],
)
def test_errors_of_grpc_and_serve(status: grpc.StatusCode, details: str, kind: type[FolioError]) -> None:
    """They have no JSON of ours. The type tells whether to send the request again."""
    raised = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    assert type(call_error(raised, "grpc://x:1")) is kind


async def test_fields_and_calls_that_grpc_lacks_are_refused_by_name() -> None:
    async with Folio("grpc://127.0.0.1:1") as folio:
        with pytest.raises(RequestError, match="metadata cannot be sent over gRPC"):
            await folio.generate(CompletionRequest(model="m", prompt="a", metadata={"a": "b"}))
        with pytest.raises(RequestError, match="responses is not available over gRPC"):
            await folio.responses(ResponsesRequest(model="m", input="a"))


async def test_a_stream_without_its_end_is_an_error() -> None:
    """A connection that ends after a whole event looks like the end of a stream."""

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        chunk = {"id": "c", "created": 0, "model": "m", "choices": [{"text": "a"}]}
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": f"data: {json.dumps(chunk)}\n\n".encode()})

    with listening(cut) as url:  # type: ignore[arg-type]
        async with Folio(url) as folio:
            with pytest.raises(UnavailableError, match="was lost"):
                await texts_of(folio.generate_stream(CompletionRequest(model="m", prompt="a")))


def test_other_schemes_are_refused() -> None:
    with pytest.raises(ValueError, match="ftp://; it must be http, https, grpc or grpcs"):
        Folio("ftp://x")


@pytest.mark.processes
def test_calls_by_url_need_no_ray() -> None:
    code = """
import sys
sys.modules["ray"] = None  # makes an import of it fail
from folio.app.client import Folio
Folio("http://x"), Folio("grpc://x")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


async def test_a_tenant_cannot_change_the_budget(tmp_path: Path) -> None:
    """Also where the settings leave operators no paths of their own."""
    file = tmp_path / "keys.json"
    keys = [
        {"name": "tenant", "key": "a-key-of-a-tenant"},
        {"name": "me", "key": "a-key-of-mine-too", "operator": True},
    ]
    file.write_text(json.dumps({"keys": keys}))
    settings = HttpSettings(api_keys=KeySource(file=file), operator_paths=frozenset())
    with url_of("http", guarded_api(FakeService(), settings)) as url:
        async with Folio(url, api_key="a-key-of-a-tenant") as folio:
            assert await folio.report() == {}
            with pytest.raises(ForbiddenError, match="the budget is for operators"):
                await folio.set_budget(1 << 30, 8)
        async with Folio(url, api_key="a-key-of-mine-too") as folio:
            assert await folio.set_budget(1 << 30, 8) == ["applied"]
