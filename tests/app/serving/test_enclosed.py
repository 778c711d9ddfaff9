"""Bodies between Serve's proxy and an ingress, as Serve connects them."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.serve._private.http_util import ASGIReceiveProxy

from app.serving import enclosed
from app.serving.enclosed import EnclosesBody, TakesEnclosedBody
from tests.app.edge.asgi import Answer, call

MiB = 1 << 20


class ServeProxy:
    """What is behind the proxy's middleware: the scope goes by value, and bodies are fetched.

    Args:
        app: in the ingress.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.num_fetches = 0

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        async def fetch(_: object) -> bytes:
            self.num_fetches += 1
            return pickle.dumps([await receive()])

        scope = pickle.loads(pickle.dumps(scope))
        proxy: Any = ASGIReceiveProxy(scope, None, fetch)  # type: ignore[arg-type]
        fetching = asyncio.create_task(proxy.fetch_until_disconnect())
        try:
            await self._app(scope, proxy, send)
        finally:
            fetching.cancel()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the whole body, after a while."""
    body = b""
    while True:
        message = await receive()
        assert message["type"] == "http.request"
        body += message["body"]
        if not message["more_body"]:
            break
    await asyncio.sleep(0.01)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def through(app: Any, *args: Any, **kwargs: Any) -> tuple[Answer, int]:
    """The answer, and how often something was fetched."""
    serve = ServeProxy(app)
    return asyncio.run(call(EnclosesBody(serve), *args, **kwargs)), serve.num_fetches


@pytest.mark.parametrize("size", [1, 60_000])
def test_a_body_comes_with_its_head(size: int) -> None:
    answer, num_fetches = through(TakesEnclosedBody(echo), "POST", body=b"x" * size)
    assert answer.body == b"x" * size
    assert num_fetches == 0


def test_who_does_not_take_it_gets_it_nevertheless() -> None:
    answer, num_fetches = through(echo, "POST", body=b"hello")
    assert answer.body == b"hello"
    assert num_fetches == 2  # the second waits for the client to leave


@pytest.mark.parametrize("body", [b"x" * MiB, [b"by ", b"and ", b"by"]], ids=["long", "of unknown length"])
def test_others_are_fetched(body: Any) -> None:
    answer, num_fetches = through(TakesEnclosedBody(echo), "POST", body=body)
    assert answer.body == b"".join([body] if isinstance(body, bytes) else body)
    assert num_fetches > 0


@pytest.mark.parametrize("length", ["", "-1", "1e3", "9" * 30, "0"])
def test_a_length_that_says_nothing_is_left_to_the_guard(length: str) -> None:
    answer, num_fetches = through(
        TakesEnclosedBody(echo), "POST", headers=[("content-length", length)], body=[b"hello"]
    )
    assert answer.body == b"hello"
    assert num_fetches > 0


def test_a_body_that_takes_long_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enclosed, "_WAIT_S", 0.05)
    parts = [b"slow", b"ly", b" but surely"]

    async def receive() -> dict[str, Any]:
        if len(parts) == 1:  # not before it has gone on without it
            await began.wait()
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        began.set()
        await echo(scope, receive, send)

    began = asyncio.Event()
    answer, num_fetches = through(TakesEnclosedBody(reads), "POST", headers=[("content-length", "17")], receive=receive)
    assert answer.body == b"slowly but surely"
    assert num_fetches >= 3


def test_who_is_to_ask_for_the_clients_leaving_can() -> None:
    """With this header Serve does not cancel the request."""
    headers = [("x-request-disconnect-disabled", "?1")]
    answer, num_fetches = through(TakesEnclosedBody(echo), "POST", headers=headers, body=b"hello")
    assert answer.body == b"hello"
    assert num_fetches == 2


def test_a_client_that_leaves_first_is_nobodys_request() -> None:
    messages = [
        {"type": "http.request", "body": b"half", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    answer, _ = through(None, "POST", headers=[("content-length", "8")], receive=receive)
    assert not answer.messages


def test_requests_without_a_body_pass() -> None:
    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    answer, _ = through(TakesEnclosedBody(nothing), "GET")
    assert answer.status == 204


def test_after_the_body_nothing_comes() -> None:
    """As `receive` has it until the client leaves; that the request is cancelled then is Serve's doing."""

    async def listens(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"hello"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    answer, num_fetches = through(TakesEnclosedBody(listens), "POST", body=b"hello")
    assert answer.status == 200
    assert num_fetches == 0
