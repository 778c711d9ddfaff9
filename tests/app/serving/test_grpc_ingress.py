"""gRPC calls of an API whose service answers at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from folio.app.api.openai.bodies import CompletionRequest
from folio.app.api.openai.replies import Completion
from folio.app.config.http import HttpSettings, KeySource, RateLimits
from folio.app.errors import RequestError
from folio.app.proto import folio_pb2 as pb
from folio.app.proto.folio_pb2_grpc import FolioStub
from folio.app.serving.grpc_ingress import _client_of, asgi_call, http_scope
from tests.app.api.fake_service import FakeService
from tests.grpc_server import MAX_MESSAGE_BYTES, grpc_listening
from tests.local_server import guarded_api, listening

KEY, OPERATOR_KEY = "a-key-of-a-client", "a-key-of-an-operator"
DEADLINE_S = 60


class Service(FakeService):
    """`ended`: streams that have been closed before their end."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[CompletionRequest] = []
        self.ended = 0

    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion:
        self.requests.append(request)
        return await super().generate(request, session)

    async def generate_stream(
        self, request: CompletionRequest, session: str | None = None
    ) -> AsyncIterator[Completion]:
        if request.model != "endless":
            async for chunk in super().generate_stream(request, session):
                yield chunk
            return
        yield self._completion("begun")
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


def keys_in(folder: Path, **limits: int) -> HttpSettings:
    path = folder / "keys.yaml"
    entries = [{"name": "c", "key": KEY, "tenant": "acme"}, {"name": "o", "key": OPERATOR_KEY, "operator": True}]
    path.write_text(json.dumps({"keys": entries}))
    return HttpSettings(api_keys=KeySource(file=path), key_limits=RateLimits(**limits))


def call(
    method: str,
    request: Any,
    service: FakeService | None = None,
    settings: HttpSettings | None = None,
    metadata: dict[str, str] | None = None,
) -> Any:
    """The answer, or all of a stream's; raises gRPC's error."""
    with grpc_listening(guarded_api(service or Service(), settings)) as url:
        return call_at(url, method, request, metadata)


def call_at(url: str, method: str, request: Any, metadata: dict[str, str] | None = None) -> Any:
    with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
        answer = getattr(FolioStub(channel), method)(request, metadata=[*(metadata or {}).items()], timeout=DEADLINE_S)
        return list(answer) if method.endswith("Stream") else answer


def refusal(asked: Callable[[], Any]) -> tuple[str, dict[str, Any]]:
    """The status, and the error in the JSON of HTTP."""
    with pytest.raises(grpc.RpcError) as caught:
        asked()
    return caught.value.code().name, error_of(caught.value)


def error_of(error: Any) -> dict[str, Any]:
    detail: dict[str, Any] = json.loads(dict(error.trailing_metadata())["folio-error"])["error"]
    assert error.details() == detail["message"]
    return detail


def test_what_is_set_arrives_and_nothing_else() -> None:
    """As in JSON: a field that is not set is the body's default, not protobuf's zero."""
    service = Service()
    sampling = pb.Sampling(temperature=0.0, stop=["x"], logit_bias={5: -1.5}, seed=2**40, early_stopping="true")
    scheduling = pb.Scheduling(session="s", priority=-1)
    request = pb.GenerateRequest(model="m", text="a", sampling=sampling, scheduling=scheduling)
    answer = call("Generate", request, service)
    [body] = service.requests
    assert body.model_fields_set == {
        "model", "prompt", "temperature", "stop", "logit_bias", "seed", "early_stopping", "priority", "stream",
    }  # fmt: skip
    assert (body.temperature, body.stop, body.seed, body.max_tokens) == (0.0, ["x"], 2**40, 16)
    assert (body.logit_bias, body.early_stopping, body.priority) == ({"5": -1.5}, True, -1)
    assert answer.choices[0].text == "a of s"


