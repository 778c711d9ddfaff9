"""HTTP/1.1 connections for arbitrary bytes, and their answers."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

# Limit for the head of an answer, and a line of a chunked one.
_MOST_BYTES = 4 << 20


class Dropped(Exception):
    """The connection ended before the end of an answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Connection:
    """A client's connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Hand bytes to the kernel. Raises `Dropped`."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError as error:
            raise Dropped(f"while it was sent to: {type(error).__name__}") from error

    async def answer(self, method: str = "POST", on_chunk: Callable[[bytes], None] = lambda _: None) -> Answer:
        """The next answer, except for status 1xx. Raises `Dropped`.

        Args:
            on_chunk: called with each part of a stream.
        """
        try:
            while True:
                found = await _read_answer(self.reader, method, on_chunk)
                if found.status >= 200:
                    return found
        except asyncio.IncompleteReadError as error:
            raise Dropped(f"after {error.partial[:100]!r} of an answer") from error
        except ConnectionError as error:
            raise Dropped(f"instead of an answer: {type(error).__name__}") from error

    async def first_bytes(self) -> bytes:
        """The first bytes of an answer. Raises `Dropped`."""
        try:
            received = await self.reader.read(1 << 16)
        except ConnectionError as error:
            raise Dropped(f"instead of an answer: {type(error).__name__}") from error
        if not received:
            raise Dropped("instead of an answer")
        return received

    def half_close(self) -> None:
        """Close the sending side."""
        self.writer.write_eof()

    def reset(self) -> None:
        """Reset the connection (RST)."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def connected(port: int, receive_buffer_bytes: int | None = None) -> AsyncIterator[Connection]:
    """A connection, closed at the end.

    Args:
        receive_buffer_bytes: what the kernel takes of answers that are not read.
    """
    client = socket.socket()
    client.setblocking(False)
    if receive_buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    except BaseException:
        client.close()
        raise
    limit = _MOST_BYTES if receive_buffer_bytes is None else receive_buffer_bytes
    reader, writer = await asyncio.open_connection(sock=client, limit=limit)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


def request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a valid request; given headers replace default ones."""
    usual = {"Host": "127.0.0.1", "Connection": "close", "Content-Type": "application/json"}
    if body or method == "POST":
        usual["Content-Length"] = str(len(body))
    lines = [f"{name}: {value}" for name, value in (usual | dict(headers or {})).items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


async def _read_answer(reader: asyncio.StreamReader, method: str, on_chunk: Callable[[bytes], None]) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1")
    first, *lines = head.split("\r\n")
    status = int(first.split(" ", 2)[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if method == "HEAD" or status < 200 or status in (204, 304):
        return Answer(status, headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        return Answer(status, headers, b"".join([chunk async for chunk in _chunks(reader, on_chunk)]))
    if "content-length" in headers:
        return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
    return Answer(status, headers, await reader.read())


async def _chunks(reader: asyncio.StreamReader, on_chunk: Callable[[bytes], None]) -> AsyncIterator[bytes]:
    while num_bytes := int(await reader.readuntil(b"\r\n"), 16):
        chunk = (await reader.readexactly(num_bytes + 2))[:-2]
        on_chunk(chunk)
        yield chunk
    await reader.readexactly(2)
