"""Bodies of HTTP requests travel with their heads.

Serve's proxy hands an ingress the head of a request. For the body the ingress calls the proxy, and once more to hear
when the client leaves: both together take as much processor time as everything else that a request costs in Serve's
processes, and the first token waits for the first. So a middleware in the proxy encloses the bodies that are there soon
and not long, and one around the application takes them out. Others come as before.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEY = "folio.body"
# The proxy keeps what was enclosed until the answer ends, and applications that do not take it out get it twice.
_MOST_BYTES = 64 << 10
# A body that takes longer goes its own way, where the guard counts its time.
_WAIT_S = 0.5
# With this header Serve does not cancel the request of a client that leaves: it has to be asked.
_ASKS = b"x-request-disconnect-disabled"


class EnclosesBody:
    """ASGI middleware for Serve's proxies. Requests are handed on as soon as their body is there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _may_be_enclosed(scope):
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        is_whole = False
        try:
            async with asyncio.timeout(_WAIT_S):
                while not is_whole:
                    message = await receive()
                    messages.append(message)
                    if message["type"] == "http.disconnect":
                        return  # there is nobody to answer
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            pass
        if is_whole:
            scope = {**scope, _KEY: b"".join(message.get("body", b"") for message in messages)}

        async def receive_again() -> Message:
            forget_body(scope)  # it is on its way
            return messages.pop(0) if messages else await receive()

        await self._app(scope, receive_again, send)


class TakesEnclosedBody:
    """ASGI middleware for the application in an ingress: `receive` has the body at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_enclosed(scope):
            await self._app(scope, receive, send)
            return
        _do_not_fetch(receive)
        message: Message | None = {"type": "http.request", "body": scope.pop(_KEY), "more_body": False}

        async def receive_enclosed() -> Message:
            nonlocal message
            if message is None:
                return await receive()
            whole, message = message, None
            return whole

        await self._app(scope, receive_enclosed, send)


def is_enclosed(scope: Scope) -> bool:
    """Whether the whole body is there."""
    return _KEY in scope


def forget_body(scope: Scope) -> None:
    """It is not wanted any more."""
    scope.pop(_KEY, None)


def _may_be_enclosed(scope: Scope) -> bool:
    length = b""
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = value
        elif name == _ASKS or name == b"transfer-encoding":
            return False
    return length.isdigit() and len(length) < 19 and 0 < int(length) <= _MOST_BYTES


def _do_not_fetch(receive: Any) -> None:
    """Before anything is awaited: Serve has made the task that will fetch, and it has not begun yet. When the client
    leaves, Serve cancels the request; nobody has to ask. (Private to Serve: without the attribute it fetches.)"""
    if hasattr(receive, "_receive_asgi_messages"):
        receive._receive_asgi_messages = _never


async def _never(_: Any) -> None:
    await asyncio.Event().wait()
