"""Routes, bodies and errors over a service that needs neither Ray nor an engine."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_type_hints

import pytest
from openai.types import chat, completion_create_params, responses
from starlette.testclient import TestClient

from app.errors import (
    DeadlineError,
    EngineError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
    UnknownPinError,
    UnknownRequestError,
)
from app.openai import description as examples
from app.openai import json_body as json_route
from app.openai.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizedText,
    DetokenizeRequest,
    PinRequest,
    TokenizeRequest,
    Tokens,
)
from app.openai.json_body import too_much
from app.openai.operator_replies import LoadFigures, LoadReport, PinCard, PinList
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
from app.openai.responses.body import ResponsesRequest
from app.openai.responses.replies import ArgumentsDeltaEvent, ResponseObject, StreamEvent
from tests.local_server import guarded_api
from vmem import MemoryReport

USAGE = Usage(
    prompt_tokens=1,
    completion_tokens=1,
    total_tokens=2,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
)
CARD = ModelCard(id="m", created=0, max_model_len=8)


class FakeService:
    """Echoes the prompt; the model's name chooses how it fails."""

    def __init__(self) -> None:
        self.pinned: list[str] = []

    async def models(self) -> ModelList:
        return ModelList(data=[CARD])

    async def model(self, name: str) -> ModelCard:
        if name != "m":
            raise UnknownModelError(f"no {name}", "model")
        return CARD

    async def ready(self) -> None:
        raise UnavailableError("nobody answers")

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

    async def responses(self, request: ResponsesRequest, session: str | None = None) -> ResponseObject:
        raise NotImplementedError  # see tests/app/openai/responses/test_responses.py

    async def responses_stream(
        self, request: ResponsesRequest, session: str | None = None
    ) -> AsyncIterator[StreamEvent]:
        yield ArgumentsDeltaEvent(item_id="i", output_index=0, delta="{", sequence_number=4)
        raise ZeroDivisionError("secret detail")

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        return Tokens(count=1, max_model_len=8, tokens=[5])

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizedText:
        return DetokenizedText(prompt="x" * len(request.tokens))

    async def load(self) -> LoadReport:
        figures = dict.fromkeys(LoadFigures.model_fields, 0)
        return LoadReport(num_replicas=1, num_silent=1, total=LoadFigures(**figures), least_queued_s=None, replicas=[])

    async def reports(self) -> dict[str, MemoryReport]:
        return {}

    async def pins(self) -> PinList:
        return PinList(data=[PinCard(id=name, num_tokens=16, num_bytes=1, num_replicas=1) for name in self.pinned])

    async def pin(self, request: PinRequest) -> None:
        self.pinned.append(request.name)

    async def unpin(self, name: str) -> None:
        if name not in self.pinned:
            raise UnknownPinError(f"no prefix {name}", "name")
        self.pinned.remove(name)

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


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(guarded_api(FakeService()), raise_server_exceptions=False)


def test_good_requests(client: TestClient) -> None:
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


