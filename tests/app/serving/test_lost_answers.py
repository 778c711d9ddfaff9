"""Requests of ingresses that die."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from app.openai.responses_replies import ErrorEvent
from app.serving import lost_answers
from app.serving.enclosed import TakesEnclosedBody
from app.serving.lost_answers import MarksAnswers
from app.serving.proxies import middlewares
from tests.app.edge.asgi import Answer, call

PATH = "/v1/completions"
EVENTS = [b'data: {"n": 0}\n\n', b'data: {"text": "a\\n\\nb"}\n\n']


class Died(Exception):
    pass


class Ingress:
    """Answers with the body, whole or as a stream; dies as often as it is told."""

    def __init__(self) -> None:
        self.deaths_before = self.deaths_within = 0
        self.bodies: list[bytes] = []
        self.streams = False
        self.status = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        self.bodies.append(body)
        if self.deaths_before:
            self.deaths_before -= 1
            raise Died
        kind = b"text/event-stream; charset=utf-8" if self.streams else b"application/json"
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-type", kind)]})
        for event in EVENTS if self.streams else ():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        if self.deaths_within:
            self.deaths_within -= 1
            raise Died
        await send({"type": "http.response.body", "body": body})


def proxied(ingress: Any, marks: bool = True) -> Any:
    """As Serve puts its proxies together."""
    inside = TakesEnclosedBody(ingress)
    if marks:
        inside = MarksAnswers(inside)

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        """Serve listens until the client leaves, and only logs what has happened."""

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        listening = asyncio.create_task(listen())
        try:
            await inside(dict(scope), receive, send)
        except Died:
            await asyncio.sleep(0)
        finally:
            listening.cancel()

    app: Any = serve
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_answers, "_PAUSES_S", (0.0, 0.0))


def play(ingress: Ingress, then: Callable[[], None], path: str = PATH, marks: bool = True, **kwargs: Any) -> Answer:
    """The second answer; before, the path has become known, and `then` something changes."""

    async def run() -> Answer:
        proxy = proxied(ingress, marks)
        first = await call(proxy, "POST", path, body=b"hello")
        assert first.status == 200
        assert "x-folio-ingress" not in first.headers or not marks
        then()
        return await call(proxy, "POST", path, body=b"again", **kwargs)

    return asyncio.run(run())


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_request_goes_to_another_ingress(deaths: int) -> None:
    ingress = Ingress()
    answer = play(ingress, lambda: setattr(ingress, "deaths_before", deaths))
    assert (answer.status, answer.body) == (200, b"again")
    assert ingress.bodies == [b"hello"] + [b"again"] * (1 + deaths)


def test_it_does_not_take_down_all_of_them() -> None:
    ingress = Ingress()
    answer = play(ingress, lambda: setattr(ingress, "deaths_before", 10))
    assert (answer.status, answer.error["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert len(ingress.bodies) == 1 + 3


@pytest.mark.parametrize("path", [PATH, "/other/v1/chat/completions", "/v1/responses"])
def test_a_stream_that_has_begun_ends_with_an_error(path: str) -> None:
    ingress = Ingress()
    ingress.streams = True
    answer = play(ingress, lambda: setattr(ingress, "deaths_within", 1), path)
    assert len(ingress.bodies) == 2
    assert answer.messages[-1]["more_body"] is False
    *events, last = [message["body"] for message in answer.messages[1:]]
    assert events == EVENTS
    if path == "/v1/responses":
        name, data = last.decode().removesuffix("\n\n").split("\n")
        assert name == "event: error"
        event = ErrorEvent.model_validate_json(data.removeprefix("data: "))
        assert (event.sequence_number, event.code) == (2, "unavailable")
    else:
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "unavailable"


def test_an_answer_that_has_begun_and_is_no_stream_is_broken_off() -> None:
    """Whatever came now would be taken for a part of it."""
    ingress = Ingress()
    answer = play(ingress, lambda: setattr(ingress, "deaths_within", 1))
    assert [message["type"] for message in answer.messages] == ["http.response.start"]


def test_other_applications_are_left_alone() -> None:
    ingress = Ingress()
    answer = play(ingress, lambda: setattr(ingress, "deaths_before", 1), marks=False)
    assert not answer.messages
    assert len(ingress.bodies) == 2


def test_for_a_client_that_has_left_nothing_is_done() -> None:
    ingress = Ingress()
    messages = [{"type": "http.request", "body": b"again", "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    answer = play(ingress, lambda: setattr(ingress, "deaths_before", 1), receive=receive)
    assert not answer.messages
    assert len(ingress.bodies) == 2


def test_paths_that_somebody_makes_up_are_not_kept() -> None:
    async def run() -> None:
        ingress = Ingress()
        ingress.status = 404
        proxy = proxied(ingress)
        assert (await call(proxy, "POST", "/made/up", body=b"hello")).status == 404
        ingress.deaths_before = 1
        assert not (await call(proxy, "POST", "/made/up", body=b"again")).messages
        assert len(ingress.bodies) == 2

    asyncio.run(run())
