"""Attacks by HTTP and TCP: slow, broken, smuggled, too many."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from folio.app.http.haproxy import HEAD_TIMEOUT_S
from tests.hostile.attacker import DEADLINE_S, Attack, Attacker
from tests.hostile.wire import Dropped, connected, request

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_SMALL = json.dumps({"model": "builtin", "prompt": "x", "max_tokens": 2}).encode()


async def routes(a: Attacker) -> None:
    """Unknown paths and methods, and tricks with known ones."""
    paths = [
        "/", "/v2", "/v1", "/v1/", "//v1/models", "/v1//models", "/v1/models/", "/v1/./models", "/v1/../health",
        "/v1/%2e%2e/health", "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%00", "/v1/models/%ff%fe",
        "/v1/models/" + "x" * 2000,
        "/%",
        "/%zz", "/health%0d%0aX:%20y", "/health?" + "a=b&" * 1000, "/" + "a/" * 3000, "/v1/models?" + "x" * 20_000,
        "/-/routes", "/-/healthz", "/-/nonsense", "/docs", "/openapi.json", "/metrics/x", "/v1/pins/" + "%2f" * 500,
        "/v1/models/%c3%a9", "/v1/chat/completions/../completions", "/V1/MODELS", "/v1/models;x=y", "/v1/models#x",
        "/.env", "/.git/config", "/static/../../../etc/passwd", "/v1/fork", "/v1/embeddings", "/v1/messages",
    ]  # fmt: skip
    for path in paths:
        for method in ("GET", "POST", "DELETE", "HEAD") if a.many(0, 1) else ("GET", "HEAD"):
            await a.send(request(method, path), f"{method} {path[:60]}", method)
    odd = ["OPTIONS", "TRACE", "PUT", "PATCH", "PROPFIND", "HEAD", "GET"]
    for method in odd:
        for path in (_CHAT, "/v1/models", "/health", "/ready", "/v1/pins", "/metrics"):
            await a.send(request(method, path), f"{method} {path}", method)
    # The HTTP parser may refuse these.
    lines = [
        "GET", "GET  /health HTTP/1.1",
        "get /health HTTP/1.1", "GET /health HTTP/9.9", "GET /health", "G\0T / HTTP/1.1",
        "GET http://evil/health HTTP/1.1", "GET * HTTP/1.1", "OPTIONS * HTTP/1.1", "CONNECT evil:443 HTTP/1.1",
        "GET health HTTP/1.1", "GET /h\0ealth HTTP/1.1", "GET /\xe9 HTTP/1.1", "M" * 20_000 + " / HTTP/1.1",
    ]  # fmt: skip
    for line in lines:
        data = f"{line}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode("latin-1")
        await a.send(data, line[:60], is_http=False)
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500
    others = [hello, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 5000, b"\0" * 10_000, b"*1\r\n$4\r\nPING\r\n"]
    for data in others:
        await a.send(data + b"\r\n\r\n", f"{data[:20]!r}", is_http=False, patience_s=0.2)


async def smuggling(a: Attacker) -> None:
    """Bodies with two lengths, and smuggled requests."""
    hidden = b"GET /v1/nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_SMALL), _SMALL)

    def head(*lines: str) -> bytes:
        return "\r\n".join(
            [f"POST {_TEXT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines, "", ""]
        ).encode()

    te, cl = "Transfer-Encoding: chunked", f"Content-Length: {len(_SMALL)}"
    found = [
        head(cl, te) + chunked + hidden,
        head(te, cl) + _SMALL + hidden,
        head("Content-Length: 4", te) + chunked,
        head(cl, f"Content-Length: {len(_SMALL) + 30}") + _SMALL + hidden,
        head(f"Content-Length: {len(_SMALL)}, {len(_SMALL)}") + _SMALL,
        head(f"Content-Length: +{len(_SMALL)}") + _SMALL,
        head(f"Content-Length: -{len(_SMALL)}") + _SMALL,
        head(f"Content-Length: 0x{len(_SMALL):x}") + _SMALL,
        head("Content-Length: 99999999999999999999") + _SMALL,
        head("Content-Length: ") + _SMALL,
        head("Transfer-Encoding: xchunked") + chunked,
        head("Transfer-Encoding: chunked, identity") + chunked,
        head("Transfer-Encoding: \x0bchunked") + chunked,
        head("Transfer-Encoding : chunked") + chunked,
        head("Transfer-Encoding: chunked", "Transfer-Encoding: x") + chunked,
        head("transfer-encoding:\tchunked") + chunked,
        head("X: y\r\n Transfer-Encoding: chunked") + chunked,
        head(te) + b"-1\r\nx\r\n0\r\n\r\n",
        head(te) + b"ffffffffffffffffff\r\nx",
        head(te) + b"0" * 100_000 + b"1\r\nx\r\n0\r\n\r\n",
        head(te) + b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(_SMALL), b"x=y;" * 20_000, _SMALL),
        head(te) + chunked[:-2] + b"X: trailer\r\nContent-Length: 5\r\n\r\n" + hidden,
        head(te) + b"%x\n%s\n0\n\n" % (len(_SMALL), _SMALL),
        head(te) + b"".join(b"1\r\n%c\r\n" % byte for byte in _SMALL) + b"0\r\n\r\n",
    ]
    await a.all(
        a.send(data, f"smuggling {i % len(found)}", is_http=False) for i, data in enumerate(found * a.many(1, 20))
    )


async def pipelining(a: Attacker) -> None:
    """Pipelined requests: as many answers, in order."""
    count = a.many(50, 2000)
    async with asyncio.timeout(DEADLINE_S), connected(a.port) as connection:
        alive = {"Connection": "keep-alive"}
        paths = ["/v1/models", "/nowhere", "/v1/models/builtin", "/health"]
        raw = b"".join(request("GET", paths[i % 4], headers=alive) for i in range(count))
        sending = asyncio.ensure_future(connection.send(raw))
        try:
            for i in range(count):
                a.record.num_made += 1
                answer = await connection.answer("GET")
                a.judge(answer, f"pipelined {i}")
                if answer.status != (404 if i % 4 == 1 else 200):
                    a.note(f"the answer number {i} is another request's: {answer.status}")
        except Dropped as error:
            a.note(f"pipelining: dropped {error}")
        await asyncio.gather(sending, return_exceptions=True)


async def headers(a: Attacker) -> None:
    """Headers: too many, too long, forged, with invalid characters."""
    long = [
        {f"X-{i}": "y" for i in range(10_000)},
        {f"X-{i}": "y" for i in range(150)},
        {"X": "y" * (1 << 20)},
        {"X": "y" * 40_000},
        {"Cookie": "; ".join(f"c{i}=v" for i in range(3000))},
    ]
    for more in long:
        await a.send(request("POST", _TEXT, _SMALL, more), f"headers {str(more)[:40]}", is_http=False)
    forged = [
        "8.8.8.8",
        "127.0.0.1", "::1", "unknown", "x" * 5000, "8.8.8.8, 9.9.9.9, 10.0.0.1", ",,,,", "\xff", "1.2.3.4:99999",
        "[::1]:80", "' OR 1=1", "127.0.0.1" * 200,
    ]  # fmt: skip
    names = [
        "X-Forwarded-For",
        "X-Real-IP",
        "Forwarded",
        "X-Forwarded-Proto",
        "X-Forwarded-Host",
        "X-Client-IP",
        "Host",
    ]
    await a.all(
        a.post(_TEXT, _SMALL, f"{name}: {value[:40]}", headers={name: value})
        for name in names
        for value in forged[:: a.many(3, 1)]
    )
    odd = {
        "X-Request-Id": ["x" * 5000, "a b"],
        "X-Session-Id": ["x" * 30_000, "\xff"],
        "Authorization": ["Bearer ", "Basic " + "x" * 9000],
        "X-API-Key": ["\xe9"],
        "Accept": ["x" * 9000],
        "Accept-Encoding": ["gzip, br, *;q=0"],
        "Origin": ["null", "http://evil"],
        "Range": ["bytes=0-1"],
        "If-None-Match": ["*"],
        "serve_multiplexed_model_id": ["x"],
        "X-HTTP-Method-Override": ["DELETE"],
        "Expect": ["nonsense"],
        "TE": ["trailers"],
        "Connection": ["close, X-Request-Id"],
    }
    for name, values in odd.items():
        await a.all(a.post(_TEXT, _SMALL, f"{name}: {value[:40]}", headers={name: value}) for value in values)
    socket = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    raw = [
        b"Host",
        b" x: y", b"X: a\0b", b"X: a\x7f", b"X-Request-Id: \x01",
        b"X y: z", b"\xff: x", b"X: y\r\n z", b"Content-Length: 5\x00",
        socket + b"Upgrade: websocket\r\nConnection: Upgrade",
        b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings",
    ]  # fmt: skip
    for line in raw:
        await a.send(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n%s\r\nConnection: close\r\n\r\n" % line,
            f"{line[:30]!r}",
            is_http=False,
        )
    answer = await a.post(_TEXT, _SMALL, "100-continue", headers={"Expect": "100-continue"})
    if answer is not None and answer.status != 200:
        a.note(f"100-continue: {answer.status}")


async def slow(a: Attacker) -> None:
    """Heads and bodies that come a byte at a time, or stop in the middle.

    Bodies must be refused in time; heads are a proxy's business and must only not block others."""
    num_heads, num_bodies = a.many(100, 500), a.many(40, 200)
    raw = request("POST", _CHAT, b"{" + b" " * 5000)

    async def head() -> None:
        async with connected(a.port) as connection:
            start = time.monotonic()
            try:
                for byte in raw[: a.many(10, 100)]:
                    await connection.send(bytes([byte]))
                    await asyncio.sleep(0.2)
            except Dropped:  # HAProxy waits for a head for this time only
                if time.monotonic() - start < HEAD_TIMEOUT_S - 1:
                    a.note("a slow head: dropped too soon")
            a.left()

    async def body() -> None:
        a.record.num_made += 1
        end = raw.index(b"\r\n\r\n") + 4
        try:
            async with asyncio.timeout(DEADLINE_S), connected(a.port) as connection:
                await connection.send(raw[:end])
                answering = asyncio.ensure_future(connection.answer())
                for byte in raw[end:]:
                    if answering.done():
                        break
                    await connection.send(bytes([byte]))
                    await asyncio.wait([answering], timeout=0.25)
                answer = await answering
        except Dropped as error:
            a.note(f"a slow body: dropped {error}")
            return
        except TimeoutError:
            a.note("a slow body: no answer")
            return
        a.judge(answer, "a slow body")
        if answer.status != 408:
            a.note(f"a slow body: {answer.status} instead of 408")

    await a.all(
        [*(head() for _ in range(num_heads)), *(body() for _ in range(num_bodies))], at_once=num_heads + num_bodies
    )


