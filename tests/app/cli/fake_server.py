"""A small server of the OpenAI API in a thread, whose answers a test decides."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, Any], Awaitable[web.StreamResponse]]
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text(value: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": value}}])


def usage(prompt: int, output: int, cached: int) -> bytes:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return event(choices=[], usage=counts)


def error(message: str, status: int, kind: str = "invalid_request_error", **headers: str) -> web.Response:
    detail = {"message": message, "type": kind, "param": None, "code": None}
    return web.json_response({"error": detail}, status=status, headers=headers)


async def stream(request: web.Request, *parts: bytes, cut: bool = False) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    if cut:
        assert request.transport is not None
        request.transport.abort()
    return response


@contextmanager
def serving(
    answer: Answer, models: tuple[str, ...] = ("one", "two"), cards: Sequence[Mapping[str, Any]] | None = None
) -> Iterator[str]:
    """The URL of a server that lists these models, or cards, if any, and lets `answer` do the rest, with the request's
    JSON."""
    loop, ready, urls = asyncio.new_event_loop(), threading.Event(), list[str]()

    async def handle(request: web.Request) -> web.StreamResponse:
        if (request.method, request.path) == ("GET", "/v1/models"):
            if not models:
                return error("no such path", 404)
            return web.json_response({"data": cards or [{"id": name} for name in models]})
        return await answer(request, await request.json() if request.can_read_body else None)

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        try:
            await ended.wait()
        finally:
            await runner.cleanup()

    ended = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert ready.wait(60)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60)
        loop.close()
