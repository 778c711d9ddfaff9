"""TCP links: messages between rank 0 and peers on other machines."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_LENGTH = struct.Struct("<I")
_HELLO = struct.Struct("<32sII")  # token, link, peer
_CHECK_INTERVAL_S = 0.05
_HELLO_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """Address at which rank 0 listens, and the token that peers must send."""

    host: str
    port: int
    token: bytes

    def connect(self, link: int, peer: int) -> SocketReader:
        """A peer's end of a link."""
        connection = socket.create_connection((self.host, self.port), timeout=_HELLO_TIMEOUT_S)
        connection.sendall(_HELLO.pack(self.token, link, peer))
        return SocketReader(connection)


class SocketListener:
    """Rank 0's listening socket."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(_CHECK_INTERVAL_S)
        self.address = SocketAddress(host, self._listener.getsockname()[1], secrets.token_bytes(32))

    def accept(self, num_links: int, num_peers: int, check: Callable[[], None]) -> list[SocketWriter]:
        """Wait for all peers; return rank 0's end of every link.

        Args:
            check: called periodically while waiting; its exception ends the wait.
        """
        connections: dict[tuple[int, int], socket.socket] = {}
        while len(connections) < num_links * num_peers:
            check()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            place = self._read_hello(connection)
            if place is None or place[0] >= num_links or place[1] >= num_peers or place in connections:
                connection.close()
            else:
                connections[place] = connection
        return [SocketWriter([connections[link, p] for p in range(num_peers)], check) for link in range(num_links)]

    def close(self) -> None:
        self._listener.close()

    def _read_hello(self, connection: socket.socket) -> tuple[int, int] | None:
        connection.settimeout(_HELLO_TIMEOUT_S)
        try:
            hello = b""
            while len(hello) < _HELLO.size and (part := connection.recv(_HELLO.size - len(hello))):
                hello += part
            token, link, peer = _HELLO.unpack(hello)
        except (OSError, struct.error):
            return None
        return (link, peer) if hmac.compare_digest(token, self.address.token) else None


class SocketWriter:
    """Rank 0's end of one link, a connection for each peer."""

    def __init__(self, connections: Sequence[socket.socket], check: Callable[[], None]) -> None:
        self._connections = [SocketReader(connection) for connection in connections]
        self._check = check
        self._lock = threading.Lock()

    def post(self, message: bytes, *, answered: bool = False) -> None:
        with self._lock:
            for connection in self._connections:
                connection.send(message, self._check)

    def collect(self) -> list[bytes]:
        replies = []
        for connection in self._connections:
            while (reply := connection.receive(_CHECK_INTERVAL_S)) is None:
                self._check()
            replies.append(reply)
        return replies

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class SocketReader:
    """One connection, at a peer or at rank 0: messages with a length prefix."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()

    def reply(self, answer: bytes) -> None:
        self.send(answer, lambda: None)

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        self._socket.settimeout(_CHECK_INTERVAL_S)
        left = memoryview(_LENGTH.pack(len(message)) + message)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except TimeoutError:
                check()

    def receive(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        while (size := self._size()) is None or len(self._received) < _LENGTH.size + size:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                part = self._socket.recv(1 << 20)
            except TimeoutError:
                return None
            if not part:
                raise EOFError("the connection was closed")
            self._received += part
        message = bytes(self._received[_LENGTH.size : _LENGTH.size + size])
        del self._received[: _LENGTH.size + size]
        return message

    def close(self) -> None:
        self._socket.close()

    def _size(self) -> int | None:
        if len(self._received) < _LENGTH.size:
            return None
        size: int = _LENGTH.unpack_from(self._received)[0]
        return size
