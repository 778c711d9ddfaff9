"""A TCP relay between an agent and the server, which keeps what both say and changes nothing."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_EVENT = re.compile(rb"^data: ", re.MULTILINE)
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)": ?(\d+)')
_REPLICA = re.compile(rb'"id": ?"(?:chatcmpl|resp|msg)-[^".]+\.(\w+)"')
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass(slots=True)
class Connection:
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    is_open: bool = True

    @property
    def num_events(self) -> int:
        """Server-sent events with data."""
        return len(_EVENT.findall(self.received))

    @property
    def replica(self) -> str:
        """The replica that the id of the last answer names."""
        return _REPLICA.findall(self.received)[-1].decode()

    def bodies(self) -> list[tuple[str, Any]]:
        """Request line and JSON of each request with a body."""
        found, rest = [], bytes(self.sent)
        while b"\r\n\r\n" in rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            body = b""
            if length := re.search(rb"(?i)\r\ncontent-length: *(\d+)", head):
                body, rest = rest[: int(length[1])], rest[int(length[1]) :]
            elif re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
                while (size := int(rest.partition(b"\r\n")[0] or b"0", 16)) and b"\r\n" in rest:
                    rest = rest.partition(b"\r\n")[2]
                    body, rest = body + rest[:size], rest[size + 2 :]
                rest = rest.partition(b"\r\n\r\n")[2]
            if body:
                found.append((head.partition(b"\r\n")[0].decode(), json.loads(body)))
        return found


class Wire:
    """Listens on a port of its own, in a thread of its own.

    Attributes:
        connections: since the last `clear`.
        on_event: called for each piece of a streamed answer, before the agent gets it.
    """

    def __init__(self, port: int) -> None:
        self.connections: list[Connection] = []
        self.on_event: Callable[[Connection], None] = lambda _: None
        self._to = port
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._relay, "127.0.0.1", 0), self._loop)
        self.port: int = starting.result().sockets[0].getsockname()[1]

    def clear(self) -> None:
        """Forget what was said; connections of programs in the background stay."""
        self.connections = [one for one in self.connections if one.is_open]
        for one in self.connections:
            one.sent.clear()
            one.received.clear()

    @property
    def statuses(self) -> list[int]:
        return [int(status) for one in self.connections for status in _STATUS.findall(one.received)]

    @property
    def cached_tokens(self) -> int:
        """The most that an answer says were found in the prefix cache."""
        return self._most(_CACHED)

    @property
    def prompt_tokens(self) -> int:
        """The longest prompt of an answer; with /v1/messages without what was cached."""
        return self._most(_PROMPT)

    def _most(self, pattern: re.Pattern[bytes]) -> int:
        return max((int(n) for one in self.connections for n in pattern.findall(one.received)), default=0)

    @property
    def num_events(self) -> int:
        return sum(one.num_events for one in self.connections)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection()
        self.connections.append(connection)
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(
            self._pass(reader, to_server, connection.sent, lambda: None),
            self._pass(from_server, writer, connection.received, lambda: self.on_event(connection)),
        )
        connection.is_open = False

    async def _pass(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, kept: bytearray, noted: Callable[[], None]
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                kept += data
                noted()
                to.write(data)
                await to.drain()
        except ConnectionError:
            pass  # the other side hung up
        finally:
            to.close()
