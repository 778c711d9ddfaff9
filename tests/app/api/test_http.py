"""Routes, bodies and errors, over a service without Ray and engine."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest
from openai.types import chat, completion_create_params, responses
from starlette.testclient import TestClient

from folio.app.api.openai.bodies import CompletionRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.operators.bodies import BudgetRequest, DrainRequest, PinRequest
from folio.app.api.reference.description import EXAMPLES
from folio.app.api.responses.body import ResponsesRequest
from folio.app.api.routes import ROUTES
from folio.app.config.http import HttpSettings
from tests.app.api.asking import events_of
from tests.app.api.fake_service import FakeService, complete, failure, post_json
from tests.local_server import guarded_api


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(guarded_api(FakeService()), raise_server_exceptions=False)


def test_good_requests(client: TestClient) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "m"
    assert client.get("/v1/models/m").json()["max_model_len"] == 8
    assert complete(client, prompt=[1, 2], n=1, logit_bias={}).json()["choices"][0]["text"] == "[1, 2]"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = client.post("/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "ab"}


def test_the_session_header_is_passed_on(client: TestClient) -> None:
    body = {"model": "m", "prompt": "hi"}
    answer = client.post("/v1/completions", json=body, headers={"X-Session-Id": "s1"})
    assert answer.json()["choices"][0]["text"] == "hi of s1"
    refused = client.post("/v1/completions", json=body, headers={"X-Session-Id": "s" * 257})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_forks(client: TestClient) -> None:
    body = {"model": "m", "request_id": "cmpl-1.r", "index": 2}
    assert client.post("/v1/forks", json=body).json()["choices"][0]["text"] == "cmpl-1.r 2"
    for stream in (False, True):
        unknown = client.post("/v1/forks", json=body | {"model": "unknown", "stream": stream})
        assert failure(unknown) == (404, "request_not_found")
    for change in ({"index": -1}, {"request_id": 1}, {"timeout_s": 0}, {"indexx": 1}):
        assert failure(client.post("/v1/forks", json=body | change)) == (400, "invalid_value")


def test_the_openapi_page_is_complete(client: TestClient) -> None:
    page = client.get("/openapi.json").json()
    schemas = page["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    assert {"guided_regex", "logit_bias", "tenant"} < fields.keys()
    assert all("description" in field for field in fields.values())
    assert {"delta", "finish_reason"} < schemas["ChatChunkChoice"]["properties"].keys()
    assert set(re.findall("#/components/schemas/([A-Za-z-]+)", json.dumps(page))) <= schemas.keys()
    for path, operations in page["paths"].items():
        for operation in operations.values():
            assert operation["description"], path
            assert {"400", "500", "503"} < operation["responses"].keys()
            assert "422" not in operation["responses"]


async def test_the_openapi_page_is_built_once_and_outside_of_the_event_loop() -> None:
    """Regression: the first request for it delayed all others by 0.67 s."""
    api = guarded_api(FakeService())
    threads: list[threading.Thread] = []
    build = api.openapi

    def openapi() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return build()

    api.openapi = openapi  # type: ignore[method-assign]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://localhost") as asking:
        pages = await asyncio.gather(*(asking.get("/openapi.json") for _ in range(3)))
    assert len({page.text for page in pages}) == len(threads) == 1
    assert threads[0] is not threading.current_thread()
    mounted = httpx.ASGITransport(api, root_path="/folio")
    async with httpx.AsyncClient(transport=mounted, base_url="http://localhost") as asking:
        assert (await asking.get("/folio/openapi.json")).json()["servers"] == [{"url": "/folio"}]


@pytest.mark.parametrize("mode", ["ignore", "error"])
def test_the_openapi_page_says_whether_unknown_fields_are_allowed(mode: Any) -> None:
    page = TestClient(guarded_api(FakeService(), HttpSettings(unknown_fields=mode))).get("/openapi.json").json()
    for name in ("CompletionRequest", "Message", "StreamOptions"):
        assert (page["components"]["schemas"][name].get("additionalProperties") is False) == (mode == "error")
    kwargs = page["components"]["schemas"]["ChatCompletionRequest"]["properties"]["chat_template_kwargs"]
    assert kwargs["anyOf"][0] == {"type": "object", "additionalProperties": True}


def test_the_examples_are_valid_bodies() -> None:
    """Operations whose body has no example take few fields; the budget and pins are not in the table."""
    bodies = {"budget": BudgetRequest, "drain": DrainRequest, "pin": PinRequest} | {
        name: route.body for name, route in ROUTES.items()
    }
    assert bodies.keys() - EXAMPLES.keys() == {"fork", "detokenize"}
    for name, examples in EXAMPLES.items():
        for example in examples.values():
            bodies[name].model_validate(example["value"])


def test_every_field_beyond_openais_is_documented() -> None:
    """docs/reference/http-api.md names the fields that OpenAI's own client does not know."""
    text = (Path(__file__).parents[3] / "docs" / "reference" / "http-api.md").read_text()
    known = [
        (ChatCompletionRequest, chat.completion_create_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
        (ResponsesRequest, responses.response_create_params.ResponseCreateParamsStreaming),
    ]
    for body, params in known:
        beyond = body.model_fields.keys() - get_type_hints(params).keys()
        assert len(beyond) > 20
        assert [field for field in sorted(beyond) if f"`{field}`" not in text] == []


def test_stream(client: TestClient) -> None:
    answer = complete(client, prompt="", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [event["choices"][0]["text"] for event in events_of(answer)] == ["a", "b"]
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/completions", {"model": "m"}, "invalid_value"),
        ("/v1/completions", None, "unsupported_media_type"),
        ("/v1/nothing", {}, "not_found"),
        ("/health", {}, "method_not_allowed"),
    ],
)
def test_the_log_has_the_code_of_an_error(
    client: TestClient, caplog: pytest.LogCaptureFixture, path: str, body: object, code: str
) -> None:
    caplog.set_level(logging.INFO, "folio.app.edge.request_log")
    client.post(path, json=body)
    [line] = [record.getMessage() for record in caplog.records if record.name == "folio.app.edge.request_log"]
    assert f" error={code}" in line


