"""Guard around scripted applications."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from folio.app.config.http import HttpSettings, RateLimits
from folio.app.edge.guard import Guard
from folio.app.http.request_context import current_context, request_id
from tests.app.edge.asgi import ALICE, BOB, Codes, answer_of, bearer, call, echo, gone, guarded, scope_of


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{ALICE}\n{BOB}\n")
    return path


# ---- keys ----


def test_a_valid_key_is_needed(keys: Path) -> None:
    app = guarded(keys=keys)
    missing, wrong = answer_of(app), answer_of(app, headers=bearer("sk-alice-0123456780"))
    for refused in (missing, wrong):
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"].startswith("Bearer")
    assert missing.error["message"] != wrong.error["message"]
    for headers in (bearer(ALICE), [("authorization", f"bEaReR {BOB}")], [("X-API-Key", ALICE)]):
        assert answer_of(app, headers=headers).status == 200
    for headers in ([("Authorization", ALICE)], [("Authorization", f"Basic {ALICE}")], bearer("")):
        assert answer_of(app, headers=headers).status == 401


def test_open_paths_and_those_below_need_no_key(keys: Path) -> None:
    """`/docs` loads `/docs/swagger-ui.css`."""
    app, more = guarded(keys=keys), guarded(keys=keys, open_paths=["/metrics"])
    assert [answer_of(app, path=path).status for path in ("/health", "/ready", "/metrics")] == [200, 200, 401]
    for path in ("//health", "/v1/../health", "/HEALTH"):
        assert answer_of(app, path=path).status == 401, path
    assert [answer_of(more, path=path).status for path in ("/metrics", "/metrics/x", "/metricsx")] == [200, 200, 401]
    assert answer_of(app, path="/mounted/health", root_path="/mounted").status == 200


def test_operator_paths_need_an_operators_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{name: user, key: {ALICE}}}, {{name: operator, key: {BOB}, operator: true}}]")
    app = guarded(keys=path)
    for where in ("/v1/load", "/v1/pins", "/v1/pins/x", "/metrics", "/metrics/load"):
        refused = answer_of(app, path=where, headers=bearer(ALICE))
        assert (refused.status, refused.error["code"]) == (403, "not_allowed"), where
        assert answer_of(app, path=where, headers=bearer(BOB)).status == 200
        assert answer_of(guarded(), path=where).status == 200
    assert answer_of(app, path="/v1/pinsel", headers=bearer(ALICE)).status == 200


# ---- rates ----


def test_limits_are_per_key(keys: Path) -> None:
    app = guarded(keys=keys, key_limits={"requests_per_minute": 1})
    first = answer_of(app, headers=bearer(ALICE))
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert 59 <= float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    refused = answer_of(app, headers=bearer(ALICE))
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert answer_of(app, headers=bearer(BOB)).status == 200
    assert answer_of(app, path="/health").status == 200


def test_refusals_are_observed() -> None:
    settings = HttpSettings(address_limits=RateLimits(requests_per_minute=1), max_url_bytes=100)
    app = Guard(echo, settings, observer=(observer := Codes()))
    assert [answer_of(app, path=path).status for path in ("/a", "/a", "/" + "x" * 100)] == [200, 429, 414]
    assert observer.codes == ["rate_limit_exceeded", "url_too_long"]


def test_addresses_have_limits_where_there_are_no_keys() -> None:
    app = guarded(address_limits={"requests_per_minute": 1})
    assert [answer_of(app, client=host).status for host in ("a", "a", "b")] == [200, 429, 200]


def test_trying_keys_is_limited_by_address(keys: Path) -> None:
    app = guarded(keys=keys, address_limits={"requests_per_minute": 2})
    wrong = bearer("sk-alice-0123456780")
    assert [answer_of(app, headers=wrong).status for _ in range(3)] == [401, 401, 429]
    assert answer_of(app, headers=bearer(ALICE)).status == 200


async def test_concurrent_requests_per_key_and_in_all(keys: Path) -> None:
    """A place is free again however a request ends: answered, refused, failed or cancelled."""
    gate, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        begun.release()
        await gate.wait()
        if scope["path"] == "/fails":
            raise ZeroDivisionError
        await echo(scope, receive, send)

    app = guarded(slow, keys, key_limits={"concurrent_requests": 1}, max_concurrent_requests=2)
    first = asyncio.create_task(call(app, path="/fails", headers=bearer(ALICE)))
    await begun.acquire()
    refused = await call(app, headers=bearer(ALICE))
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    second = asyncio.create_task(call(app, headers=bearer(BOB)))
    await begun.acquire()
    busy = await call(app, headers=bearer(BOB))
    assert (busy.status, busy.error["code"]) == (503, "overloaded")
    assert int(busy.headers["retry-after"]) >= 1
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    assert (await first).status == 500
    for key in (ALICE, BOB, ALICE):
        assert (await call(app, headers=bearer(key))).status == 200


async def test_retry_after_is_the_mean_answering_time() -> None:
    """Each answer counts a tenth: the mean is 1 s at first, and 2.95 s after an answer of 20.5 s."""
    gate, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        exchange = current_context()
        assert exchange is not None
        exchange.begun_at -= 20.5
        begun.release()
        await gate.wait()
        await echo(scope, receive, send)

    app = guarded(slow, max_concurrent_requests=1)
    for seconds in ("1", "3"):
        first = asyncio.create_task(call(app))
        await begun.acquire()
        assert (await call(app)).headers["retry-after"] == seconds
        gate.set()
        await first
        gate.clear()


def test_tokens_are_charged_and_refused_prompts_given_back(keys: Path) -> None:
    async def generate(scope: Any, receive: Any, send: Any) -> None:
        exchange = current_context()
        assert exchange is not None
        exchange.count_prompt(40)
        status = {"/fails": 503, "/refused": 400, "/late": 408}.get(scope["path"], 200)
        if status == 200:
            exchange.count_output(30, 8)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app = guarded(generate, keys, key_limits={"tokens_per_minute": 60})

    def left() -> int:
        """Remaining tokens, from an answer that is not charged."""
        refused = answer_of(app, path="/x" * 5000, headers=bearer(ALICE))  # refused before the quota is known
        assert "x-ratelimit-remaining-tokens" not in refused.headers
        return int(answer_of(app, path="/fails", headers=bearer(ALICE)).headers["x-ratelimit-remaining-tokens"])

    assert [left(), left()] == [20, 20]
    assert answer_of(app, path="/refused", headers=bearer(ALICE)).status == 400
    assert left() == 20
    assert answer_of(app, path="/ok", headers=bearer(ALICE)).status == 200
    refused = answer_of(app, path="/ok", headers=bearer(ALICE))  # ten are owed
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert 10 <= int(refused.headers["retry-after"]) <= 11
    assert current_context() is None


# ---- sizes ----


@pytest.mark.parametrize(
    ("status", "arguments"),
    [
        (414, {"path": "/" + "x" * 100}),
        (414, {"path": "/?" + "x" * 100}),
        (431, {"headers": [("a", "b")] * 9}),
        (431, {"headers": [("a", "b" * 300)]}),
        (413, {"method": "POST", "body": b"x" * 51}),
        (413, {"method": "GET", "body": b"x" * 51}),
        (413, {"method": "POST", "body": [b"x" * 50, b"x"]}),
        (413, {"method": "POST", "headers": [("content-length", "9" * 18)]}),
        (400, {"method": "POST", "headers": [("content-length", "9" * 19)]}),
        (400, {"method": "POST", "headers": [("content-length", "-1")]}),
        (200, {"method": "POST", "body": b"x" * 50, "path": "/" + "x" * 79 + "?" + "x" * 20}),
        (200, {"method": "POST", "body": [b"x" * 25, b"", b"x" * 25], "headers": [("a", "b" * 100)] * 2}),
    ],
)
def test_sizes(status: int, arguments: dict[str, Any]) -> None:
    app = guarded(max_url_bytes=100, max_headers=8, max_header_bytes=250, max_body_bytes=50)
    answer = answer_of(app, **arguments)
    assert answer.status == status
    if status == 200:
        assert answer.body == b"x" * 50
    else:
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["connection"] == "close"


def test_a_long_body_is_not_read_to_its_end() -> None:
    num_read = 0

    async def endless() -> dict[str, Any]:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"x" * 10, "more_body": True}

    assert answer_of(guarded(max_body_bytes=100), "POST", receive=endless).status == 413
    assert num_read == 11


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def trickle() -> dict[str, Any]:
    await asyncio.sleep(0.001)
    return {"type": "http.request", "body": b"x", "more_body": True}


@pytest.mark.parametrize(("receive", "timeout_s"), [(never, 0.01), (trickle, 0.05)])
def test_the_timeout_is_for_the_whole_body(receive: Any, timeout_s: float) -> None:
    refused = answer_of(guarded(body_timeout_s=timeout_s), "POST", receive=receive)
    assert (refused.status, refused.error["code"]) == (408, "timeout")


def test_a_client_that_disconnects_while_sending() -> None:
    assert answer_of(guarded(), "POST", receive=gone).messages == []


# ---- answers ----


async def test_streams_pass_as_they_come_and_disconnects_get_through() -> None:
    """After the body, the application receives the server's messages: here, the disconnection."""
    sent: asyncio.Queue[bytes] = asyncio.Queue()
    more, gone = asyncio.Event(), asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"ab"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await more.wait()
        await send({"type": "http.response.body", "body": b"2", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        gone.set()

    parts = [b"a", b"b"]

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.put_nowait(message.get("body", b"start"))

    task = asyncio.create_task(guarded(stream)(scope_of("POST", "/"), receive, send))
    assert [await sent.get(), await sent.get()] == [b"start", b"1"]
    assert sent.empty()
    more.set()
    assert await sent.get() == b"2"
    await task
    assert gone.is_set()


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_internal_error_is_answered_without_details_or_breaks_the_answer(has_begun: bool) -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError("secret detail")

    if has_begun:
        with pytest.raises(ZeroDivisionError):
            answer_of(guarded(fails))
        return
    answer = answer_of(guarded(fails), headers=[("x-request-id", "r1")])
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.body.decode()
    assert answer.error["message"].endswith("request r1")


def test_every_request_has_an_id_and_every_answer_security_headers() -> None:
    async def answer_id(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": request_id().encode()})

    app = guarded(answer_id)
    assert answer_of(app, headers=[("X-Request-ID", "from-client.1")]).body == b"from-client.1"
    for bad in ("", "a b", "x" * 129, "a\nb"):
        assert len(answer_of(app, headers=[("x-request-id", bad)]).body) == 32
    answer = answer_of(app)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "x-request-id" not in answer.headers  # Serve's server echoes it


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default_timeout_s": 2, "max_timeout_s": 1}, "must not be longer"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"api_key": "x"}, "Extra inputs"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HttpSettings.model_validate(settings)
    json.dumps(HttpSettings(key_limits=RateLimits(requests_per_minute=1)).model_dump(mode="json"))
