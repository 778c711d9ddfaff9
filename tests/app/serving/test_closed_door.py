"""Refusals that Serve's proxy repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from app.edge.watcher import Watcher
from app.errors import OverloadedError
from app.openai.errors import CLOSED_HEADER, error_headers
from app.serving import closed_door
from app.serving.closed_door import HearsOfRefusals
from app.serving.proxies import middlewares
from tests.app.edge.asgi import Answer, call

PATH = "/v1/completions"


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(closed_door, "time", clock)
    return clock


class Ingress(Watcher):
    """Refuses for as long as it is told, and counts."""

    def __init__(self, closed_s: float) -> None:
        self.closed_s = closed_s
        self.loses = False
        self.num_asked = self.num_told = 0

    def refused(self, code: str, number: int = 1) -> None:
        assert code == "closed_door"
        self.num_told += number

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        headers = [(b"content-type", b"application/json"), (b"x-ratelimit-limit-requests", b"7")]
        if not self.closed_s:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"welcome"})
            return
        for name, value in error_headers(OverloadedError("full", 3.2, self.closed_s)).items():
            headers.append((name.lower().encode(), value.encode()))
        if self.loses:
            raise ConnectionError
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": b"full"})


def proxied(ingress: Any) -> Any:
    """As Serve puts its proxies together."""
    app = HearsOfRefusals(ingress, ingress)
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


async def post(proxy: Any, path: str = PATH, headers: Iterable[tuple[str, str]] = ()) -> Answer:
    return await call(proxy, "POST", path, headers, b"{}")


def test_a_closed_door_is_asked_once(clock: Clock) -> None:
    async def run() -> None:
        ingress = Ingress(closed_s=0.2)
        proxy = proxied(ingress)
        first, *others = [await post(proxy, headers=[("x-request-id", f"mine-{n}")]) for n in range(5)]
        for answer in (first, *others):
            assert (answer.status, answer.body) == (429, b"full")
            assert answer.headers["retry-after"] == "4"
            assert CLOSED_HEADER.lower() not in answer.headers
        assert [answer.headers["x-request-id"] for answer in others] == [f"mine-{n}" for n in range(1, 5)]
        assert "x-ratelimit-limit-requests" not in others[0].headers  # those are the first caller's
        assert (ingress.num_asked, ingress.num_told) == (1, 0)
        ingress.closed_s = 0.0
        clock.now_s += 0.19
        assert (await post(proxy)).status == 429
        clock.now_s += 0.01
        assert (await post(proxy)).status == 200
        assert (ingress.num_asked, ingress.num_told) == (2, 5)
        assert (await post(proxy)).status == 200
        assert ingress.num_told == 5

    asyncio.run(run())


def test_however_long_it_is_closed_it_is_asked_again_soon(clock: Clock) -> None:
    async def run() -> None:
        ingress = Ingress(closed_s=60.0)
        proxy = proxied(ingress)
        await post(proxy)
        clock.now_s += 0.3
        await post(proxy)
        assert ingress.num_asked == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/v1/chat/completions", []),
        ("GET", PATH, []),
        ("POST", PATH, [("content-length", "100000")]),  # of which the rest is on its way
        ("POST", PATH, [("transfer-encoding", "chunked")]),
        ("POST", PATH, [("origin", "https://page.example")]),  # which could not read an answer without CORS headers
    ],
)
def test_others_get_their_own_answer(method: str, path: str, headers: list[tuple[str, str]]) -> None:
    async def run() -> None:
        ingress = Ingress(closed_s=0.2)
        proxy = proxied(ingress)
        await post(proxy)
        await call(proxy, method, path, headers, [b"{}"] if ("content-length", "100000") in headers else b"{}")
        assert ingress.num_asked == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "closed"), [(429, None), (429, b"soon"), (429, b"nan"), (200, b"0.200")], ids=lambda value: str(value)
)
def test_answers_that_say_nothing_of_others_are_not_repeated(status: int, closed: bytes | None) -> None:
    """Such as refusals for a caller's own limits, and whatever other applications send."""

    class Other(Ingress):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.num_asked += 1
            headers = [] if closed is None else [(CLOSED_HEADER.encode(), closed)]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"you"})

    async def run() -> None:
        other = Other(0.0)
        proxy = proxied(other)
        assert [(await post(proxy)).status for _ in range(3)] == [status] * 3
        assert other.num_asked == 3

    asyncio.run(run())


def test_a_refusal_in_pieces_is_not_repeated() -> None:
    class Talker(Ingress):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.num_asked += 1
            headers = [(CLOSED_HEADER.encode(), b"0.200")]
            await send({"type": "http.response.start", "status": 429, "headers": headers})
            await send({"type": "http.response.body", "body": b"fu", "more_body": True})
            await send({"type": "http.response.body", "body": b"ll"})

    async def run() -> None:
        talker = Talker(0.0)
        proxy = proxied(talker)
        assert [(await post(proxy)).body for _ in range(3)] == [b"full"] * 3
        assert talker.num_asked == 3

    asyncio.run(run())


def test_what_may_not_have_been_heard_is_told_again(clock: Clock) -> None:
    class Deaf(Ingress):
        """Serve between proxy and ingress, which loses a request."""

        def refused(self, code: str, number: int = 1) -> None:
            if not self.loses:
                super().refused(code, number)

    async def run() -> None:
        ingress = Deaf(closed_s=0.05)
        proxy = proxied(ingress)
        for _ in range(4):
            await post(proxy)
        clock.now_s += 0.1
        ingress.loses = True
        with pytest.raises(ConnectionError):
            await post(proxy)
        ingress.loses = False
        await post(proxy)
        assert ingress.num_told == 3

    asyncio.run(run())


def test_an_id_that_could_forge_a_log_is_not_echoed() -> None:
    async def run() -> None:
        proxy = proxied(Ingress(closed_s=0.2))
        await post(proxy)
        answer = await post(proxy, headers=[("x-request-id", "a\nb")])
        assert len(answer.headers["x-request-id"]) == 32

    asyncio.run(run())


def test_counts_are_not_lost_when_refusals_overtake_each_other(clock: Clock) -> None:
    async def run() -> None:
        ingress = Ingress(closed_s=0.05)
        proxy = proxied(ingress)
        answers = [post(proxy) for _ in range(20)]
        await asyncio.gather(*answers)
        for _ in range(30):
            await asyncio.gather(*(post(proxy) for _ in range(5)))
            clock.now_s += 0.01
        ingress.closed_s = 0.0
        clock.now_s += 0.1
        await post(proxy)
        assert ingress.num_asked + ingress.num_told == 20 + 150 + 1
        assert ingress.num_told > 50

    asyncio.run(run())