@pytest.mark.parametrize("value", ["1e999", "1" * 400])
def test_errors_quote_long_numbers_and_names_in_part(client: TestClient, value: str) -> None:
    body = f'{{"model": "m", "prompt": "x", "timeout_s": {value}, "{"k" * 10_000}": 1}}'
    answer = post_json(client, "/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout_s")
    assert len(answer.text) < 1000


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/models/other", None, 404, "model_not_found"),
        ("GET", "/v1/nothing", None, 404, "not_found"),
        ("GET", "/v1/completions", None, 405, "method_not_allowed"),
        ("POST", "/v1/completions/", {}, 404, "not_found"),
        ("POST", "/v1/completions", {"model": "unknown", "prompt": "x"}, 404, "request_not_found"),
        ("POST", "/v1/completions", {"model": "bug", "prompt": "x"}, 500, "internal_error"),
        ("POST", "/v1/completions", {"model": "request", "prompt": "x", "stream": True}, 400, "invalid_value"),
    ],
)
def test_status_and_code_of_errors(
    client: TestClient, method: str, path: str, body: Any, status: int, code: str
) -> None:
    """Also of streams that are refused before their first event."""
    answer = client.request(method, path, json=body)
    assert failure(answer) == (status, code)
    assert answer.json()["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert "secret" not in answer.text


def test_errors_name_path_and_methods(client: TestClient) -> None:
    assert client.get("/v1/nothing").json()["error"]["message"] == "Not Found: GET /v1/nothing"
    assert client.get("/v1/completions").headers["allow"] == "POST"
    assert client.put("/v1/pins").headers["allow"] == "GET, POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "status", "retry_after"),
    [("full", 429, None), ("full for a while", 429, "3"), ("full for a moment", 429, "1"), ("slow", 408, None)],
)
def test_retry_after(client: TestClient, model: str, status: int, retry_after: str | None, stream: bool) -> None:
    answer = complete(client, model=model, stream=stream)
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry_after)
    assert answer.json()["error"]["message"].startswith("too ")


def test_a_streamed_response_that_breaks_ends_with_an_error_event(client: TestClient) -> None:
    answer = client.post("/v1/responses", json={"model": "m", "input": "x", "stream": True})
    *_, last = answer.text.strip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert (event["sequence_number"], event["code"], "secret" in event["message"]) == (5, "internal_error", False)
