"""While no ingress runs, Serve's proxy lets every request wait for one, also those that ask whether it does.

A middleware in the proxy answers `/ready` for it: 503, unless there is an answer soon. It does so until something
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
        begun = asyncio.Event()

        async def send_and_note(message: Message) -> None:
            begun.set()
            self._is_ready |= message.get("status") == 200
            await send(message)

        answering = asyncio.ensure_future(self._app(scope, receive, send_and_note))
        waiting = asyncio.ensure_future(begun.wait())
        try:
            await asyncio.wait((answering, waiting), timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            if begun.is_set() or answering.done():
                await answering
            else:
                await _refuse(send)
        finally:
            answering.cancel()
            waiting.cancel()


async def _refuse(send: Send) -> None:
    error = UnavailableError("the server is starting", retry_after_s=1.0)
    status, answer = error_response(error)
    named: dict[str, Any] = {"content-type": "application/json"} | error_headers(error)
    headers = [(name.lower().encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.model_dump_json().encode()})
