"""Reserving the server's address: any other listener is found."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from folio.app.cli.address import reserve_address, wait_for_listener
from folio.app.errors import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "LOCALHOST:{}", "auto", "ray://10.0.0.9:10001"])
def test_a_cluster_that_may_be_joined(address: str) -> None:
    """At a loopback address, Ray's name for this machine is another one."""
    with socket.create_server(("127.0.0.2", 0)) as listener:
        wait_for_listener(address.format(listener.getsockname()[1]), "127.0.0.2", 0.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def http_server(content: bytes, status: int = 200) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_a_listener_that_shares_its_port() -> None:
    """Regression: Serve's proxies bind with SO_REUSEPORT, so that two servers had half of the requests each."""
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind(("127.0.0.1", 0))
        first.listen()
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:\d+ is in use; stop that server, or choose another port"):
            reserve_address("127.0.0.1", first.getsockname()[1])


def test_two_commands_that_start_at_once() -> None:
    """The second is refused although neither listens yet. Serve's proxy can bind meanwhile."""
    port = free_port()
    reserved = reserve_address("127.0.0.1", port)
    assert reserved is not None
    with reserved:
        with socket.socket() as proxy:
            proxy.bind(("127.0.0.1", port))
        with pytest.raises(ConfigError, match="is reserved by another Folio that is starting"):
            reserve_address("127.0.0.1", port)
    again = reserve_address("127.0.0.1", port)
    assert again is not None
    again.close()


def test_lingering_connections_do_not_count() -> None:
    """A server can be restarted at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()  # this side is the first to close, and waits
            assert client.recv(1) == b""
    reserved = reserve_address("127.0.0.1", port)
    assert reserved is not None
    reserved.close()


@pytest.mark.parametrize(
    ("content", "status", "server"),
    [
        (json.dumps({"data": [{"id": "some-model", "owned_by": "folio"}]}), 200, " by a Folio that serves some-model;"),
        (json.dumps({"data": [{"id": "some-model", "owned_by": "x"}]}), 200, " by another LLM server;"),
        ("{}", 401, " by an HTTP server;"),
        ("hello", 200, " is in use;"),
        ("[]", 200, " is in use;"),
    ],
)
def test_the_server_in_use_is_described(content: str, status: int, server: str) -> None:
    with http_server(content.encode(), status) as port, pytest.raises(ConfigError, match=server):
        reserve_address("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "remedy"),
    [
        ("192.0.2.77", 8000, "choose another with --host"),
        ("a..b", 8000, "choose another with --host"),  # regression: a UnicodeError with its traceback
        ("127.0.0.1", 70000, "choose another port"),
    ],
)
def test_an_unusable_address(host: str, port: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"{host}:{port} is .*{remedy}"):
        reserve_address(host, port)
