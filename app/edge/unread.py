"""The rest of a body that was refused is read before its connection is closed."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Enough for clients that meant well. Who sends more, or slower, may find its connection reset.
_MOST_BYTES, _MOST_S = 64 << 20, 5.0


class ReadsRefusedBodies:
    """ASGI middleware next to the HTTP server. A client that still sends when its connection is closed gets an error of
    its operating system, and never the answer. So where an answer closes it (`connection: close`), the answer's end
    waits until the body is there; nobody gets what comes of it meanwhile."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)

        async def send_when_read(message: Message) -> None:
            if message["type"] == "http.response.start":
                body.is_refused = (b"connection", b"close") in map(tuple, message.get("headers", ()))
            await send(message)  # the client may read it while it sends
            if body.is_refused and message["type"] == "http.response.start":
                await body.read()

        await self._app(scope, body.receive, send_when_read)


class _Body:
    """`is_refused`: what comes of it is thrown away."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._num_bytes = self._num_waiting = 0
        self._ended = asyncio.Event()
        self.is_refused = False

    async def receive(self) -> Message:
        self._num_waiting += 1
        try:
            while True:
                message = await self._receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    self._ended.set()
                    return message
                if not self.is_refused:
                    return message
                self._num_bytes += len(message.get("body", b""))
                if self._num_bytes > _MOST_BYTES:
                    self._ended.set()
                    await asyncio.Event().wait()  # the server stops taking what comes, too
        finally:
            self._num_waiting -= 1

    async def read(self) -> None:
        """Returns when there is no more of it, or more than is read."""
        if self._ended.is_set():
            return
        # Serve reads by itself.
        reading = None if self._num_waiting else asyncio.create_task(self.receive())
        try:
            async with asyncio.timeout(_MOST_S):
                await self._ended.wait()
        except TimeoutError:
            pass
        finally:
            if reading is not None:
                reading.cancel()
