"""HAProxy itself with Serve's configuration as the launcher amends it, in front of uvicorn and the steps of Serve's
replica (`as_serve`), without Ray."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray.serve._private.haproxy import BackendConfig
from starlette.types import Message, Receive, Scope, Send

from folio.app.config.http import HttpSettings
from folio.app.edge.guard import Guard
from folio.app.http import haproxy
from tests.app.http.haproxy_front import (
    BACKEND,
    DEADLINE_S,
    GENERATE,
    HURRIED_S,
    OK,
    Application,
    Front,
    backend_of,
    call,
    front,
    grpc_front,
    ingress,
    is_clean,
    peers,
    short_directory,
    written,
)
from tests.hostile.wire import Answer, Connection, Dropped, connected, request
from tests.local_server import LocalServer
from tests.processes import until, until_async

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def application() -> Application:
    return Application()


@pytest.fixture(scope="module")
def guarded(application: Application) -> Guard:
    # Sooner than HAProxy, which answers 400 if a client is silent for that long within a body longer than its buffer.
    return Guard(application, HttpSettings(body_timeout_s=HURRIED_S / 2, log_requests=False))


@pytest.fixture(scope="module")
def behind(guarded: Guard) -> Iterator[int]:
    """The port of the ingress."""
    with ingress(guarded) as port:
        yield port


@pytest.fixture(scope="module")
def usual(behind: int) -> Iterator[Front]:
    with front(backend_of([behind])) as found:
        yield found


@pytest.fixture(scope="module")
def hurried(guarded: Guard) -> Iterator[Front]:
    """With short timeouts and few connections."""
    config = {"timeout_client_s": HURRIED_S, "maxconn": 40}
    with (
        ingress(guarded, most_s=0.1) as behind,
        front(backend_of([behind]), head_timeout_s=HURRIED_S, **config) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalServer]:
    server = LocalServer()
    yield server
    server.close()


def test_streams_come_piece_by_piece(usual: Front, application: Application) -> None:
    """Each piece is made only when the one before it has been read."""

    async def read(connection: Connection) -> Answer:
        await connection.send(request("GET", "/steps"))
        application.step.release()
        return await connection.answer("GET", on_chunk=lambda _: application.step.release())

    assert usual.talk(read).body.startswith(b"aaa{")


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("rudely", [True, False])
def test_a_client_that_leaves_stops_its_request(engine: LocalServer, is_stream: bool, rudely: bool) -> None:
    body = {"model": "builtin", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": is_stream}

    async def leave(connection: Connection) -> None:
        await connection.send(request("POST", "/v1/completions", json.dumps(body).encode()))
        await until_async(lambda: engine.engine.load(most_keys=0).num_running)
        if is_stream:
            assert (await connection.first_bytes()).startswith(b"HTTP/1.1 200 ")
        if rudely:
            connection.reset()

    complete = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                complete.append(scope["path"])
            await send(message)

        await engine.api(scope, receive, note)

    with ingress(noting) as port, front(backend_of([port])) as found:
        found.talk(leave)
        engine.wait_until_idle()
    assert not complete


def test_a_client_that_reads_nothing_is_disconnected(hurried: Front, application: Application) -> None:
    """The server is held back meanwhile, and HAProxy keeps no more than a few buffers."""
    application.num_flooded, num_left, rss = 0, application.num_left, hurried.rss_bytes

    async def ask(connection: Connection) -> None:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(request("GET", "/flood"))
        await until_async(lambda: application.num_left > num_left)

    hurried.talk(ask, receive_buffer_bytes=4096)
    assert application.num_flooded < 32 << 20
    assert hurried.rss_bytes - rss < 16 << 20


def test_an_answer_may_take_longer_than_a_client_may(hurried: Front) -> None:
    """A silent client that waits, for its answer or its next piece, is not one that does not read."""
    answer = hurried.get("/pauses")
    assert (answer.status, answer.body[:2]) == (200, b"a{")


def sent_slowly(found: Front, data: bytes, then: bytes) -> Answer:
    """Part of a request, and then a byte at a time until an answer has come."""

    async def trickle(connection: Connection) -> Answer:
        await connection.send(data)
        answering = asyncio.ensure_future(connection.answer())
        for byte in then:
            if answering.done():
                break
            with suppress(Dropped):
                await connection.send(bytes([byte]))
            await asyncio.wait([answering], timeout=0.1)
        return await answering

    return found.talk(trickle)


def test_a_slow_head(hurried: Front, application: Application) -> None:
    """Serve's configuration waits for an hour. The answer is HAProxy's own, which cannot be changed."""
    count = len(application.scopes)
    assert sent_slowly(hurried, b"POST /slow HTTP/1.1\r\nHost: x\r\nX-Y: ", b"z" * 1000).status == 408
    assert len(application.scopes) == count


def test_slow_bodies(hurried: Front, application: Application) -> None:
    """HAProxy refuses those that fit into a buffer, the guard longer ones."""
    count, long = len(application.scopes), haproxy.BUFFER_BYTES * 4
    for length, sent in ((100, 0), (long, 10), (long, long // 2)):
        raw = request("POST", "/slow", b"x" * length)
        assert is_clean(sent_slowly(hurried, raw[: len(raw) - length + sent], b"z" * 1000), 408)
    assert len(application.scopes) == count


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_still_sends_reads_its_refusal(usual: Front, is_chunked: bool) -> None:
    """The connection is not reset before the answer is read."""
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


def test_a_request_among_idle_connections(usual: Front) -> None:
    """An idle connection costs HAProxy a few KiB."""
    number = 3_000  # opened before the first one has been idle for too long, on slow machines too
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= haproxy.RESERVED_FILES + number:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rss = usual.rss_bytes

    async def crowd() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S * 4):
            for _ in range(number):
                await stack.enter_async_context(connected(usual.port))
            until(lambda: int(usual.info("CurrConns")) >= number)
            victim = await stack.enter_async_context(connected(usual.port))
            await victim.send(request("GET", "/victim"))
            assert (await victim.answer("GET")).json["path"] == "/victim"
            assert usual.rss_bytes - rss < number * 8192

    try:
        asyncio.run(crowd())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_connections_than_there_may_be(hurried: Front) -> None:
    """Connections beyond `maxconn` wait until silent ones are cut without an answer; none is refused."""

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
def test_invalid_http_reaches_no_ingress(usual: Front, application: Application, lines: bytes) -> None:
    """HAProxy's parser answers; its answer cannot be changed."""
    count = len(application.scopes)
    assert usual.exchange(raw_head(lines) + b"0\r\n\r\n").status == 400
    assert len(application.scopes) == count
    assert usual.get("/victim").json["path"] == "/victim"


