"""Bounds of bodies: refusals through real sockets while the client still sends, and bodies read piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from folio.app.config.http import BatchSettings, HttpSettings
from folio.app.edge.guard import Guard
from folio.app.edge.request_body import BodyBounds, ReadsRefusedBodies, limited
from folio.app.http.errors import HttpRefusal
from tests.app.edge.asgi import scope_of
from tests.app.http.haproxy_front import as_serve
from tests.local_server import listening

LONG = 9 << 20


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("the body was not refused")


@contextlib.contextmanager
def refusing(is_like_serve: bool, **bounds: Any) -> Iterator[tuple[str, int]]:
    """The address of a server that refuses long bodies."""
    guarded: ASGIApp = Guard(never, HttpSettings(max_body_bytes=1000))
    app: Any = ReadsRefusedBodies(as_serve(guarded) if is_like_serve else guarded, **bounds)
    with listening(app) as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


either_way = pytest.mark.parametrize("is_like_serve", [False, True], ids=["alone", "like Serve"])


def answer_to(address: tuple[str, int], head: bytes, parts: list[bytes]) -> tuple[bytes, Any]:
    """(status line, error code), read after everything has been sent, as most clients do."""
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
        for part in parts:
            client.sendall(part)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    top, _, body = received.partition(b"\r\n\r\n")
    return top.splitlines()[0], json.loads(body)["error"]["code"]


@either_way
def test_a_client_that_still_sends_reads_its_refusal(is_like_serve: bool) -> None:
    """Regression: a Python client met EPIPE and never saw the 413."""
    length, chunk = b"content-length: %d" % LONG, b"%x\r\n" % (1 << 16) + b"x" * (1 << 16) + b"\r\n"
    chunks = [chunk] * (LONG >> 16) + [b"0\r\n\r\n"]
    with refusing(is_like_serve, most_s=3600.0) as address:  # the end of the body is noticed
        for head, parts in ((length, [b"x" * LONG]), (b"transfer-encoding: chunked", chunks)):
            status, code = answer_to(address, head, parts)
            assert (status.split()[1], code) == (b"413", "body_too_large")


@either_way
def test_endless_bodies_are_not_read_to_their_end(is_like_serve: bool) -> None:
    chunk, sent = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n", 0
    with (
        refusing(is_like_serve, most_bytes=LONG) as address,
        socket.create_connection(address, timeout=30) as client,
        contextlib.suppress(ConnectionError),
    ):
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            client.sendall(chunk)
            sent += len(chunk)
    assert LONG <= sent < 8 * LONG  # and what the system's buffers hold


@either_way
def test_slow_bodies_are_not_waited_for(is_like_serve: bool) -> None:
    """Otherwise the client waits for its answer while the server waits for the body."""
    with refusing(is_like_serve, most_s=0.1) as address:
        assert answer_to(address, b"content-length: %d" % LONG, [b"x"])[1] == "body_too_large"


# ---- bodies that a route reads piece by piece ----


def receiving(*pieces: bytes, pause_s: float = 0.0) -> Receive:
    left = list(pieces)

    async def receive() -> Message:
        await asyncio.sleep(pause_s)
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


async def read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    return body


def test_only_files_are_streamed_and_only_into_a_store(tmp_path: Path) -> None:
    settings = HttpSettings(batches=BatchSettings(store=tmp_path, max_file_bytes=100), max_body_bytes=10)
    assert BodyBounds.of(scope_of("POST", "/v1/files"), settings).is_streamed
    for scope in (
        scope_of("POST", "/v1/files/"),
        scope_of("PUT", "/v1/files"),
        scope_of("POST", "/v1/batches"),
        scope_of("POST", "/v1/chat/completions"),
    ):
        assert BodyBounds.of(scope, settings) == BodyBounds(10, "max_body_bytes")
    without = settings.model_copy(update={"batches": BatchSettings()})
    assert not BodyBounds.of(scope_of("POST", "/v1/files"), without).is_streamed


async def test_a_body_may_be_as_long_as_it_said() -> None:
    for most, is_refused in ((9, False), (8, True)):
        body = limited(receiving(b"abc", b"def", b"ghi"), BodyBounds(most, "batches.max_file_bytes"), 10, 5.0)
        if not is_refused:
            assert await read(body) == b"abcdefghi"
            continue
        with pytest.raises(HttpRefusal) as caught:
            await read(body)
        assert caught.value.status == 413


@pytest.mark.parametrize(("piece", "is_refused"), [(b"x", True), (b"x" * 10, False)])
async def test_a_body_must_keep_a_least_rate(piece: bytes, is_refused: bool) -> None:
    """30 pieces take 0.6 s: too long for 30 bytes at 10 bytes in 0.1 s, but not for 300."""
    receive = limited(receiving(*[piece] * 30, pause_s=0.02), BodyBounds(1000, "batches.max_file_bytes"), 10, 0.1)
    if not is_refused:
        assert len(await read(receive)) == 300
        return
    with pytest.raises(HttpRefusal) as caught:
        await read(receive)
    assert caught.value.status == 408


async def test_the_disconnection_after_a_body_is_waited_for() -> None:
    receive = limited(receiving(b"abc"), BodyBounds(8, "batches.max_file_bytes"), 10, 0.05)
    await read(receive)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(receive(), 0.2)


@pytest.mark.parametrize("store", ["batches", "./batches"])
def test_the_store_is_an_absolute_path(store: str) -> None:
    with pytest.raises(ValueError, match="absolute"):
        BatchSettings(store=Path(store))
