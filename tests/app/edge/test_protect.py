"""Guard around the API and the real ingress with engines that answer at once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.api.openai.bodies import CompletionRequest
from folio.app.api.openai.replies import Completion
from folio.app.api.operators.replies import PinCard, PinList
from folio.app.config.http import HttpSettings
from folio.app.config.logs import WithheldMessages
from folio.app.errors import EngineError, OverloadedError, RequestError
from tests.app.api.fake_service import FakeService
from tests.app.edge.asgi import Answer, bearer, call
from tests.fakes.replicas import TOKENIZER, Engines, ingress_with
from tests.local_server import guarded_api

FREE, BOUND = "sk-free-0123456789", "sk-bound-0123456789"
MARKER = "xyzzy-plugh"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    bound = {"name": "bound", "key": BOUND, "tenant": "acme", "models": ["m"], "best_priority": 5}
    path.write_text(json.dumps({"keys": [{"name": "free", "key": FREE}, bound]}))
    return path


def api_with(engines: Engines, **settings: Any) -> Any:
    return guarded_api(ingress_with(engines), HttpSettings.model_validate(settings))


def post(app: Any, body: dict[str, Any] | bytes, key: str = FREE, path: str = "/v1/completions") -> Answer:
    if isinstance(body, dict):
        defaults = {"model": "m", "prompt": "Hello"} if path == "/v1/completions" else {"model": "m"}
        body = json.dumps(defaults | body).encode()
    return asyncio.run(call(app, "POST", path, [*bearer(key), ("content-type", "application/json")], body))


def test_a_key_decides_the_tenant(keys: Path) -> None:
    app = api_with(engines := Engines(), api_keys={"file": str(keys)})
    for body, key in (
        ({"tenant": "other"}, FREE),
        ({"priority": 5}, BOUND),
        ({"priority": 6, "tenant": "acme", "user": "u"}, BOUND),
        ({"priority": 6, "user": "u", "stream": True, "prompt": ["a", "b"]}, BOUND),
    ):
        assert post(app, body, key).status == 200
    chat = {"model": "m", "priority": 7, "messages": [{"role": "user", "content": "Hello"}]}
    assert post(app, chat, BOUND, "/v1/chat/completions").status == 200
    assert [call.tenant for call in engines.calls] == ["other", "acme", "acme", "acme", "acme", "acme"]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})])
def test_a_keys_models_hold_for_tokens_too(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [{"name": "k", "key": BOUND, "models": ["pirate"]}]}))
    app = api_with(Engines(), api_keys={"file": str(tmp_path / "keys.json")})
    assert post(app, body | {"model": "pirate"}, BOUND, path).status == 200
    for model in ("m", None):  # which is the same
        refused = post(app, body | {"model": model}, BOUND, path)
        assert (refused.status, refused.error["code"]) == (403, "not_allowed")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tenant": "other", "priority": 5}, "tenant"),
        ({"tenant": "other", "priority": 5, "stream": True}, "tenant"),
        ({"model": "pirate", "priority": 5}, "model"),
        ({"priority": 4}, "priority"),
        ({"priority": 5, "pin": "mine"}, "pin"),
    ],
)
def test_fields_that_a_key_does_not_allow(keys: Path, body: dict[str, Any], param: str) -> None:
    app = api_with(engines := Engines(), api_keys={"file": str(keys)})
    refused = post(app, body, BOUND)
    assert (refused.status, refused.error["param"], refused.error["code"]) == (403, param, "not_allowed")
    assert not engines.calls


def test_deadlines_have_a_default_and_a_bound() -> None:
    app = api_with(engines := Engines(), default_timeout_s=5, max_timeout_s=60)
    assert [post(app, body).status for body in ({}, {"timeout_s": 60.0}, {"timeout_s": 61.0})] == [200, 200, 400]
    left_s = [call.timeout_s for call in engines.calls]
    assert left_s == pytest.approx([5, 60], abs=1.0)  # less what has passed
    app = api_with(engines := Engines(), max_timeout_s=60)
    assert post(app, {}).status == 200
    assert engines.calls[0].timeout_s == pytest.approx(60, abs=1.0)


def test_tokens_are_counted_as_engines_count_them() -> None:
    prompt = "Hello there, how do you do"
    num_tokens = len(TOKENIZER.encode(prompt))
    app = api_with(Engines(), address_limits={"tokens_per_minute": num_tokens + 2})

    def left(answer: Answer) -> int:
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    assert left(post(app, {"prompt": prompt, "n": 2})) == 0  # each output has one
    refused = post(app, {"prompt": prompt})
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    wait_s = int(refused.headers["retry-after"])
    assert 60 / (num_tokens + 2) <= wait_s <= 60
    app = api_with(Engines(), address_limits={"tokens_per_minute": num_tokens - 1})
    assert post(app, {"prompt": prompt}).status == 400
    full = Engines(error=OverloadedError("full"))
    app = api_with(full, address_limits={"tokens_per_minute": num_tokens})
    for _ in range(3):  # refused requests are not charged
        assert post(app, {"prompt": prompt}).error["code"] == "overloaded"
        full.calls.clear()


def test_streams_are_charged() -> None:
    app = api_with(Engines(), address_limits={"tokens_per_minute": 100})
    assert post(app, {"stream": True, "n": 3}).status == 200
    prompt = len(TOKENIZER.encode("Hello"))
    after = int(post(app, {}).headers["x-ratelimit-remaining-tokens"])
    assert after == 100 - 2 * prompt - 3 - 1


def test_browsers_may_call_from_named_origins(keys: Path) -> None:
    settings = {"cors_origins": ["https://app.example"], "api_keys": {"file": str(keys)}}
    app = guarded_api(FakeService(), HttpSettings.model_validate(settings))

    def ask(method: str, origin: str, *headers: tuple[str, str]) -> Answer:
        return asyncio.run(call(app, method, "/v1/models", [("Origin", origin), *headers]))

    for verb in ("POST", "PUT", "DELETE"):  # of `/v1/pins` and `/v1/budget`
        asks = ("Access-Control-Request-Method", verb), ("Access-Control-Request-Headers", "authorization")
        preflight = ask("OPTIONS", "https://app.example", *asks)
        assert preflight.status == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = ask("GET", "https://app.example")
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in ask("GET", "https://evil.example", *bearer(FREE)).headers


REQUESTS: list[dict[str, Any] | bytes] = [
    {"prompt": MARKER},
    {"prompt": MARKER, "stream": True},
    {"prompt": [MARKER, MARKER], "echo": True, "logprobs": 1},
    {"prompt": MARKER, "suffix": MARKER},
    {"prompt": MARKER * 200},  # longer than the context
    {"prompt": MARKER, "stop": [MARKER, ""]},
    {"prompt": MARKER, "stop": MARKER, "user": MARKER, "cache_salt": MARKER, "tenant": MARKER},
    {"prompt": {MARKER: MARKER}},
    {"prompt": MARKER, MARKER: MARKER},
    {"prompt": MARKER, "temperature": MARKER},
    {"prompt": MARKER, "logit_bias": {MARKER: 1}},
    {"prompt": MARKER, "guided_json": {"type": MARKER}},
    {"prompt": MARKER, "guided_grammar": MARKER},
    {"prompt": MARKER, "guided_regex": "(" + MARKER},
    {"prompt": MARKER, "model": MARKER},
    b'{"prompt": "' + MARKER.encode(),
    MARKER.encode() + b"\xff\xfe",
]
RESPONSES: list[dict[str, Any]] = [
    {"input": MARKER},
    {"input": MARKER, "instructions": MARKER, "stream": True},
    {"input": [{"role": MARKER, "content": MARKER}]},
    {"input": MARKER, "text": {"format": {"type": MARKER}}},
]
MESSAGES: list[dict[str, Any]] = [
    {"max_tokens": 2, "system": MARKER, "messages": [{"role": "user", "content": MARKER}]},
    {"max_tokens": 2, "messages": [{"role": "user", "content": MARKER}], "stream": True},
    {"max_tokens": 2, "messages": [{"role": MARKER, "content": [{"type": MARKER}]}]},
]
TOKENS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": MARKER}),
    ("/tokenize", {"prompt": [MARKER]}),
    ("/detokenize", {"tokens": [MARKER]}),
    ("/v1/" + "x", {"prompt": MARKER}),
]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": MARKER}]},
    {"messages": [{"role": "user", "content": MARKER}], "stream": True},
    {"messages": [{"role": MARKER, "content": MARKER}]},
    {"messages": [{"role": "tool", "content": MARKER}]},
    {"messages": [{"role": "assistant", "content": MARKER}] * 2},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": MARKER}]}]},
    {
        "messages": [{"role": "user", "content": MARKER}],
        "tools": [{"type": "function", "function": {"name": MARKER, "description": MARKER, "parameters": {}}}],
    },
    {
        "messages": [{"role": "user", "content": MARKER}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": MARKER}}}],
        "tool_choice": "required",
    },
    {
        "messages": [{"role": "user", "content": MARKER}],
        "response_format": {"type": "json_schema", "json_schema": {"name": MARKER, "schema": {"type": MARKER}}},
    },
]
FAILURES: list[Exception | None] = [
    None,
    EngineError(f"a step failed: {MARKER}"),
    RequestError(f"the structure is too complex: {MARKER}"),
    KeyError(MARKER),
    ExceptionGroup(MARKER, [ValueError(MARKER)]),
]


@pytest.fixture
def written() -> Iterator[StringIO]:
    """The log of a replica's process, with our loggers at DEBUG."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(WithheldMessages())
    root, ours = logging.getLogger(), logging.getLogger("folio")
    levels = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    ours.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_no_text_of_requests_gets_into_the_log(written: StringIO, failure: Exception | None) -> None:
    """For all kinds of requests and failures."""
    asked = [("/v1/completions", body) for body in (*REQUESTS, MARKER.encode() * 1000)]
    asked += [("/v1/chat/completions", body) for body in CHATS]
    asked += [("/v1/responses", body) for body in RESPONSES]
    asked += [(path, body) for path in ("/v1/messages", "/v1/messages/count_tokens") for body in MESSAGES]
    asked += TOKENS
    for text in (None, MARKER):
        app = api_with(engines := Engines(error=failure, text=text), max_body_bytes=10_000)
        statuses = set()
        for path, body in asked:
            statuses.add(post(app, body, path=path).status)
            engines.calls.clear()  # the first of each fails
        assert {400, 404, 413} <= statuses
        if failure is None:
            assert 200 in statuses
    lines = written.getvalue()
    assert lines.count(" ms ") == 2 * len(asked)
    assert ("Traceback" in lines) == (failure is not None and not isinstance(failure, RequestError))
    assert MARKER not in lines