def test_no_bound_of_tokens_is_not_the_default_one() -> None:
    service = Service()
    call("Generate", pb.GenerateRequest(model="m", text="a", unlimited=True), service)
    assert service.requests[0].max_tokens is None


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        (pb.GenerateRequest(model="engine", text="a"), "INTERNAL", "engine_error", None),
        (pb.GenerateRequest(model="bug", text="a"), "INTERNAL", "internal_error", None),
        (pb.GenerateRequest(model="unknown", text="a"), "NOT_FOUND", "request_not_found", "request_id"),
        (pb.GenerateRequest(model="full for a while", text="a"), "RESOURCE_EXHAUSTED", "overloaded", None),
        (pb.GenerateRequest(model="slow", text="a"), "DEADLINE_EXCEEDED", "timeout", None),
        (pb.GenerateRequest(model="m"), "INVALID_ARGUMENT", "invalid_value", "prompt"),
        (
            pb.GenerateRequest(model="m", text="a", sampling=pb.Sampling(temperature=float("nan"))),
            "INVALID_ARGUMENT", "invalid_value", None,
        ),
        (
            pb.GenerateRequest(model="m", text="a", scheduling=pb.Scheduling(timeout_s=-1)),
            "INVALID_ARGUMENT", "invalid_value", "timeout_s",
        ),
        (
            pb.GenerateRequest(model="m", text="a", scheduling=pb.Scheduling(session="s" * 40_000)),
            "INVALID_ARGUMENT", "headers_too_large", None,
        ),
    ],
)  # fmt: skip
def test_errors_have_their_status_and_the_json(
    method: str, request_: Any, status: str, code: str, param: str | None
) -> None:
    name, detail = refusal(lambda: call(method, request_))
    assert (name, detail["code"], detail["param"]) == (status, code, param)
    assert "secret" not in detail["message"]


def test_json_within_text_is_checked() -> None:
    request = pb.ChatRequest(model="m", messages=[pb.Message(role="user", content="a")])
    request.tools.add(name="f", parameters="{")
    name, detail = refusal(lambda: call("Chat", request))
    assert (name, detail["param"]) == ("INVALID_ARGUMENT", "tools")


def test_a_stream_that_breaks_has_its_status() -> None:
    """What has been sent has been sent. The last message is empty: with it Serve's proxy learns the status, which it
    would otherwise say was OK."""
    with grpc_listening(guarded_api(Service())) as url, grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
        chunks = FolioStub(channel).GenerateStream(pb.GenerateRequest(model="late", text="a"), timeout=DEADLINE_S)
        assert next(chunks).choices[0].text == "begun"
        assert next(chunks) == pb.Completion()
        name, detail = refusal(lambda: next(chunks))
    assert (name, detail["code"]) == ("INTERNAL", "engine_error")


@pytest.mark.parametrize("metadata", [{}, {"authorization": "Bearer wrong-key-of-nobody"}, {"x-api-key": KEY + "x"}])
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_without_a_key_nothing_of_a_call_is_looked_at(tmp_path: Path, method: str, metadata: dict[str, str]) -> None:
    """gRPC is no way around the keys."""
    service = Service()
    request = pb.GenerateRequest(model="m", text="a", sampling=pb.Sampling(temperature=float("nan")))
    name, detail = refusal(lambda: call(method, request, service, keys_in(tmp_path), metadata))
    assert (name, detail["code"]) == ("UNAUTHENTICATED", "invalid_api_key")
    assert not service.requests


@pytest.mark.parametrize("has_key", [True, False])
def test_bytes_that_are_no_message(tmp_path: Path, capfd: pytest.CaptureFixture[str], has_key: bool) -> None:
    """Regression: gRPC read messages before the keys were looked at, and logged a traceback for each that it could not
    read: UNKNOWN without a key, and half a megabyte of log in a second."""
    service, methods = Service(), pb.DESCRIPTOR.services_by_name["Folio"].methods_by_name
    metadata = [("authorization", f"Bearer {OPERATOR_KEY}")] if has_key else []
    expected = ("INVALID_ARGUMENT", "invalid_value") if has_key else ("UNAUTHENTICATED", "invalid_api_key")
    with (
        grpc_listening(guarded_api(service, keys_in(tmp_path))) as url,
        grpc.insecure_channel(url.removeprefix("grpc://")) as channel,
    ):
        for method in methods:
            ask = channel.unary_stream(f"/folio.v1.Folio/{method}")
            for garbage in (b"\xff\xff\xff\xff", b"\x0a\x05ab", b"{}"):
                asked = ask(garbage, metadata=metadata, timeout=DEADLINE_S)
                name, detail = refusal(lambda asked=asked: list(asked))  # type: ignore[misc]
                assert (name, detail["code"]) == expected, (method, garbage)
    assert not service.requests
    assert "Traceback" not in capfd.readouterr().err


