"""Refusals of long bodies through real sockets, while the client still sends."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from folio.app.config.http import HttpSettings
from folio.app.edge import request_body as unread
from folio.app.edge.guard import Guard
from folio.app.edge.request_body import ReadsRefusedBodies
from tests.app.http.haproxy_front import as_serve
from tests.local_server import listening

LONG = 9 << 20


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("the body was not refused")


@pytest.fixture(params=[False, True], ids=["alone", "like Serve"])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    guarded: ASGIApp = Guard(never, HttpSettings(max_body_bytes=1000))
    app: Any = ReadsRefusedBodies(as_serve(guarded) if request.param else guarded)
    with listening(app) as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


def answer_to(address: tuple[str, int], head: bytes, parts: list[bytes]) -> tuple[bytes, Any]:
    """(status line, error code), read after everything has been sent, as most clients do."""
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
        for part in parts:
            client.sendall(part)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    top, _, body = received.partition(b"\r\n\r\n")
    return top.splitlines()[0], json.loads(body)["error"]["code"]


def test_a_client_that_still_sends_reads_its_refusal(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a Python client met EPIPE and never saw the 413."""
    monkeypatch.setattr(unread, "_MAX_DISCARD_S", 3600.0)  # the end of the body is noticed
    length, chunk = b"content-length: %d" % LONG, b"%x\r\n" % (1 << 16) + b"x" * (1 << 16) + b"\r\n"
    status, code = answer_to(address, length, [b"x" * LONG])
    assert (status.split()[1], code) == (b"413", "body_too_large")
    status, code = answer_to(address, b"transfer-encoding: chunked", [chunk] * (LONG >> 16) + [b"0\r\n\r\n"])
    assert (status.split()[1], code) == (b"413", "body_too_large")


def test_endless_bodies_are_not_read_to_their_end(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "_MAX_DISCARDED_BYTES", LONG)
    chunk, sent = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n", 0
    with socket.create_connection(address, timeout=30) as client, contextlib.suppress(ConnectionError):
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            client.sendall(chunk)
            sent += len(chunk)
    assert LONG <= sent < 8 * LONG  # and what the system's buffers hold


def test_slow_bodies_are_not_waited_for(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the client waits for its answer while the server waits for the body."""
    monkeypatch.setattr(unread, "_MAX_DISCARD_S", 0.1)
    assert answer_to(address, b"content-length: %d" % LONG, [b"x"])[1] == "body_too_large"