def test_http_2_is_not_spoken(usual: Front) -> None:
    """HAProxy's default: a hundred requests on a connection, and refusals that clients cannot read."""
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
    """Regression: those that are not UTF-8, or no id, were answered 500 in plain text."""
    for values in (["\xff"], ["good", "\xff"], ["\xff", "good"]):
        lines = "\r\n".join(["GET /x HTTP/1.1", *(f"{name}: {value}" for value in values)])
        answer = usual.exchange(raw_head(lines.encode("latin-1")))
        assert answer.status == 200
        assert b"\xff" not in dict(application.scopes[-1]["headers"]).values()
        assert len(answer.headers["x-request-id"]) == 36
    assert usual.get("/x", x_request_id="mine").headers["x-request-id"] == "mine"
    usual.get("/x", x_session_id="gr\xc3\xbcn")
    assert (b"x-session-id", "grün".encode()) in application.scopes[-1]["headers"]


def test_a_body_with_two_lengths(usual: Front, application: Application) -> None:
    """Chunks decide where the body ends, for HAProxy and uvicorn. What follows is another request of the same client,
    or is dropped; no other client gets its answer."""
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


def test_the_clients_address(application: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trusted proxy's `X-Forwarded-For`, otherwise the connection's address."""
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


def test_the_clients_address_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed, counts in (("127.0.0.1", "8.8.8.8"), ("10.0.0.7", "127.0.0.1")):
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", listed)
        with grpc_front("answers") as (channel, [peer]):
            assert call(channel, GENERATE, x_forwarded_for="8.8.8.8") is grpc.StatusCode.OK
            assert call(channel, GENERATE) is grpc.StatusCode.OK
            assert [seen["x-forwarded-for"] for seen in peer.received()] == [counts, "127.0.0.1"]


def test_names_of_applications_are_not_told_by_grpc() -> None:
    with grpc_front("answers") as (channel, [peer]):
        assert call(channel, "/ray.serve.RayServeAPIService/Healthz") is grpc.StatusCode.OK
        assert call(channel, "/ray.serve.RayServeAPIService/ListApplications") is grpc.StatusCode.UNAUTHENTICATED
        assert not peer.received()


def test_a_call_to_an_ingress_that_dies() -> None:
    """Another ingress gets an idempotent call under the same id, which no client can forge."""
    with grpc_front("dies", "answers") as (channel, [bad, good]):
        while bad.process.poll() is None:
            assert call(channel, GENERATE, **{haproxy.ATTEMPT_HEADER: "forged"}) is grpc.StatusCode.OK
        [lost], others = bad.received(), good.received()
    ids = [seen[haproxy.ATTEMPT_HEADER] for seen in others]
    assert lost[haproxy.ATTEMPT_HEADER] in ids
    assert "forged" not in ids
    assert len(set(ids)) == len(ids)
    with grpc_front("dies", "answers") as (channel, [bad, good]):
        until(lambda: call(channel, "/another.Service/Change") is not grpc.StatusCode.OK)
        assert len(bad.received()) == 1


def test_no_private_pages(usual: Front, application: Application) -> None:
    """The list of applications and the statistics are not public."""
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
    """At the ports of the environment, on this machine only. Regression: HAProxy did not start where a port had been
    taken since the cluster began."""
    text = written(usual.variables, usual.port, backend_of([1])).read_text()
    at_ports, at_sockets = haproxy.amend(text, "/x"), haproxy.amend(text, "/x", sockets=Path("/tmp/x"))
    assert sorted(re.findall(r"^ +bind (.*)$", at_ports, re.MULTILINE)) == sorted(
        ["127.0.0.1:8404", "127.0.0.1:9101", f"127.0.0.1:{usual.port}"]
    )
    assert sorted(re.findall(r"^ +bind (.*)$", at_sockets, re.MULTILINE)) == sorted(
        ["/tmp/x/prometheus.sock mode 600", "/tmp/x/statistics.sock mode 600", f"127.0.0.1:{usual.port}"]
    )


def test_an_ingress_that_dies_without_an_answer() -> None:
    """Another ingress gets a request under the same id if it fits into a buffer and no answer had begun."""
    with peers("hang up", "answer") as (bad, good), front(backend_of([bad.port, good.port])) as found:
        while not bad.heads:
            assert found.exchange(request("POST", "/v1/completions", b"x" * 60_000)).body == b"ok"
        [lost], again = bad.heads, good.heads[-1]
        assert {
            name: lost[name] for name in (haproxy.ATTEMPT_HEADER, "x-request-id", "content-length")
        }.items() <= again.items()
        for path, size in (("/v1/completions", 200_000), ("/x", 1)):  # /x may not be idempotent
            until(lambda: re.search(",UP,.*\n.*,UP,", found.command("show stat")))
            answers = [found.exchange(request("POST", path, b"x" * size)) for _ in range(2)]
            assert sorted(answer.status for answer in answers) == [200, 503]
            assert is_clean(max(answers, key=lambda answer: answer.status), 503)
        ids = [head[haproxy.ATTEMPT_HEADER] for head in good.heads]
        assert len(set(ids)) == len(ids)  # one for each request
        bad.does, asked = "break off", len(bad.heads) + len(good.heads)
        forged = request("POST", "/x", b"x", {haproxy.ATTEMPT_HEADER: "forged"})
        with pytest.raises(Dropped):
            until(lambda: found.exchange(forged).body != b"ok")
        assert len(bad.heads) + len(good.heads) <= asked + 2
        assert all(head[haproxy.ATTEMPT_HEADER] != "forged" for head in (*bad.heads, *good.heads))


def test_an_ingress_that_dies_with_many_connections() -> None:
    """Regression: the retries of its unanswered requests went to its idle connections, until none was left."""

    def ask(_: int) -> bytes:
        return found.exchange(request("POST", "/v1/completions", b"x")).body

    with (
        ThreadPoolExecutor(16) as pool,
        peers("hang", "answer") as (bad, proxy),
        front(backend_of([bad.port], proxy.port)) as found,
    ):
        until(lambda: len(re.findall("^http-folio,[ip].*,UP,", found.command("show stat"), re.MULTILINE)) == 2)
        early = [pool.submit(ask, i) for i in range(16)]
        until(lambda: len(bad.heads) == 16)
        for connection in bad.connections:
            with suppress(OSError):  # a health check's has ended
                connection.sendall(OK)
        assert [answer.result() for answer in early] == [b"ok"] * 16
        late = [pool.submit(ask, i) for i in range(5)]
        until(lambda: len(bad.heads) == 21)
        bad.shutdown()
        bad.server_close()
        for connection in bad.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            time.sleep(0.002)  # as a process that dies on a busy machine
        assert [answer.result() for answer in late] == [b"ok"] * 5
        assert len(proxy.heads) == 5


def test_no_ingress() -> None:
    """503; at once for `/ready`, where Serve's proxy would wait."""
    [dead] = haproxy.free_ports(1)
    with front(backend_of([dead])) as found:
        for path in ("/v1/models", "/ready"):
            assert is_clean(found.get(path), 503)
        assert is_clean(found.exchange(request("POST", "/v1/completions", b"x" * 200_000)), 503)
    with peers("hang") as (proxy,), front(backend_of([dead], proxy.port)) as found:
        until(lambda: re.search("^http-folio,ingress-0,.*,DOWN,", found.command("show stat"), re.MULTILINE))
        assert is_clean(found.get("/ready"), 503)
        assert not proxy.heads
    with peers("answer") as (only,), front(backend_of([only.port])) as found:
        assert found.get("/ready").body == b"ok"


def test_it_ends_with_the_actor_that_started_it(behind: int) -> None:
    """Regression: after a second Ctrl-C it kept the port, and answered 503 for ever. A thread stands for the actor."""
    running = front(backend_of([behind]))
    with ThreadPoolExecutor(1) as actor:
        found = actor.submit(running.__enter__).result()
        assert found.get("/ready").status == 200

    def is_refused() -> bool:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", found.port)):
            return False
        return True

    try:
        until(is_refused)
    finally:
        running.__exit__(None, None, None)


def test_a_large_fleet_behind_many_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: HAProxy reads 64 words a line, and did not start with 16 ingresses."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", ",".join(f"10.0.{i}.1" for i in range(150)))
    [dead] = haproxy.free_ports(1)
    with peers("answer") as (peer,), front(backend_of([dead] * 99 + [peer.port])) as found:
        until(lambda: found.get("/ready").body == b"ok")
        assert found.get("/x").body == b"ok"


def test_ready_is_of_the_application_at_its_path() -> None:
    """Regression: where the one at / was down, no other was ready."""
    [dead] = haproxy.free_ports(1)
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