def test_keys_have_the_rights_that_they_have_over_http(tmp_path: Path) -> None:
    with grpc_listening(guarded_api(Service(), keys_in(tmp_path))) as url:
        client, operator = {"authorization": f"Bearer {KEY}"}, {"x-api-key": OPERATOR_KEY}
        assert call_at(url, "Generate", pb.GenerateRequest(model="m", text="a"), client).choices
        for method, request in (
            ("Pins", pb.PinsRequest()),
            ("Load", pb.LoadRequest()),
            ("Report", pb.ReportRequest()),
            ("Pin", pb.PinRequest(name="p", text="a")),
            ("Unpin", pb.UnpinRequest(name="p")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call_at(url, method, request, client)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert call_at(url, "Pin", pb.PinRequest(name="p/ä", text="a"), operator).id == "p/ä"
        assert [card.id for card in call_at(url, "Pins", pb.PinsRequest(), operator).data] == ["p/ä"]
        assert call_at(url, "Unpin", pb.UnpinRequest(name="p/ä"), operator).id == "p/ä"
        assert call_at(url, "Load", pb.LoadRequest(), operator).num_replicas == 1


def test_limits_are_those_of_http_and_shared_with_it(tmp_path: Path) -> None:
    api = guarded_api(Service(), keys_in(tmp_path, requests_per_minute=1))
    header = {"authorization": f"Bearer {KEY}"}
    with listening(api) as http_url, grpc_listening(api) as url:
        body = {"model": "m", "prompt": "a"}
        assert httpx.post(f"{http_url}/v1/completions", json=body, headers=header).status_code == 200
        with pytest.raises(grpc.RpcError) as caught:
            call_at(url, "Generate", pb.GenerateRequest(model="m", text="a"), header)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error_of(caught.value)["code"] == "rate_limit_exceeded"
    told = dict(caught.value.trailing_metadata())
    assert 1 <= int(told["retry-after"]) <= 60
    assert told["x-ratelimit-limit-requests"] == "1"


def test_messages_have_the_bounds_of_bodies() -> None:
    """And what the server is told to refuse by its size alone is refused by gRPC."""
    settings = HttpSettings(max_body_bytes=100_000)
    long = pb.GenerateRequest(model="m", text="a" * 200_000)
    name, detail = refusal(lambda: call("Generate", long, settings=settings))
    assert (name, detail["code"]) == ("INVALID_ARGUMENT", "body_too_large")
    with pytest.raises(grpc.RpcError) as caught:
        call("Generate", pb.GenerateRequest(model="m", text="a" * (MAX_MESSAGE_BYTES + 1)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("ends_by", ["cancel", "deadline"])
def test_a_call_that_is_given_up_ends_the_request(ends_by: str) -> None:
    service = Service()

    async def run(url: str) -> None:
        async with grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel:
            timeout_s = 1.0 if ends_by == "deadline" else None
            chunks = FolioStub(channel).GenerateStream(pb.GenerateRequest(model="endless", text="a"), timeout=timeout_s)
            assert (await chunks.read()).choices[0].text == "begun"
            if ends_by == "cancel":
                chunks.cancel()
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await chunks.read()
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            async with asyncio.timeout(DEADLINE_S):
                while not service.ended:
                    await asyncio.sleep(0.01)

    with grpc_listening(guarded_api(service)) as url:
        asyncio.run(run(url))


def test_an_error_that_quotes_much_fits_into_the_metadata() -> None:
    """gRPC drops calls whose metadata have more than 8 KiB, and the error with them."""

    class Quotes(Service):
        async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion:
            raise RequestError(str(request.prompt))

    for letter in "x😀":
        request = pb.GenerateRequest(model="m", text=letter * 20_000)
        name, detail = refusal(lambda request=request: call("Generate", request, Quotes()))  # type: ignore[misc]
        assert (name, detail["message"][0]) == ("INVALID_ARGUMENT", letter)


async def test_an_application_does_not_run_ahead_of_a_slow_reader() -> None:
    sent = 0

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            sent += 1

    async def body() -> bytes:
        raise AssertionError("nobody has asked for it")

    messages = asgi_call(endless, http_scope("POST", "/", [], ("c", 1)), body)
    for _ in range(3):
        await anext(messages)
        for _ in range(50):
            await asyncio.sleep(0)
    assert sent <= 4
    await messages.aclose()


async def test_an_application_that_fails_in_the_middle_is_heard() -> None:
    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def body() -> bytes:
        return b""

    with pytest.raises(ZeroDivisionError):
        async for _ in asgi_call(breaks, http_scope("GET", "/", [], ("c", 1)), body):
            pass


def test_a_peer_is_the_address_of_a_client() -> None:
    """By which its limits go."""
    assert _client_of("ipv4:10.1.2.3:5000") == ("10.1.2.3", 5000)
    assert _client_of("ipv6:%5B2001:db8::1%5D:5000") == ("2001:db8::1", 5000)
    assert _client_of("unix:/run/x") == ("unix:/run/x", 0)
