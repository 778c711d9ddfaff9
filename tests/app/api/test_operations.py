"""Every operation in each of its ways: whole and streamed, at all of its paths, by batches and by the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
from starlette.testclient import TestClient

from folio.app.api.batches.endpoints import ENDPOINTS
from folio.app.api.reference.description import EXAMPLES
from folio.app.api.routes import ROUTES
from folio.app.api.unknown_fields import UnknownFields
from folio.app.client import Folio
from folio.app.http.operations import OPERATIONS, Operation, repeatable_ends
from folio.app.serving.operations import Operations
from tests.local_server import LocalServer, listening

NOT_IN_CLIENT = ("tokenize", "detokenize")
GENERATED = {"model": "builtin", "prompt": "Folio is", "max_tokens": 4}


@pytest.fixture(scope="module")
def client(local_server: LocalServer) -> TestClient:
    return TestClient(local_server.api)


@pytest.fixture(scope="module")
def url(local_server: LocalServer) -> Iterator[str]:
    with listening(local_server.api) as url:
        yield url


def bodies_of(operation: Operation, client: TestClient) -> list[dict[str, Any]]:
    """Those of the OpenAPI page."""
    if operation.name == "detokenize":
        return [{"tokens": [76, 77]}]
    if operation.name == "fork":
        return [{"model": "builtin", "request_id": client.post("/v1/completions", json=GENERATED).json()["id"]}]
    return [example["value"] for example in EXAMPLES[operation.name].values()]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
async def test_an_operation(server: LocalServer, client: TestClient, url: str, operation: Operation) -> None:
    route = ROUTES[operation.name]
    folio = Folio(url)
    for body in bodies_of(operation, client):
        for path in operation.paths:
            answer = client.post(path, json=body | ({"stream": False} if route.streams else {}))
            assert answer.status_code == 200, answer.text
            route.answer.model_validate_json(answer.content)
        if route.streams:
            answer = client.post(operation.path, json=body | {"stream": True})
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            *_, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert "error" not in last
            assert (last.get("type") in ("response.completed", "response.incomplete", "message_stop")) == (
                "data: [DONE]" not in answer.text
            )
        if operation.is_batchable:
            read, dropped = ENDPOINTS[operation.path].read(body, UnknownFields("error"))
            assert not dropped
            assert isinstance(await ENDPOINTS[operation.path].call(server.ingress, read), route.answer)
        if operation.name not in NOT_IN_CLIENT:
            assert isinstance(await getattr(folio, operation.name)(route.body.model_validate(body)), route.answer)
        if route.streams:
            streamed = getattr(folio, f"{operation.name}_stream")(route.body.model_validate(body))
            assert [item async for item in streamed]
        for stream in {False, route.streams}:
            unknown = client.post(operation.path, json=body | {"model": "other"} | ({"stream": True} if stream else {}))
            assert (unknown.status_code, "error" in unknown.json()) == (404, True)
    await folio.close()
    assert client.get(operation.path).headers["allow"] == "POST"


def test_all_of_the_table_agree() -> None:
    """Names, methods, and the types that the client declares."""
    names = [operation.name for operation in OPERATIONS]
    assert list(ROUTES) == names
    paths = [path for operation in OPERATIONS for path in operation.paths]
    assert len(set(paths)) == len(paths)
    for name, route in ROUTES.items():
        assert hasattr(Operations, f"{name}_stream") == route.streams
        assert getattr(Operations, name).__name__ == name
        if name in NOT_IN_CLIENT:
            continue
        hints = get_type_hints(getattr(Folio, name))
        assert (hints["request"], hints["return"], "session" in hints) == (
            route.body,
            route.answer,
            route.takes_session,
        )
        assert hasattr(Folio, f"{name}_stream") == route.streams


def test_what_haproxy_sends_again() -> None:
    assert repeatable_ends() == [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/score",  # also of /v1
        "/rerank",
        "/tokenize",
        "/detokenize",
    ]
