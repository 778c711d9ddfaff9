"""Head and body of a request: read within limits, and the rest of refused bodies discarded."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from folio.app.config.http import HttpSettings
from folio.app.edge.compression import decompressed, known_codings
from folio.app.http.errors import HttpRefusal
from folio.app.http.haproxy import ATTEMPT_HEADER, REQUEST_ID

_REQUEST_ID = re.compile(REQUEST_ID.encode())
_LENGTH = re.compile(rb"[0-9]{1,18}")
_ATTEMPT = ATTEMPT_HEADER.encode()
_READ_HEADERS = {
    b"x-request-id",
    b"authorization",
    b"x-api-key",
    b"content-length",
    b"content-encoding",
    b"transfer-encoding",
    _ATTEMPT,
}
_WITHOUT_BODY = {"GET", "HEAD", "OPTIONS"}
# Room for a form's fields and boundaries beside its file.
_FORM_BYTES = 64 << 10
# Bounds on reading a refused body, ample for honest clients. Others may find their connection reset.
_MAX_DISCARDED_BYTES, _MAX_DISCARD_S = 64 << 20, 5.0


@dataclass(frozen=True, slots=True)
class Head:
    """Headers that the guard reads.

    Attributes:
        attempt_of: names all of HAProxy's attempts at this request; `None` without HAProxy.
        key: as presented.
        coding: of the body (`Content-Encoding`), in lower case; empty: none.
        has_body: the request may have a body.
    """

    request_id: str
    attempt_of: str | None
    key: str | None
    content_length: bytes | None
    coding: str
    has_body: bool


def read_head(scope: Scope) -> Head:
    """Read the first header of each name. Never fails, so that every answer has a request id."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in _READ_HEADERS:
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
        coding=found.get(b"content-encoding", b"").strip().lower().decode("latin-1"),
        has_body=scope["method"] not in _WITHOUT_BODY or length is not None or b"transfer-encoding" in found,
    )