def test_whether_it_lives_and_whether_it_is_ready(client: TestClient) -> None:
    assert client.get("/health").status_code == 200
    answer = client.get("/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    for path, status in (("/health", 200), ("/ready", 503)):  # probes that want no body got 405
        answer = client.head(path)
        assert (answer.status_code, answer.headers.get("allow")) == (status, None)


def test_operation(client: TestClient) -> None:
    assert client.get("/v1/load").json()["num_silent"] == 1
    assert client.post("/tokenize", json={"prompt": "x"}).json() == {"count": 1, "max_model_len": 8, "tokens": [5]}
    assert client.post("/detokenize", json={"tokens": [1, 2]}).json() == {"prompt": "xx"}
    card = client.post("/v1/pins", json={"name": "a/b", "prompt": "x"}).json()
    assert client.get("/v1/pins").json()["data"] == [card]
    assert client.delete("/v1/pins/a/b").json() == {"id": "a/b", "object": "pin", "deleted": True}
    gone = client.delete("/v1/pins/a/b")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "pin_not_found")
    for name in ("\n", "a/..", "."):  # no path has it: nobody could unpin it
        unspeakable = client.post("/v1/pins", json={"name": name, "prompt": "x"})
        assert (unspeakable.status_code, unspeakable.json()["error"]["param"]) == (400, "name")
        unspeakable = client.post("/v1/completions", json={"model": "m", "prompt": "x", "pin": name})
        assert (unspeakable.status_code, unspeakable.json()["error"]["param"]) == (400, "pin")
    assert client.delete("/v1/pins/a/b%0A").status_code == 404


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
    page = client.get("/openapi.json").json()
    schemas = page["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    assert {"guided_regex", "logit_bias", "tenant"} < fields.keys()
    assert all("description" in field for field in fields.values())
    assert {"delta", "finish_reason"} < schemas["ChatChunkChoice"]["properties"].keys()
    referred = set(re.findall("#/components/schemas/([A-Za-z-]+)", json.dumps(page)))
    assert referred <= schemas.keys()
    for path, operations in page["paths"].items():
        for operation in operations.values():
            assert operation["description"], path
            assert {"400", "500", "503"} < operation["responses"].keys()
            assert "422" not in operation["responses"]


def test_the_examples_are_bodies() -> None:
    for body, named in [
        (ChatCompletionRequest, examples.CHAT),
        (CompletionRequest, examples.COMPLETION),
        (ResponsesRequest, examples.RESPONSE),
        (TokenizeRequest, examples.TOKENIZE),
        (PinRequest, examples.PIN),
    ]:
        for example in named.values():
            body.model_validate(example["value"])


def test_every_field_beyond_openais_is_documented() -> None:
    """What clients may send is said in one place: here is what OpenAI's own client does not know."""
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
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
        ({"model": "m"}, "prompt", "prompt: is missing"),
        ({"model": "m", "prompt": "x", "max_tokens": "10"}, "max_tokens", "must be an integer"),
        ({"model": "m", "prompt": "x", "max_tokens": True}, "max_tokens", "must be an integer"),
        ({"model": "m", "prompt": "x", "temperature": "hot"}, "temperature", "must be a number"),
        ({"model": "m", "prompt": "x", "surprise": 1}, "surprise", "unknown field"),
        ({"model": "m", "prompt": "x", "n": 0}, "n", "between 1"),
        ({"model": "m", "prompt": "x", "suffix": "y"}, "suffix", "leave it out"),
        ({"model": "m", "prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"model": "m", "prompt": "x"} | {f"x{i}": 1 for i in range(9)}, "x0", "and 4 more"),
        ({"model": "m", "prompt": [0] + ["x"] * 9}, "prompt", "prompt[1]: must be an integer"),
        ({"model": "m", "prompt": "x", "max_tokens": -1}, "max_tokens", "at least 1"),
        ({"model": "m", "prompt": "x", "top_p": 2}, "top_p", "between 0 and 1"),
        ({"model": "request", "prompt": "x"}, "prompt", "too long"),
        ([1, 2], None, "must be an object"),
        ({"model": "m", "prompt": "x", "store": True}, "store", "not stored"),
        ({"model": "m", "prompt": "x", "store": 0}, "store", "not stored"),
        ({"model": "m", "prompt": "x", "service_tier": "flex"}, "service_tier", "one tier"),
        ({"model": "m", "prompt": "x", "stream_options": {"include_obfuscation": True}}, "stream_options", "padded"),
        ({"model": "m", "prompt": "x", "metadata": {"a": 1}}, "metadata", "metadata.a: must be a string"),
    ],
)
def test_bad_bodies_are_400_and_name_the_field(client: TestClient, body: object, param: str, message: str) -> None:
    answer = client.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": ',
        b'{"model": "m", "prompt": NaN}',
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": ' + b"[" * 10_000,
        b'{"model": "m", "seed": ' + b"1" * 5000 + b"}",
        b"model=m&prompt=x",
    ],
)
def test_what_is_no_json(client: TestClient, content: bytes) -> None:
    answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert "not valid JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application", "json"])
