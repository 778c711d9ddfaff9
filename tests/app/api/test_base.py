"""JSON bodies: content types, malformed or unusable JSON, bounds on values, threads for large bodies."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from folio.app.api import base as json_body
from folio.app.api.base import MAX_JSON_DEPTH, check_json, parse_json, too_much
from folio.app.api.openai.chat_body import ChatCompletionRequest
from tests.app.api.fake_service import FakeService, complete, failure, post_json
from tests.local_server import guarded_api

BODY: dict[str, Any] = {"model": "builtin", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"a": ["\ud800"]}, "surrogates not allowed"),
        ({"\udfff": 1}, "surrogates not allowed"),
        ({"a": [float("inf")]}, "not JSON compliant"),
        ({"a": {"b": float("nan")}}, "not JSON compliant"),
    ],
)
def test_values_beyond_json_are_errors(value: dict[str, Any], complaint: str) -> None:
    """Tools with an unpaired surrogate were answered with 500."""
    tool = {"type": "function", "function": {"name": "f", "parameters": value}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}
    for more in ({"tools": [tool]}, {"guided_json": value}, {"response_format": form}):
        with pytest.raises(ValueError, match=complaint):
            ChatCompletionRequest.model_validate(BODY | more)


def test_nesting_has_a_bound() -> None:
    """Deeper nesting met Python's recursion limit in templates and encoders, and was answered with 500."""
    deepest: dict[str, Any] = {}
    for _ in range(MAX_JSON_DEPTH - 1):
        deepest = {"a": deepest}
    assert check_json(deepest) is deepest
    for deeper in ({"a": deepest}, {"a": [deepest]}):
        with pytest.raises(ValueError, match=f"deeper than {MAX_JSON_DEPTH}"):
            check_json(deeper)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(guarded_api(FakeService()), raise_server_exceptions=False)


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": ',
        b'{"model": "m", "prompt": NaN}',
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": ' + b"[" * 10_000,
        b'{"model": "m", "seed": ' + b"1" * 5000 + b"}",
        b"model=m&prompt=x",
    ],
)
def test_bodies_that_are_not_json(client: TestClient, content: bytes) -> None:
    answer = post_json(client, "/v1/completions", content)
    assert failure(answer) == (400, "invalid_json")
    assert "not valid JSON" in answer.json()["error"]["message"]


def test_half_a_character_becomes_the_replacement_character() -> None:
    """JavaScript clients cut texts between two surrogates, and the rest of a conversation was answered with 400."""
    for field in ("prompt", "stop", "\\ud83d"):
        body = parse_json(b'{"%b": "\\ude00 \\ud83d\\ude00 \\\\ud83d \\ud83d"}' % field.encode())
        assert body == {field.replace("\\ud83d", "\ufffd"): "\ufffd \U0001f600 \\ud83d \ufffd"}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        *((kind, 415) for kind in (None, "text/plain", "application/x-www-form-urlencoded", "application", "json")),
        ("application/vnd.x+json; charset=utf-8", 200),
    ],
)
def test_content_types(client: TestClient, kind: str | None, status: int) -> None:
    """A web page of another origin could send other types without a preflight request."""
    headers = {} if kind is None else {"content-type": kind}
    answer = client.post("/v1/completions", content=b'{"model": "m", "prompt": "x"}', headers=headers)
    assert answer.status_code == status
    assert status == 200 or failure(answer) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("value", "number", "message"),
    [
        (b'{"role":"user","content":""}', 40_000, "32768 objects"),
        (b'"\\"["', 140_000, "131072 strings"),
        (b"1", 600_000, "524288 values"),
    ],
)
def test_bodies_with_too_many_values_are_not_parsed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, value: bytes, number: int, message: str
) -> None:
    """260,000 messages, 7.5 MB, held the event loop for two seconds."""

    def parse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(json_body, "from_json", parse)
    body = b'{"model":"m","messages":[' + b",".join([value] * number) + b"]}"
    answer = post_json(client, "/v1/chat/completions", body)
    assert answer.status_code == 400
    assert f"more than {message}" in answer.json()["error"]["message"]


def test_brackets_and_commas_in_strings_do_not_count() -> None:
    for text in (b'{},[",' * 100_000, b"\\\\", b'\\"', b'\\"' * 300_000):
        escaped = text if text.startswith(b"\\") else text.replace(b'"', b'\\"')
        assert too_much(b'{"model":"m","prompt":"' + escaped + b'"}') is None
    assert too_much(b'"' + b"[" * 600_000) is None  # the missing end is left to the parser


@pytest.mark.parametrize(("size", "thread"), [(100, None), (100_000, "bodies_"), (1_000_000, "bodies-large_")])
def test_large_bodies_are_read_in_threads(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, size: int, thread: str | None
) -> None:
    """The event loop waited for parsing and validation, and bodies of many clients occupied all threads."""
    names: list[str] = []
    monkeypatch.setattr(
        json_body, "from_json", lambda body, **_: (names.append(threading.current_thread().name), json.loads(body))[1]
    )
    assert complete(client, prompt="x" * size).status_code == 200
    assert names[0].startswith(thread) if thread else "bodies" not in names[0]
