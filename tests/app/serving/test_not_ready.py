"""What a proxy says of a server that is starting."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.serving import not_ready
from app.serving.not_ready import AnswersNotReady


class Application:
    """Answers as soon as it may."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.runs = asyncio.Event()
        self.num_asked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        await self.runs.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"ready"})


async def ask(proxy: AnswersNotReady, path: str) -> tuple[int, bytes]:
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    await proxy({"type": "http", "method": "GET", "path": path, "headers": []}, receive, send)
    start, body = sent
    return start["status"], body["body"]


def test_it_says_so_at_once_while_no_ingress_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the proxy let `/ready` wait for the ingress, half a minute long, and a probe for its time-out."""
    monkeypatch.setattr(not_ready, "_WAIT_S", 0.0)

    async def main() -> None:
        application = Application()
        proxy = AnswersNotReady(application)
        for path in ("/ready", "/folio/ready"):
            status, body = await ask(proxy, path)
            assert (status, json.loads(body)["error"]["message"]) == (503, "nothing is ready at this path yet")
        assert application.num_asked == 1  # Serve logs each request that is given up
        others = asyncio.create_task(ask(proxy, "/v1/models"))
        await asyncio.sleep(0)
        assert not others.done()  # these wait, as they did
        application.runs.set()
        assert await others == (200, b"ready")
        assert await ask(proxy, "/ready") == (200, b"ready")

    asyncio.run(main())


def test_it_says_nothing_once_there_has_been_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        application = Application()
        proxy = AnswersNotReady(application)
        application.runs.set()
        assert await ask(proxy, "/ready") == (200, b"ready")
        application.runs.clear()
        monkeypatch.setattr(not_ready, "_WAIT_S", 0.0)
        late = asyncio.create_task(ask(proxy, "/ready"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not late.done()
        application.runs.set()
        assert await late == (200, b"ready")

    asyncio.run(main())


def test_a_route_that_is_not_there_yet() -> None:
    """Regression: 404, while the application was built; an orchestrator takes that for a wrong configuration."""

    async def main() -> None:
        application = Application(status=404)
        application.runs.set()
        proxy = AnswersNotReady(application)
        status, body = await ask(proxy, "/ready")
        assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable")
        assert await ask(proxy, "/other") == (404, b"ready")
        application.status = 200
        assert await ask(proxy, "/ready") == (200, b"ready")
        application.status = 404  # now it is what it says
        assert await ask(proxy, "/ready") == (404, b"ready")

    asyncio.run(main())
