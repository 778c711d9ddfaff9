"""Unknown fields: dropped, named in header, log and metric; refused when they are near a known one or too many."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.testclient import TestClient

from folio.app.api.http import build_api
from folio.app.api.openai.bodies import CompletionRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest, Message, TextPart
from folio.app.api.openai.sampling_body import JsonSchema, StreamOptions
from folio.app.api.unknown_fields import MAX_UNKNOWN, UnknownFields, nearest
from folio.app.config.http import HttpSettings
from folio.app.http.request_context import EdgeObserver
from tests.app.api.asking import IGNORED as HEADER
from tests.local_server import LocalServer, guarded_api

USER = {"role": "user", "content": "What is Folio?"}


class _Counts(EdgeObserver):
    def __init__(self) -> None:
        self.ignored: Counter[str] = Counter()

    def on_ignored_field(self, name: str) -> None:
        self.ignored[name] += 1


@pytest.fixture
def client(server: LocalServer) -> TestClient:
    return TestClient(server.api, raise_server_exceptions=False)


def chat(client: TestClient, **fields: Any) -> Any:
    body = {"model": "builtin", "messages": [USER], "max_tokens": 2, "temperature": 0} | fields
    return client.post("/v1/chat/completions", json=body)


def resolved(kind: type[BaseModel], body: dict[str, Any], mode: Any = "ignore") -> tuple[Any, list[str]]:
    return UnknownFields(mode).resolve(kind, body, [{"type": "extra_forbidden"}])


def test_unknown_fields_at_any_level_are_dropped_and_named(client: TestClient) -> None:
    message = USER | {"weight": 1, "content": [{"type": "text", "text": "What is Folio?", "annotated": {"a": [1]}}]}
    tool = {"type": "function", "function": {"name": "f", "origin": 1}, "origin": 2}
    answer = chat(
        client, messages=[message], tools=[tool], tool_choice="none", provider={"a": 1}, stream_options={"x": 1}
    )
    assert answer.status_code == 200
    fields = "provider, stream_options.x, messages[].weight, messages[].content[].annotated"
    assert set(answer.headers[HEADER].split(", ")) == {*fields.split(", "), "tools[].origin", "tools[].function.origin"}
    plain = chat(client, tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none")
    assert HEADER not in plain.headers
    assert answer.json()["choices"] == plain.json()["choices"]


def test_streams_and_errors_have_the_header(client: TestClient) -> None:
    assert chat(client, stream=True, provider=1).headers[HEADER] == "provider"
    answer = chat(client, provider=1, model="other")
    assert (answer.status_code, answer.headers[HEADER]) == (404, "provider")
    answer = client.post("/tokenize", json={"prompt": "x", "truncation_side": "left"})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "truncation_side")


def test_the_body_is_as_without_its_unknown_fields() -> None:
    given = {"model": "m", "messages": [USER, USER | {"a": 1}], "b": {"c": 2}}
    value, fields = resolved(ChatCompletionRequest, given)
    assert fields == ["b", "messages[].a"]
    assert value.model_dump() == ChatCompletionRequest(model="m", messages=[Message(**USER)] * 2).model_dump()
    assert given["b"] == {"c": 2}  # what the client sent is not changed


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        (ChatCompletionRequest, "max_token", "max_tokens"),
        (ChatCompletionRequest, "temprature", "temperature"),
        (ChatCompletionRequest, "top-k", "top_k"),
        (ChatCompletionRequest, "topK", "top_k"),
        (ChatCompletionRequest, "maxTokens", "max_tokens"),
        (ChatCompletionRequest, "Temperature", "temperature"),
        (ChatCompletionRequest, "stops", "stop"),
        (ChatCompletionRequest, "responseformat", "response_format"),
        (ChatCompletionRequest, "frequencey_penalty", "frequency_penalty"),
        (StreamOptions, "include_usages", "include_usage"),
        (JsonSchema, "schema_", "schema"),
        (TextPart, "texts", "text"),
        (ChatCompletionRequest, "models", None),  # OpenRouter's
        (ChatCompletionRequest, "top_a", None),
        (ChatCompletionRequest, "repeat_penalty", None),
        (ChatCompletionRequest, "typical_p", None),
        (ChatCompletionRequest, "provider", None),
        (ChatCompletionRequest, "usage", None),
        (ChatCompletionRequest, "max_tokens" * 10, None),
        (CompletionRequest, "", None),
    ],
)
def test_the_nearest_field(kind: type[BaseModel], name: str, near: str | None) -> None:
    assert nearest(kind, name) == near


@pytest.mark.parametrize("mode", ["ignore", "error"])
def test_errors_name_misspelt_fields_and_unknown_ones_if_they_are_errors(server: LocalServer, mode: Any) -> None:
    client = TestClient(guarded_api(server.ingress, HttpSettings(unknown_fields=mode)))
    others = {"n": "2", "messages": [USER | {"a": 1}, {"role": "user"}]}
    for more, told in (
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge: unknown field; the nearest is incl"),
        (others, "n: must be an integer"),
    ):
        answer = chat(client, provider=1, **more)
        message = answer.json()["error"]["message"]
        assert (answer.status_code, answer.json()["error"]["code"], told in message) == (400, "invalid_value", True)
        assert ("provider: unknown field" in message) == (mode == "error")
    alone = chat(client, provider=1)
    assert alone.status_code == (200 if mode == "ignore" else 400)
    assert mode == "ignore" or alone.json()["error"]["message"] == "provider: unknown field"


@pytest.mark.parametrize(
    "name", ["a\r\nx-admin: 1", "a\nb", "é😀", "a,b", "a\0", "a.b[0]", "", " ", "\u2028", "n" * 10_000, "%0d%0a"]
)
def test_names_cannot_forge_headers_and_log_lines(
    client: TestClient, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO, "folio.app.api.unknown_fields")
    answer = chat(client, **{name: 1})
    assert answer.status_code == 200
    assert "x-admin" not in answer.headers
    header = answer.headers[HEADER]
    assert len(header) <= 64
    assert header.isascii()
    assert all(character.isalnum() or character in "%_-." for character in header)
    logged = [record.getMessage() for record in caplog.records]  # a name that is no word may be the prompt
    assert logged == (
        [f"ignored unknown fields of testclient: {name[:64]}"] if name.isidentifier() and name.isascii() else []
    )


def test_a_long_header_is_cut(client: TestClient) -> None:
    answer = chat(client, **{f"{'x' * 62}{i:02}": 1 for i in range(MAX_UNKNOWN)})
    header = answer.headers[HEADER]
    assert (answer.status_code, len(header) < 1100) == (200, True)
    assert header.endswith(", and 17 more")


def test_each_field_is_logged_once_for_each_client(
    client: TestClient, server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "folio.app.api.unknown_fields")
    counts = _Counts()
    unknown = UnknownFields("ignore", counts)
    for address in ("1.1.1.1", "2.2.2.2"):
        for fields in (["provider"], ["provider", "foo"], ["foo"]):
            unknown.note(fields, address)
    assert [record.getMessage() for record in caplog.records] == [
        f"ignored unknown fields of {address}: {field}"
        for address in ("1.1.1.1", "2.2.2.2")
        for field in ("provider", "foo")
    ]
    assert counts.ignored == {"provider": 4, "other": 4}


def test_the_memory_of_what_was_logged_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "folio.app.api.unknown_fields")
    unknown, counts = UnknownFields("ignore", _Counts()), _Counts()
    for i in range(5000):
        unknown.note([f"field{i}"], "one")
    assert len(caplog.records) == 32
    for i in range(5000):
        unknown.note(["field"], f"client{i}")
    assert len(unknown._logged) == 1024
    unknown = UnknownFields("ignore", counts)
    for i in range(100):
        unknown.note([f"messages[].field{i}", "messages[].cache_control"], "one")
    assert counts.ignored == {"other": 100, "cache_control": 100}


@pytest.mark.parametrize(
    "fields",
    [
        {str(i): 0 for i in range(100_000)},
        {"messages": [USER | {str(i): 0 for i in range(100_000)}]},
        {"stream_options": {str(i): 0 for i in range(100_000)}},
        {"messages": [USER | {f"field{i}_{j}": 0 for j in range(30)} for i in range(3000)]},
        {f"ptemarions{i}": 0 for i in range(200)},
    ],
)
def test_many_unknown_fields_are_refused_fast(server: LocalServer, fields: dict[str, Any]) -> None:
    client = TestClient(guarded_api(server.ingress, HttpSettings(max_body_bytes=1 << 24)))
    body = json.dumps({"model": "builtin", "messages": [USER]} | fields)
    begun = time.perf_counter()
    answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert len(answer.text) < 1000
    assert time.perf_counter() - begun < 20  # a tenth of a second, on a quiet machine


def test_one_unknown_field_in_many_messages_is_one_field(client: TestClient) -> None:
    _, fields = resolved(ChatCompletionRequest, {"model": "m", "messages": [USER | {"a": 1, "b": 2}] * 4000})
    assert fields == ["messages[].a", "messages[].b"]


def test_the_number_of_unknown_fields_has_a_bound() -> None:
    known = {"model": "m", "messages": [USER]}
    value, fields = resolved(ChatCompletionRequest, known | {f"field{i}": 0 for i in range(MAX_UNKNOWN)})
    assert (len(fields), value.model_extra) == (MAX_UNKNOWN, {})
    with pytest.raises(RequestValidationError) as caught:
        resolved(ChatCompletionRequest, known | {f"field{i}": 0 for i in range(MAX_UNKNOWN + 1)})
    assert f"more than {MAX_UNKNOWN} different unknown fields" in caught.value.errors()[0]["msg"]


def test_names_of_attributes_are_no_attributes(client: TestClient) -> None:
    names = ["__class__", "model_extra", "model_fields", "__pydantic_extra__", "sampling_params", "dropped"]
    answer = chat(client, **{name: {"a": 1} for name in names})
    assert (answer.status_code, answer.headers[HEADER]) == (200, ", ".join(names))


def test_typed_bodies_stay_strict() -> None:
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        CompletionRequest.model_validate({"model": "m", "prompt": "x", "provider": 1})


def test_fields_of_known_clients_say_nothing() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}
    message = {"role": "assistant", "tool_calls": [call], "parsed": None, "provider_specific_fields": {}}
    body = {"model": "m", "messages": [USER, message]}
    value = ChatCompletionRequest.model_validate(body)  # in strict mode, too
    assert value.messages[1].tool_calls[0].function.name == "f"


def test_browsers_may_read_the_header(server: LocalServer) -> None:
    api: FastAPI = guarded_api(server.ingress, HttpSettings(cors_origins=("https://a.example",)))
    answer = TestClient(api).post(
        "/tokenize", json={"prompt": "x", "provider": 1}, headers={"origin": "https://a.example"}
    )
    assert HEADER in answer.headers["access-control-expose-headers"]


def test_without_a_guard_fields_are_dropped_all_the_same(server: LocalServer) -> None:
    counts = _Counts()
    client = TestClient(build_api(server.ingress, "ignore", counts))
    assert chat(client, provider=1).status_code == 200
    assert counts.ignored == {"provider": 1}