def test_what_is_not_said_to_be_json(client: TestClient, kind: str | None) -> None:
    """A web page of another origin could send it without being asked."""
    headers = {} if kind is None else {"content-type": kind}
    answer = client.post("/v1/completions", content=b'{"model": "m", "prompt": "x"}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    headers = {"content-type": "application/vnd.x+json; charset=utf-8"}
    assert client.post("/v1/completions", content=b'{"model": "m", "prompt": "x"}', headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/completions", {"model": "m"}, "invalid_value"),
        ("/v1/completions", None, "unsupported_media_type"),
        ("/v1/nothing", {}, "not_found"),
        ("/health", {}, "method_not_allowed"),
    ],
)
def test_the_log_says_what_was_refused(
    client: TestClient, caplog: pytest.LogCaptureFixture, path: str, body: object, code: str
) -> None:
    caplog.set_level(logging.INFO, "app.edge.request_log")
    client.post(path, json=body)
    [line] = [record.getMessage() for record in caplog.records if record.name == "app.edge.request_log"]
    assert f" error={code}" in line


def test_numbers_and_names_without_bounds(client: TestClient) -> None:
    for value in ("1e999", "1" * 400):
        body = f'{{"model": "m", "prompt": "x", "timeout_s": {value}, "{"k" * 10_000}": 1}}'
        answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout_s")
        assert len(answer.text) < 1000


def test_errors_have_the_right_status(client: TestClient) -> None:
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/v1/nothing").json()["error"]["message"] == "Not Found: GET /v1/nothing"
    wrong = client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert client.put("/v1/pins").headers["allow"] == "GET, POST"
    assert client.post("/v1/completions/", json={}).json()["error"]["code"] == "not_found"
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


def test_a_streamed_response_that_breaks_ends_with_an_error_event(client: TestClient) -> None:
    answer = client.post("/v1/responses", json={"model": "m", "input": "x", "stream": True})
    *_, last = answer.text.strip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert (event["sequence_number"], event["code"], "secret" in event["message"]) == (5, "internal_error", False)


def test_errors_are_said_in_words_of_the_body(client: TestClient) -> None:
    """pydantic's were `messages.0.content.parts.1.type` and `tool_choice.literal['none','auto','required']`."""
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for fields, said in (
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "txt", "text": "x"}]}]},
            "messages[0].content[1].type: must be 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": [image]}]},
            "messages[0].content[0]: this model takes text only; leave the part of the type 'image_url' out",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": "x"},
            "tool_choice: must be 'none', 'auto' or 'required' or an object",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0]: content is missing"),
        ({}, "messages: is missing"),
    ):
        answer = client.post("/v1/chat/completions", json={"model": "m"} | fields)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


def test_a_body_with_too_much_in_it_is_not_parsed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """260,000 messages, 7.5 MB, held the event loop for two seconds."""

    def parse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(json_route, "from_json", parse)
    message = b'{"role":"user","content":""}'
    for values, said in (
        (b",".join([message] * 40_000), "32768 objects"),
        (b",".join([b'"\\"["'] * 140_000), "131072 strings"),
        (b",".join([b"1"] * 600_000), "524288 values"),
    ):
        body = b'{"model":"m","messages":[' + values + b"]}"
        answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert f"more than {said}" in answer.json()["error"]["message"]


def test_what_is_written_in_a_string_does_not_count() -> None:
    for text in (b'{},[",' * 100_000, b"\\\\", b'\\"', b'\\"' * 300_000):
        escaped = text if text.startswith(b"\\") else text.replace(b'"', b'\\"')
        assert too_much(b'{"model":"m","prompt":"' + escaped + b'"}') is None
    assert too_much(b'"' + b"[" * 600_000) is None  # its end is missing, which the parser says


@pytest.mark.parametrize(("size", "thread"), [(100, None), (100_000, "bodies_"), (1_000_000, "bodies-large_")])
def test_large_bodies_are_read_in_threads(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, size: int, thread: str | None
) -> None:
    """The loop waited while they were parsed and validated; and those of many clients at once took all threads."""
    names: list[str] = []
    monkeypatch.setattr(
        json_route, "from_json", lambda body, **_: (names.append(threading.current_thread().name), json.loads(body))[1]
    )
    answer = client.post("/v1/completions", json={"model": "m", "prompt": "x" * size})
    assert answer.status_code == 200
    assert names[0].startswith(thread) if thread else "bodies" not in names[0]
