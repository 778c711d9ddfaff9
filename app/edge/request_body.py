"""How a request arrives: its headers and its body, within limits.

The rest of a body that was refused is read before its connection is closed.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.config.http import HttpSettings
from app.haproxy import ATTEMPT_HEADER, REQUEST_ID
from app.http_errors import HttpRefusal

_REQUEST_ID = re.compile(REQUEST_ID.encode())
_LENGTH = re.compile(rb"[0-9]{1,18}")
_ATTEMPT = ATTEMPT_HEADER.encode()
_WANTED = {b"x-request-id", b"authorization", b"x-api-key", b"content-length", b"transfer-encoding", _ATTEMPT}
_NO_BODY = {"GET", "HEAD", "OPTIONS"}


class ClientGone(Exception):
    """The client has left before it had sent everything."""


@dataclass(frozen=True, slots=True)
class Head:
    """What the guard wants of the headers. `attempt_of`: names all attempts of HAProxy to have this request answered;
    `None` without HAProxy. `key`: the one presented. `has_body`: or may have one."""

    request_id: str
    attempt_of: str | None
    key: str | None
    content_length: bytes | None
    has_body: bool


def read_head(scope: Scope) -> Head:
    """Of the first header of each name. It never fails, so that every answer has a request id."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in _WANTED:
            found.setdefault(name, value)
    given = found.get(b"x-request-id", b"")
    scheme, _, key = found.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = found.get(b"x-api-key", b"")
    length = found.get(b"content-length")
    attempt_of = found.get(_ATTEMPT, b"")
    return Head(
        request_id=given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex,
        attempt_of=attempt_of.decode() if _REQUEST_ID.fullmatch(attempt_of) else None,
        key=key.strip().decode("latin-1") or None,
        content_length=length,
        has_body=scope["method"] not in _NO_BODY or length is not None or b"transfer-encoding" in found,
    )


def check_size(scope: Scope, head: Head, settings: HttpSettings) -> None:
    """Raises `Refusal` when there is too much in it, or will be."""
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > settings.max_url_bytes:
        raise HttpRefusal.too_large(414, "path and query", settings.max_url_bytes, "bytes")
    headers = scope["headers"]
    if len(headers) > settings.max_headers:
        raise HttpRefusal.too_large(431, "a request", settings.max_headers, "headers")
    if sum(len(name) + len(value) for name, value in headers) > settings.max_header_bytes:
        raise HttpRefusal.too_large(431, "the headers of a request", settings.max_header_bytes, "bytes")
    if head.content_length is not None:
        if not _LENGTH.fullmatch(head.content_length):
            raise HttpRefusal.bad_length()
        if int(head.content_length) > settings.max_body_bytes:
            raise HttpRefusal.too_large(413, "a body", settings.max_body_bytes, "bytes")


async def read_body(receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Routes want it whole anyway, and so it is refused before they see anything of it.

    Raises:
        Refusal: it is too long, or takes too long.
        ClientGone: the client has left.
    """
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise HttpRefusal.too_large(413, "a body", max_bytes, "bytes")
                if chunk:
                    chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise HttpRefusal.too_slow(timeout_s) from None


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that has the body in one message, and then what comes after it."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def receive_whole() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None  # which the application may keep alone
        return message

    return receive_whole


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