async def half_closed(a: Attacker) -> None:
    """Clients that close their side before the answer, or before any request."""
    long: dict[str, Any] = {"model": "builtin", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    raw = request("POST", _TEXT, json.dumps(long).encode())
    cuts = [0, 10, len(raw) // 2, len(raw) - 1, len(raw)]

    async def one(cut: int) -> None:
        async with connected(a.port) as connection:
            await connection.send(raw[:cut])
            connection.half_close()
            a.left()
            # An answer or nothing, but an end.
            try:
                async with asyncio.timeout(DEADLINE_S):
                    while await connection.reader.read(1 << 16):
                        pass
            except ConnectionError:
                pass
            except TimeoutError:
                a.note(f"half-closed after {cut} bytes: the connection stays open")

    await a.all(one(cut) for cut in cuts * a.many(6, 60))


async def idle(a: Attacker) -> None:
    """Idle connections."""
    count = a.many(400, 4000)
    ready, release = asyncio.Semaphore(0), asyncio.Event()

    async def one() -> None:
        async with connected(a.port):
            a.left()
            ready.release()
            await release.wait()

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    for _ in range(count):
        await ready.acquire()
    try:
        for _ in range(10):
            await a.post(_TEXT, _SMALL, f"beside {count} idle connections")
    finally:
        release.set()
        await asyncio.gather(*tasks)


ATTACKS: dict[str, Attack] = {
    "routes": routes,
    "smuggling": smuggling,
    "pipelining": pipelining,
    "headers": headers,
    "slow": slow,
    "half-closed": half_closed,
    "idle": idle,
}
