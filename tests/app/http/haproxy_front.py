"""HAProxy with Serve's configuration for tests, clients of it, and scripted ingresses behind it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
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
from starlette.types import ASGIApp, Receive, Scope, Send

from folio.app.edge.request_body import ReadsRefusedBodies
from folio.app.http import haproxy
from tests.hostile.wire import Answer, Connection, connected, request
from tests.local_server import listening
from tests.processes import until, until_async

T = TypeVar("T")
DEADLINE_S = 30.0
BACKEND = "http-folio"
GENERATE = "/folio.v1.Folio/Generate"
# In place of 10 s for a head and 60 s for a silent client.
HURRIED_S = 1


def config_of(variables: dict[str, str], port: int, **changed: Any) -> HAProxyConfig:
    """Serve's configuration in a process with these variables, once it knows the applications."""
    prefix = "RAY_SERVE_HAPROXY_"
    named = {name.removeprefix(prefix).lower(): value for name, value in variables.items() if name.startswith(prefix)}
    named["bufsize"] = named.pop("tune_bufsize")
    fields = {field.name for field in dataclasses.fields(HAProxyConfig)}
    values: dict[str, Any] = {
        name: int(value) if value.isdigit() else value for name, value in named.items() if name in fields
    }
    values["metrics_enabled"] = False
    http = HTTPOptions(host="127.0.0.1", port=port)
    known = {"http_options": http, "has_received_routes": True, "has_received_servers": True}
    return HAProxyConfig(**(values | known | changed))


def written(variables: dict[str, str], port: int, *backends: BackendConfig, **changed: Any) -> Path:
    """The configuration file, by Serve's template."""
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
    """A running HAProxy."""

    port: int
    pid: int
    variables: dict[str, str]

    def talk(self, script: Callable[[Connection], Awaitable[T]], **options: Any) -> T:
        """Run a script on a connection of its own."""

        async def run() -> T:
            async with asyncio.timeout(DEADLINE_S), connected(self.port, **options) as connection:
                return await script(connection)

        return asyncio.run(run())

    def exchange(self, data: bytes, method: str = "GET") -> Answer:
        """Send bytes and read the answer. Raises `Dropped`."""

        async def script(connection: Connection) -> Answer:
            await connection.send(data)
            return await connection.answer(method)

        return self.talk(script)

    def get(self, path: str, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.exchange(request("GET", path, headers=named))

    def command(self, text: str) -> str:
        """HAProxy's answer on its admin socket."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(self.variables["RAY_SERVE_HAPROXY_SOCKET_PATH"])
            admin.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()

    def info(self, name: str) -> str:
        return re.findall(rf"^{name}: (.*)$", self.command("show info"), re.MULTILINE)[0]

    @property
    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def short_directory() -> Iterator[Path]:
    """A path short enough for Unix sockets below it."""
    directory = Path(tempfile.mkdtemp(prefix="folio-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def front(*backends: BackendConfig, head_timeout_s: int | None = None, **changed: Any) -> Iterator[Front]:
    """HAProxy, started as Serve starts it. `head_timeout_s`: in place of `HEAD_TIMEOUT_S`; `changed`: fields of Serve's
    `HAProxyConfig`."""
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
        [port] = haproxy.free_ports(1)
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
            until(answers, DEADLINE_S, lambda: "HAProxy does not start")
            yield found
        finally:
            process.kill()
            process.wait()


def as_serve(app: ASGIApp) -> ASGIApp:
    """The steps of Serve's replica around an application, for requests that come to it directly."""

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
    """Answers by path and keeps the scopes of requests.

    Attributes:
        step: lets `/steps` send its next piece.
        num_flooded: bytes of `/flood` that the server has taken.
        num_left: requests that were cancelled.
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
                await until_async(lambda: self.step.acquire(blocking=False))  # by a test in another thread
                await send({"type": "http.response.body", "body": b"a", "more_body": True})
        elif path == "/flood":
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                self.num_flooded += 65536
                await asyncio.sleep(0)  # for the server to notice a disconnection, after which it never waits
        elif path == "/pauses":
            await asyncio.sleep(2 * HURRIED_S)
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await asyncio.sleep(2 * HURRIED_S)
        seen = {"path": path, "client": scope["client"][0], "scheme": scope["scheme"], "bytes": len(body)}
        await send({"type": "http.response.body", "body": json.dumps(seen).encode()})


@contextmanager
def ingress(app: ASGIApp, **bounds: Any) -> Iterator[int]:
    """Serve an application as an ingress; gives its port. `bounds`: on reading a refused body."""
    with listening(as_serve(ReadsRefusedBodies(app, **bounds))) as url:  # type: ignore[arg-type]
        yield int(url.rpartition(":")[2])


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Peer(socketserver.ThreadingTCPServer):
    """A scripted ingress that keeps its connections and the heads of its requests. `does`: "answer", "hang up" without
    an answer, "break off" in the middle of one, or "hang"."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 100

    def __init__(self, does: str) -> None:
        super().__init__(("127.0.0.1", 0), _Talk)
        self.does = does
        self.heads: list[dict[str, str]] = []
        self.connections: list[socket.socket] = []
        self.port: int = self.server_address[1]


class _Talk(socketserver.StreamRequestHandler):
    server: Peer

    def handle(self) -> None:
        self.server.connections.append(self.connection)
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
            self.wfile.write(OK)
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
    """Whether an answer has this status; checks that it is OpenAI's error JSON."""
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"].startswith("application/json")
    assert (status != 503) or int(answer.headers["retry-after"]) > 0
    return answer.status == status


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

    def received(self) -> list[dict[str, str]]:
        """Metadata of all calls so far. Ends the process."""
        self.process.kill()
        return [json.loads(line) for line in self.process.communicate()[0].splitlines()]


@contextmanager
def grpc_front(*kinds: str) -> Iterator[tuple[grpc.Channel, list[GrpcPeer]]]:
    """A client's channel to HAProxy, and the ingresses behind it."""
    found = [GrpcPeer(does) for does in kinds]
    [http_port, port] = haproxy.free_ports(2)
    servers = [ServerConfig(f"ingress-{i}", "127.0.0.1", peer.port) for i, peer in enumerate(found)]
    backend = BackendConfig("grpc-folio", "/", servers=servers, app_name="folio", protocol=RequestProtocol.GRPC)
    functions = ["folio.app.proto.folio_pb2_grpc.add_FolioServicer_to_server"]
    options = gRPCOptions(port=port, grpc_servicer_functions=functions)
    try:
        with front(backend_of([http_port]), backend, grpc_options=options) as haproxy_:
            up = re.compile("^grpc-folio,ingress-.*,UP,", re.MULTILINE)
            until(lambda: len(up.findall(haproxy_.command("show stat"))) == len(kinds))
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
