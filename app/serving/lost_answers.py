"""When an ingress dies, Serve's proxy has little to say to those whose requests it had: it closes their connections, or
answers with a bare 500.

A middleware in the proxy has the bodies of short requests (`enclosed.py`). So it sends a request again of which nothing
has come yet, to an ingress that lives, and ends a stream that has begun with an error event. It does so for paths only
for which a Folio has answered before, since it knows nothing else of what is behind a path.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import UnavailableError
from app.openai.errors import error_headers, error_response
from app.openai.responses_replies import ErrorEvent
from app.serving.enclosed import forget_body, is_enclosed

_HEADER = b"x-folio-ingress"
# Seconds before a request is sent again. Not more often: it may be what the ingress died of.
_PAUSES_S = (0.25, 1.0)
# Paths of a cluster that are Folio's. Others that somebody makes up are answered, too, but not with 200.
_MOST_PATHS = 1000
# Serve starts another ingress in about this time.
_REPLACED_AFTER_S = 5.0


class AnswersForLost:
    """ASGI middleware for Serve's proxies, next to Serve."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._ours: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_enclosed(scope):
            await self._app(scope, receive, send)
            return
        answer, path = _Answer(scope, receive, send), scope["path"]
        for pause_s in (*_PAUSES_S, None):
            await self._app(answer.next_scope(), answer.receive, answer.send)
            if answer.is_ours and answer.status == 200 and len(self._ours) < _MOST_PATHS:
                self._ours.add(path)
            if answer.begun or answer.left or path not in self._ours:
                break
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        if answer.ended or answer.left or path not in self._ours:
            return
        if not answer.begun:
            await _refuse(send)
        elif answer.is_stream:
            await send({"type": "http.response.body", "body": _last_event(path, answer.num_events), "more_body": False})


class MarksAnswers:
    """ASGI middleware for the application in an ingress: proxies know its answers by this."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (_HEADER, b"1")]}
            await send(message)

        await self._app(scope, receive, send_marked if is_enclosed(scope) else send)


class _Answer:
    """What has come of a request.

    Attributes:
        begun, ended: its answer has.
        left: the client has.
        is_ours: a Folio has answered.
        num_events: of a stream of server-sent events, so far.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._whole, self._last = dict(scope), scope
        self._receive, self._send = receive, send
        self.begun = self.ended = self.left = self.is_ours = self.is_stream = False
        self.status = self.num_events = 0

    def next_scope(self) -> Scope:
        """Of the next attempt; bodies are kept as long as there may be one."""
        forget_body(self._last)
        self._last = dict(self._whole)
        return self._last

    async def receive(self) -> Message:
        forget_body(self._last)  # it is on its way
        message = await self._receive()
        self.left = self.left or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            forget_body(self._whole)
            headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
            self.is_ours = (_HEADER, b"1") in headers
            self.is_stream = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers)
            if self.is_ours:
                kept = [pair for pair in message["headers"] if bytes(pair[0]).lower() != _HEADER]
                message = {**message, "headers": kept}
        else:
            self.ended = not message.get("more_body", False)
            self.num_events += message.get("body", b"").count(b"\n\n")
        await self._send(message)


def _lost() -> UnavailableError:
    return UnavailableError("the ingress that had the request is gone; send it again", _REPLACED_AFTER_S)


async def _refuse(send: Send) -> None:
    error = _lost()
    status, answer = error_response(error)
    named: dict[str, Any] = {"content-type": "application/json"} | error_headers(error)
    headers = [(name.lower().encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.model_dump_json().encode()})


def _last_event(path: str, number: int) -> bytes:
    """As the route would have it (`app/openai/http.py`); the `number` of events before it is that of this one."""
    answer = error_response(_lost())[1]
    if not path.endswith("/v1/responses"):
        return f"data: {answer.model_dump_json()}\n\n".encode()
    detail = answer.error
    event = ErrorEvent(sequence_number=number, code=detail.code, message=detail.message, param=detail.param)
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n".encode()
