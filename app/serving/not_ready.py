"""While an application is built, Serve's proxy has no route to it and answers 404. While its ingress starts, the proxy
lets requests wait, also those that ask whether it runs.

A middleware in the proxy makes 503 of both where the path is `/ready`, at once or soon. It does so until something
has been ready, since it knows nothing of what is behind a path, and another application's may take its time.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import UnavailableError
from app.openai.errors import error_headers, error_response

_WAIT_S = 0.3


class AnswersNotReady:
    """ASGI middleware for Serve's proxies. One question waits for the ingress, for all who ask meanwhile: Serve logs
    each that is given up."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_ready = False
        self._asking: asyncio.Future[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_ready or scope["type"] != "http" or not scope["path"].endswith("/ready"):
            await self._app(scope, receive, send)
            return
        if self._asking is not None and not self._asking.done():
            await _refuse(send)
            return
        messages: list[Message] = []

        async def note(message: Message) -> None:
            self._is_ready |= message.get("status") == 200
            messages.append(message)

        self._asking = asyncio.ensure_future(self._app(scope, _Nothing(), note))
        await asyncio.wait((self._asking,), timeout=_WAIT_S)
        if not self._asking.done() or self._asking.exception() or not messages or messages[0].get("status") == 404:
            await _refuse(send)
            return
        for message in messages:
            await send(message)


class _Nothing:
    """`receive` of a request without a body, whose client stays."""

    def __init__(self) -> None:
        self._has_begun = False

    async def __call__(self) -> Message:
        if self._has_begun:
            await asyncio.Event().wait()
        self._has_begun = True
        return {"type": "http.request", "body": b"", "more_body": False}


async def _refuse(send: Send) -> None:
    error = UnavailableError("nothing is ready at this path yet", retry_after_s=1.0)
    status, answer = error_response(error)
    named: dict[str, Any] = {"content-type": "application/json"} | error_headers(error)
    headers = [(name.lower().encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.model_dump_json().encode()})
