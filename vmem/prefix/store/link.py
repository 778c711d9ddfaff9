"""Links between processes that hand over prefixes: a Unix socket to a process of the same user, which also passes
memory, or a TCP connection to one that knows a key.

A message is its length and its bytes. Over TCP a keyed checksum follows, whose key comes from the giver's key and from
random numbers of both ends: what is damaged, repeated, left out, or of anyone else raises `ConnectionError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Bounds of the wait for the other process, for all of a message, and of a message.
_CONNECT_S, _MESSAGE_S = 1.0, 5.0
_MOST_BYTES = 16 << 20

_LENGTH = struct.Struct("<Q")
_NONCE_BYTES, _CHECK_BYTES = 16, 16


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process gives its prefixes.

    Attributes:
        name: of its Unix socket, in the machine's abstract namespace.
        host, port, key: of its TCP socket; empty: it has none.
    """

    name: str
    host: str = ""
    port: int = 0
    key: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.name} {self.host} {self.port} {self.key}" if self.host else self.name

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises `ValueError`."""
        name, *remote = text.split(" ")
        if not remote:
            return cls(name)
        host, port, key = remote
        return cls(name, host, int(port), key)


class Link:
    """One end of a connection. Every method raises `OSError`."""

    def __init__(self, connection: socket.socket, key: str = "", *, gives: bool, message_s: float = _MESSAGE_S) -> None:
        """Args: `key`: of a TCP connection. `gives`: this is the giver's end. `message_s`: bound of waits for the other
        process."""
        self._connection, self._message_s = connection, message_s
        self._keys: tuple[bytes, bytes] | None = None  # to send with, and to receive with
        self._num_sent = self._num_received = 0
        if key:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(message_s)
            own = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(own)
            other = self._read(bytearray(_NONCE_BYTES))
            nonces = own + other if gives else other + own
            of_giver, of_receiver = (
                hashlib.blake2b(nonces + end, key=bytes.fromhex(key), digest_size=32).digest() for end in (b"g", b"r")
            )
            self._keys = (of_giver, of_receiver) if gives else (of_receiver, of_giver)

    @property
    def is_remote(self) -> bool:
        return self._keys is not None

    def send(self, content: bytes | bytearray | memoryview) -> None:
        self._connection.settimeout(self._message_s)
        self._connection.sendall(_LENGTH.pack(len(content)))
        if content:  # else the other end may have gone
            self._connection.sendall(content)
        if self._keys is not None:
            self._connection.sendall(_check(self._keys[0], self._num_sent, content))
        self._num_sent += 1

    def send_json(self, message: dict[str, Any]) -> None:
        self.send(json.dumps(message).encode())

    def receive(self) -> bytes:
        """A message of at most `_MOST_BYTES`."""
        [length] = _LENGTH.unpack(self._read(bytearray(_LENGTH.size)))
        if length > _MOST_BYTES:
            raise ConnectionError("the message is too long")
        content = bytearray(length)
        self._finish(content)
        return bytes(content)

    def receive_json(self) -> Any:
        """Raises `ValueError`, too."""
        return json.loads(self.receive())

    def receive_into(self, content: memoryview) -> None:
        """A message of exactly this length."""
        if _LENGTH.unpack(self._read(bytearray(_LENGTH.size))) != (len(content),):
            raise ConnectionError("a message of another length")
        self._finish(content)

    def send_fds(self, fds: Sequence[int]) -> None:
        """At most 253, and too few for the system's limit on those that have not been received."""
        self._connection.settimeout(self._message_s)
        socket.send_fds(self._connection, [b"\0"], fds)

    def receive_fds(self, count: int) -> list[int]:
        """So many descriptors, which the caller closes."""
        self._connection.settimeout(self._message_s)
        _, fds, _, _ = socket.recv_fds(self._connection, 1, count, socket.MSG_CMSG_CLOEXEC)
        if len(fds) != count:
            for fd in fds:
                os.close(fd)
            raise ConnectionError(f"the other process has passed {len(fds)} descriptors, not {count}")
        return fds

    def _finish(self, content: bytearray | memoryview) -> None:
        """Read the rest of a message, and check it."""
        self._read(content)
        if self._keys is not None:
            check = self._read(bytearray(_CHECK_BYTES))
            if not secrets.compare_digest(check, _check(self._keys[1], self._num_received, content)):
                raise ConnectionError("the message is damaged, or not of a process that knows the key")
        self._num_received += 1

    def _read(self, content: bytearray | memoryview) -> bytes:
        """Fill `content`; short ones are returned."""
        rest, deadline = memoryview(content), time.monotonic() + self._message_s
        while rest:
            self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            if not (count := self._connection.recv_into(rest)):
                raise ConnectionError("the other process has gone")
            rest = rest[count:]
        return bytes(content) if len(content) <= _LENGTH.size + _CHECK_BYTES else b""


def listen(address: Address) -> socket.socket:
    """The listening socket of an address: over TCP if it has a host, at the port that it names, or any."""
    if address.host:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(f"\0{address.name}")
    listener.listen()
    return listener


@contextmanager
def connect(address: Address, *, remote: bool, message_s: float = _MESSAGE_S) -> Iterator[Link]:
    """A link to the giver at an address, over TCP if `remote`.

    Raises:
        OSError: there is none, or it is another user's.
    """
    if remote:
        with socket.create_connection((address.host, address.port), _CONNECT_S) as connection:
            yield Link(connection, address.key, gives=False, message_s=message_s)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(min(_CONNECT_S, message_s))
        connection.connect(f"\0{address.name}")
        check_user(connection)
        yield Link(connection, gives=False, message_s=message_s)


def check_user(connection: socket.socket) -> None:
    """Raise `PermissionError` unless the process at the other end of a Unix socket is this user's."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        raise PermissionError("the process at the other end is another user's")


def _check(key: bytes, number: int, content: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(content, key=key, digest_size=_CHECK_BYTES, salt=number.to_bytes(16, "little")).digest()
