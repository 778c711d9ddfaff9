"""Routes, bodies and errors over a service that needs neither Ray nor an engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from starlette.testclient import TestClient

from app.errors import (
    DeadlineError,
    EngineError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
    UnknownRequestError,
)
from app.openai.bodies import ChatCompletionRequest, CompletionRequest
from app.openai.http import build_api
from app.openai.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    ModelCard,
    ModelList,
    PromptTokensDetails,
    Usage,
)

USAGE = Usage(
    prompt_tokens=1,
    completion_tokens=1,
    total_tokens=2,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
)
CARD = ModelCard(id="m", created=0, max_model_len=8)


class FakeService:
    """Echoes the prompt; the model's name chooses how it fails."""

    async def models(self) -> ModelList:
        return ModelList(data=[CARD])

    async def model(self, name: str) -> ModelCard:
        if name != "m":
            raise UnknownModelError(f"no {name}", "model")
        return CARD

    async def ready(self) -> None:
        pass

    async def metrics(self) -> str:
        return "# HELP x X.\n"

    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion:
        request.sampling_params()
        self._fail(request.model)
        return self._completion(str(request.prompt) + (f" of {session}" if session else ""))

    async def generate_stream(
        self, request: CompletionRequest, session: str | None = None
    ) -> AsyncIterator[Completion]:
        if request.model == "late":
            yield self._completion("begun")
            raise EngineError("a step failed")
        self._fail(request.model)
        yield self._completion("a")
        yield self._completion("b")

    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> ChatCompletion:
        choice = ChatChoice(message=AssistantMessage(content=request.messages[0].text))
        return ChatCompletion(id="c", created=0, model="m", choices=[choice], usage=USAGE)

    async def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncIterator[ChatCompletionChunk]:
        choice = ChatChunkChoice(delta=ChatDelta(role="assistant", content="hi"))
        yield ChatCompletionChunk(id="c", created=0, model="m", choices=[choice])

    def _completion(self, text: str) -> Completion:
        return Completion(id="c", created=0, model="m", choices=[CompletionChoice(text=text)], usage=USAGE)

    def _fail(self, model: str) -> None:
        if model == "engine":
            raise EngineError("a step failed")
        if model == "bug":
            raise ZeroDivisionError("secret detail")
        errors = {
            "request": RequestError("too long", "prompt"),
            "unknown": UnknownRequestError("no such request", "request_id"),
            "full": OverloadedError("too many"),
            "full for a while": OverloadedError("too many", 2.2),
            "full for a moment": OverloadedError("too many", 0.0),
            "slow": DeadlineError("too late"),
        }
        if model in errors:
            raise errors[model]


@pytest.fixture
def client() -> TestClient:
    return TestClient(build_api(FakeService()), raise_server_exceptions=False)


def test_good_requests(client: TestClient) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "m"
    assert client.get("/v1/models/m").json()["max_model_len"] == 8
    answer = client.post("/v1/completions", json={"model": "m", "prompt": [1, 2], "n": 1, "logit_bias": {}})
    assert answer.json()["choices"][0]["text"] == "[1, 2]"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = client.post("/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "ab"}


def test_the_session_header_is_passed_on(client: TestClient) -> None:
    body = {"model": "m", "prompt": "hi"}
    answer = client.post("/v1/completions", json=body, headers={"X-Session-Id": "s1"})
    assert answer.json()["choices"][0]["text"] == "hi of s1"
    refused = client.post("/v1/completions", json=body, headers={"X-Session-Id": "s" * 257})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_metrics_are_text_or_an_error(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus takes an empty page for the truth, but not a 503."""
    page = client.get("/metrics")
    assert page.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    assert page.text == "# HELP x X.\n"

    async def gone(self: FakeService) -> str:
        raise UnavailableError("an agent does not answer")

    monkeypatch.setattr(FakeService, "metrics", gone)
    refused = client.get("/metrics")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")


def test_the_api_describes_itself(client: TestClient) -> None:
    fields = client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"guided_regex", "logit_bias", "tenant"} < fields.keys()


def test_stream(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"model": "m", "prompt": "", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert [json.loads(e)["choices"][0]["text"] for e in events[:-1]] == ["a", "b"]
    assert events[-1] == "[DONE]"


def test_chat_chunks_leave_out_what_is_absent(client: TestClient) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    first = client.post("/v1/chat/completions", json=body).text.split("\n\n")[0]
    choice = json.loads(first.removeprefix("data: "))["choices"][0]
    assert choice["delta"] == {"role": "assistant", "content": "hi"}
    assert choice["finish_reason"] is None
    assert ChatDelta(content="x").model_dump() == {"content": "x"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"model": "m"}, "prompt", "prompt: Field required"),
        ({"model": "m", "prompt": "x", "max_tokens": "10"}, "max_tokens", "valid integer"),
        ({"model": "m", "prompt": "x", "max_tokens": True}, "max_tokens", "valid integer"),
        ({"model": "m", "prompt": "x", "temperature": "hot"}, "temperature", "valid number"),
        ({"model": "m", "prompt": "x", "surprise": 1}, "surprise", "unknown field"),
        ({"model": "m", "prompt": "x", "n": 0}, "n", "between 1"),
        ({"model": "m", "prompt": "x", "suffix": "y"}, "suffix", "leave it out"),
        ({"model": "m", "prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"model": "m", "prompt": [0] + ["x"] * 9}, "prompt", "and 4 more"),
        ({"model": "m", "prompt": "x", "max_tokens": -1}, "max_tokens", "at least 1"),
        ({"model": "m", "prompt": "x", "top_p": 2}, "top_p", "between 0 and 1"),
        ({"model": "request", "prompt": "x"}, "prompt", "too long"),
        ([1, 2], None, "valid dictionary"),
    ],
)
def test_bad_bodies_are_400_and_name_the_field(client: TestClient, body: object, param: str, message: str) -> None:
    answer = client.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


def test_bad_json(client: TestClient) -> None:
    answer = client.post("/v1/completions", content='{"model": ', headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]


def test_errors_have_the_right_status(client: TestClient) -> None:
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/v1/nothing").json()["error"]["message"] == "Not Found: GET /v1/nothing"
    assert client.get("/v1/completions").status_code == 405
    failed = client.post("/v1/completions", json={"model": "engine", "prompt": "x"})
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    unknown = client.post("/v1/completions", json={"model": "unknown", "prompt": "x"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
    bug = client.post("/v1/completions", json={"model": "bug", "prompt": "x"})
    assert bug.status_code == 500
    assert "secret" not in bug.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "status", "retry_after"),
    [("full", 429, None), ("full for a while", 429, "3"), ("full for a moment", 429, "1"), ("slow", 408, None)],
)
def test_when_to_try_again(client: TestClient, model: str, status: int, retry_after: str | None, stream: bool) -> None:
    answer = client.post("/v1/completions", json={"model": model, "prompt": "x", "stream": stream})
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == retry_after
    assert answer.json()["error"]["message"].startswith("too ")


def test_a_stream_refused_at_once_has_a_status(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"model": "request", "prompt": "x", "stream": True})
    assert answer.status_code == 400


def test_a_stream_that_fails_later_ends_with_an_error_event(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"model": "late", "prompt": "x", "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200
    assert events[-1]["error"]["message"] == "a step failed"
