"""A call of an ASGI application by this process itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

from starlette.types import ASGIApp, Message

# What the application may send ahead of its reader.
_MOST_AHEAD = 2


def http_scope(method: str, path: str, headers: Iterable[tuple[bytes, bytes]], client: tuple[str, int]) -> Any:
    """Of a request by such a path within the application."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "2",
        "method": method,
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": list(headers),
        "client": client,
        "server": None,
    }


async def asgi_call(
    application: ASGIApp, scope: Any, body: Callable[[], Awaitable[bytes]]
) -> AsyncGenerator[Message, None]:
    """What the application sends, as it comes. Close it to cancel the request.

    Args:
        body: makes it, when the application asks for it: what is refused by its head alone has none.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    room = asyncio.Semaphore(_MOST_AHEAD)
    is_asked = False

    async def receive() -> Message:
        nonlocal is_asked
        if is_asked:
            await asyncio.Event().wait()  # a client that goes away cancels the call
        is_asked = True
        return {"type": "http.request", "body": await body(), "more_body": False}

    async def send(message: Message) -> None:
        await room.acquire()
        messages.put_nowait(message)

    task = asyncio.ensure_future(application(scope, receive, send))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            room.release()
            yield message
    finally:
        task.cancel()
        await asyncio.wait([task])
    await task  # raises what it has raised
