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
    """ASGI middleware for Serve's proxies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_ready = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_ready or scope["type"] != "http" or not scope["path"].endswith("/ready"):
            await self._app(scope, receive, send)
            return
        begun, has_route = asyncio.Event(), True

        async def send_and_note(message: Message) -> None:
            nonlocal has_route
            begun.set()
            self._is_ready |= message.get("status") == 200
            has_route &= message.get("status") != 404
            if has_route:
                await send(message)

        answering = asyncio.ensure_future(self._app(scope, receive, send_and_note))
        waiting = asyncio.ensure_future(begun.wait())
        try:
            await asyncio.wait((answering, waiting), timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            if begun.is_set() or answering.done():
                await answering
            if not begun.is_set() or not has_route:
                await _refuse(send)
        finally:
            answering.cancel()
            waiting.cancel()


async def _refuse(send: Send) -> None:
    error = UnavailableError("nothing is ready at this path yet", retry_after_s=1.0)
    status, answer = error_response(error)
    named: dict[str, Any] = {"content-type": "application/json"} | error_headers(error)
    headers = [(name.lower().encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.model_dump_json().encode()})