def path_of(scope: Scope) -> str:
    """The path within the application, which may be mounted below another path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """Bounds of one request's body.

    Attributes:
        setting: name of the setting that bounds its size.
        is_streamed: the route reads the body piece by piece (`limited`), instead of all of it before the route.
    """

    max_bytes: int
    setting: str
    is_streamed: bool = False

    @staticmethod
    def of(scope: Scope, settings: HttpSettings) -> BodyBounds:
        batches = settings.batches
        if batches.store is not None and scope["method"] == "POST" and path_of(scope) == "/v1/files":
            return BodyBounds(batches.max_file_bytes + _FORM_BYTES, "batches.max_file_bytes", is_streamed=True)
        return BodyBounds(settings.max_body_bytes, "max_body_bytes")

    def too_large(self) -> HttpRefusal:
        bound = self.max_bytes - _FORM_BYTES if self.is_streamed else self.max_bytes
        return HttpRefusal.of_unread(413, f"the body is too long ({self.setting}={bound}); shorten it")


def check_size(scope: Scope, head: Head, settings: HttpSettings) -> None:
    """Raise `HttpRefusal` if URL, headers or announced body are too large."""
    num_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if num_bytes > (most := settings.max_url_bytes):
        raise HttpRefusal.of_unread(414, f"path and query have {num_bytes} bytes (max_url_bytes={most}); shorten them")
    headers = scope["headers"]
    if len(headers) > (most := settings.max_headers):
        raise HttpRefusal.of_unread(431, f"the request has {len(headers)} headers (max_headers={most}); send fewer")
    num_bytes = sum(len(name) + len(value) for name, value in headers)
    if num_bytes > (most := settings.max_header_bytes):
        raise HttpRefusal.of_unread(431, f"the headers have {num_bytes} bytes (max_header_bytes={most}); shorten them")
    if head.content_length is not None:
        if not _LENGTH.fullmatch(head.content_length):
            raise HttpRefusal.of_unread(
                400, "Content-Length is not a number of bytes; send the body's length in decimal digits"
            )
        if int(head.content_length) > (bounds := BodyBounds.of(scope, settings)).max_bytes:
            raise bounds.too_large()


def check_coding(coding: str, bounds: BodyBounds) -> None:
    """Raise `HttpRefusal` for a body in a coding that is not read here."""
    known = () if bounds.is_streamed else known_codings()
    if coding and coding not in ("identity", *known):
        use = f"use {', '.join(known)}, or none" if known else "send the body uncompressed"
        refusal = HttpRefusal.of_unread(415, f"Content-Encoding {coding[:100]!r} is not supported here; {use}")
        refusal.headers.append((b"accept-encoding", ", ".join(known or ("identity",)).encode()))
        raise refusal


async def read_body(scope: Scope, receive: Receive, bounds: BodyBounds, timeout_s: float, coding: str = "") -> bytes:
    """The whole body, decompressed, so that a refusal comes before any route sees a part of it.

    Raises:
        HttpRefusal: the body is too long, compressed or not, takes too long, or is broken.
        ClientDisconnect: the client has left.
    """
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in Request(scope, receive).stream():
                num_bytes += len(chunk)
                if num_bytes > bounds.max_bytes:
                    raise bounds.too_large()
                chunks.append(chunk)
    except TimeoutError:
        raise _too_slow(timeout_s) from None
    body = b"".join(chunks)
    if not coding or coding == "identity":
        return body
    try:
        return await asyncio.to_thread(decompressed, body, coding, bounds.max_bytes)
    except ValueError as error:
        raise HttpRefusal.of_unread(400, f"the body is not valid {coding}: {error}") from None
    except OverflowError:
        raise bounds.too_large() from None


def limited(receive: Receive, bounds: BodyBounds, bytes_per_timeout: int, timeout_s: float) -> Receive:
    """A `receive` that raises `HttpRefusal` for a body that is too long, or takes longer than `timeout_s` for each
    `bytes_per_timeout` of it."""
    begun_at = time.monotonic()
    num_bytes = 0
    has_ended = False

    async def receive_within_limits() -> Message:
        nonlocal num_bytes, has_ended
        if has_ended:
            return await receive()  # waits for the disconnection
        left_s = begun_at + timeout_s * (1 + num_bytes // bytes_per_timeout) - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError:
            raise _too_slow(timeout_s) from None
        num_bytes += len(message.get("body", b""))
        has_ended = not message.get("more_body", False)
        if num_bytes > bounds.max_bytes:
            raise bounds.too_large()
        return message

    return receive_within_limits


def _too_slow(timeout_s: float) -> HttpRefusal:
    return HttpRefusal.of_unread(
        408, f"the body has not arrived in time (body_timeout_s={timeout_s:g}); send the request again"
    )


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body in one message and then what `receive` gives."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def receive_body_first() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None  # keep no reference to the body
        return message

    return receive_body_first


class ReadsRefusedBodies:
    """ASGI middleware next to the HTTP server: read a refused body before its connection is closed.

    A client that still sends when its connection is closed gets an error of its operating system instead of the answer.
    An answer that closes the connection (`connection: close`) therefore ends only when the body has been read; the
    application gets none of it.

    Args:
        upload_bytes: of the longest body that honest clients may send, if files can be uploaded.
        most_bytes, most_s: bounds on reading a body.
    """

    def __init__(
        self,
        app: ASGIApp,
        upload_bytes: int = 0,
        most_bytes: int = _MAX_DISCARDED_BYTES,
        most_s: float = _MAX_DISCARD_S,
    ) -> None:
        self._app, self._most_bytes, self._most_s = app, max(most_bytes, upload_bytes), most_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._most_bytes, self._most_s)

        async def send_after_body(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start:
                body.is_refused = (b"connection", b"close") in map(tuple, message.get("headers", ()))
            await send(message)  # before the body is read: a client may read the answer while it sends
            if is_start and body.is_refused:
                await body.discard()

        await self._app(scope, body.receive, send_after_body)


class _Body:
    """The body of one request. `is_refused`: what arrives is discarded."""

    def __init__(self, receive: Receive, max_bytes: int, max_s: float) -> None:
        self._receive = receive
        self._max_bytes, self._max_s = max_bytes, max_s
        self._num_bytes = self._num_receiving = 0
        self._ended = asyncio.Event()
        self.is_refused = False

    async def receive(self) -> Message:
        self._num_receiving += 1
        try:
            while True:
                message = await self._receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    self._ended.set()
                    return message
                if not self.is_refused:
                    return message
                self._num_bytes += len(message.get("body", b""))
                if self._num_bytes > self._max_bytes:
                    self._ended.set()
                    await asyncio.Event().wait()  # the server stops reading, too
        finally:
            self._num_receiving -= 1

    async def discard(self) -> None:
        """Read until the body ends, or its bounds are reached."""
        if self._ended.is_set():
            return
        # Serve has a task that receives.
        receiving = None if self._num_receiving else asyncio.create_task(self.receive())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._max_s):
                    await self._ended.wait()
        finally:
            if receiving is not None:
                receiving.cancel()