@pytest.mark.parametrize("failure", FAILURES[1:], ids=lambda failure: type(failure).__name__)
def test_no_text_of_a_failed_stream_gets_into_the_log(written: StringIO, failure: Exception) -> None:
    class Breaks(FakeService):
        async def generate_stream(
            self, request: CompletionRequest, session: str | None = None
        ) -> AsyncIterator[Completion]:
            yield self._completion(MARKER)
            raise failure

    answer = post(guarded_api(Breaks()), {"prompt": MARKER, "stream": True})
    assert answer.status == 200
    assert b'"error"' in answer.body
    assert " ms error request_id=" in written.getvalue()
    assert "the stream of request" in written.getvalue()
    assert MARKER not in written.getvalue()


@pytest.mark.parametrize(
    ("key", "tenant", "pinned_for"),
    [(FREE, None, [None]), (FREE, "b", ["b"]), (BOUND, None, ["a"]), (BOUND, "a", ["a"]), (BOUND, "b", [])],
)
async def test_prefixes_are_pinned_for_the_keys_tenant(
    key: str, tenant: str | None, pinned_for: list[str | None], tmp_path: Path
) -> None:
    """A cached prefix is pinned at once: the time would reveal what another tenant has cached."""
    path = tmp_path / "keys.yaml"
    keys = [{"name": "f", "key": FREE}, {"name": "b", "key": BOUND, "tenant": "a"}]
    path.write_text(json.dumps({"keys": [key | {"operator": True} for key in keys]}))
    asked: list[tuple[Any, ...]] = []

    async def results() -> list[None]:
        return [None]

    def broadcast(method: str, *args: Any) -> SimpleNamespace:
        asked.append((method, *args))
        return SimpleNamespace(results_async=results)

    async def pins() -> PinList:
        return PinList(
            data=[PinCard(id="rules", model="m", num_tokens=16, num_bytes=1, num_replicas=1, num_computed=1)]
        )

    engines: Any = Engines()
    engines.broadcast = broadcast
    ingress = ingress_with(engines)
    ingress.pins = pins
    api = guarded_api(ingress, HttpSettings.model_validate({"api_keys": {"file": str(path)}}))
    body = json.dumps({"name": "rules", "prompt": "Be brief. " * 9} | ({} if tenant is None else {"tenant": tenant}))
    headers = [*bearer(key), ("content-type", "application/json")]
    answer = await call(api, "POST", "/v1/pins", headers, body.encode())
    assert answer.status == (200 if pinned_for else 403)
    assert [(call[:2], call[4]) for call in asked] == [(("pin", "rules"), whose) for whose in pinned_for]
    if asked:
        assert asked[0][2] == TOKENIZER.encode("Be brief. " * 9)[: len(asked[0][2])]
