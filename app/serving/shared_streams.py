"""Shared streams: the pieces of many requests in one stream from an engine replica to an ingress.

A message through Serve and gRPC has a fixed cost. An ingress with several streams at a replica therefore opens one
more, a *shared stream*. Each of its messages carries the new pieces of all requests: one message a step, regardless of
the number of streams.

    ingress                                                                    replica
      generate_stream(request) ──────────────────────────────────────────────> engine
        <── [pieces]: the first, at once ───────────────────── its own stream ───┤
        <── connection: later pieces are in that stream ────── its own stream ───┤
      open_shared_stream(SharedStreamCall) ────────────────────────────────────> │
        <── [(request, piece), (request, piece), …] ──────── shared stream ──────┤
        <── the end, or an error ──────────────────────────── its own stream ────┘

Each request remains a call of its own, with Serve's routing, cancellation and errors. When a shared stream breaks, its
requests end with `UnavailableError`, as when the replica is gone. The replica closes a shared stream that no request
has used for a while; only the replica knows which requests use it.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, TypeAlias

from ray.serve.handle import DeploymentHandle

from folio.app.compat.ray import CALL_ERRORS, streaming_handle
from folio.app.engine.request.delta import FinishReason
from folio.app.errors import FolioError, UnavailableError
from folio.app.fleet.messages import GenerateRequest, Piece, SharedStreamCall, SharedStreamKey
from folio.app.fleet.streams import SILENCE_S, without_heartbeats

logger = logging.getLogger(__name__)

# Idle time after which a shared stream ends: a replica that stops waits for its streams.
_IDLE_S = 1.0
# Pause after a shared stream that failed.
_AGAIN_S = 1.0
# Output tokens of a message without its last piece, which may have as many as `streams.fits_by_value` allows.
_MOST_TOKENS = 32_768

# Number of the request, and the fields of its `Piece` but the replica. Text `None`: the request's own stream has its
# end.
Entry: TypeAlias = tuple[
    int, str | None, tuple[int, ...], int, FinishReason | None, str | int | None, int, int, float | None
]


class _Outlet:
    """Pieces for the next message of a shared stream. In one event loop."""

    def __init__(self, connection: int, idle_s: float, most_tokens: int) -> None:
        self.connection = connection
        self._idle_s, self._most_tokens = idle_s, most_tokens
        self.num_users = 0
        self.is_open = True
        self._entries: list[Entry] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._wake()

    async def take(self) -> list[Entry]:
        """The entries that fit into a message; empty after `idle_s` without any."""
        if not self._entries:
            self._waiter = asyncio.get_running_loop().create_future()
            timer = asyncio.get_running_loop().call_later(self._idle_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        num_tokens = num_taken = 0
        while num_taken < len(self._entries) and num_tokens < self._most_tokens:
            num_tokens += len(self._entries[num_taken][2])
            num_taken += 1
        taken, self._entries = self._entries[:num_taken], self._entries[num_taken:]
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SharedStreams:
    """The shared streams of a replica, at most one for each ingress."""

    def __init__(self, idle_s: float = _IDLE_S, most_tokens: int = _MOST_TOKENS) -> None:
        self._bounds = idle_s, most_tokens
        self._outlets: dict[str, _Outlet] = {}  # by ingress

    async def messages(self, call: SharedStreamCall) -> AsyncGenerator[list[Entry], None]:
        outlet = self._outlets[call.ingress] = _Outlet(call.connection, *self._bounds)
        try:
            while (entries := await outlet.take()) or outlet.num_users:
                if entries:
                    yield entries
        finally:  # later pieces go through the requests' own streams
            outlet.is_open = False
            if self._outlets.get(call.ingress) is outlet:
                del self._outlets[call.ingress]

    async def route_pieces(
        self, lists: AsyncGenerator[list[Piece] | GenerateRequest | str, None], share: SharedStreamKey | None
    ) -> AsyncGenerator[list[Piece] | GenerateRequest | str | int, None]:
        """The items of the request's own stream: lists of pieces until there is a shared stream, at least one; then the
        number of that stream, and nothing more. A replica's name comes before them.

        Raises:
            UnavailableError: the shared stream has broken.
        """
        if share is None:
            async for pieces in lists:
                yield pieces
            return
        outlet: _Outlet | None = None
        has_output = False
        try:
            async for pieces in lists:
                if outlet is None and has_output and (outlet := self._outlets.get(share.ingress)) is not None:
                    outlet.num_users += 1
                    yield outlet.connection
                if outlet is None:
                    yield pieces
                    has_output = isinstance(pieces, list)
                    continue
                assert isinstance(pieces, list)  # forks, which begin otherwise, have no share
                if not outlet.is_open:
                    raise UnavailableError("the stream was cut off; send the request again")
                for piece in pieces:
                    outlet.put(_entry_of(share.number, piece))
        except BaseException:
            if outlet is not None:
                outlet.put((share.number, None, (), 0, None, None, 0, 0, None))
            raise
        finally:
            if outlet is not None:
                outlet.num_users -= 1


def _entry_of(number: int, piece: Piece) -> Entry:
    """A plain tuple takes a tenth of the time to unpickle. Pieces with log probabilities never use a shared stream."""
    return (
        number,
        piece.text,
        piece.token_ids,
        piece.index,
        piece.finish_reason,
        piece.stop_reason,
        piece.num_unfinished,
        piece.num_cached_tokens,
        piece.score,
    )


def _piece_of(entry: Entry, replica: str) -> Piece | None:
    _, text, token_ids, index, finish_reason, stop_reason, num_unfinished, num_cached_tokens, score = entry
    if text is None:
        return None
    return Piece(
        text, token_ids, index, finish_reason, stop_reason, num_unfinished, num_cached_tokens, (), (), score, replica
    )


@dataclass(slots=True, eq=False)
class ExpectedStream:
    """A request whose pieces may come through a shared stream."""

    share: SharedStreamKey
    arrived: asyncio.Queue[Piece | None]
    replica: str | None = None


class SharedReader:
    """The shared streams of an ingress, one for each replica where the ingress has several streams."""

    def __init__(self, handle: DeploymentHandle[Any], again_s: float = _AGAIN_S) -> None:
        self._handle, self._again_s = handle, again_s
        self._ingress = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._expected: dict[int, ExpectedStream] = {}
        self._num_streams: Counter[str] = Counter()  # streams with output, by replica
        self._readers: dict[str, asyncio.Task[None]] = {}  # by replica
        self._not_before = 0.0
        self._users: dict[int, set[int]] = {}  # open connection → numbers of its requests

    def expect(self) -> ExpectedStream:
        """Register a request before it is sent; `forget` it at its end."""
        expected = ExpectedStream(SharedStreamKey(self._ingress, next(self._numbers)), asyncio.Queue())
        self._expected[expected.share.number] = expected
        return expected

    def begun(self, expected: ExpectedStream, replica: str) -> None:
        """Note the first piece, which has come through the request's own stream."""
        expected.replica = replica
        self._num_streams[replica] += 1
        if self._num_streams[replica] > 1 and replica not in self._readers and time.monotonic() >= self._not_before:
            # In a context of its own: Serve would cancel the reader together with the current request.
            self._readers[replica] = asyncio.create_task(self._read(replica), context=contextvars.Context())

    def forget(self, expected: ExpectedStream) -> None:
        del self._expected[expected.share.number]
        if expected.replica is not None:
            self._num_streams[expected.replica] -= 1
            if not self._num_streams[expected.replica]:
                del self._num_streams[expected.replica]

    async def rest(self, expected: ExpectedStream, connection: int) -> AsyncGenerator[Piece, None]:
        """The request's pieces in the shared stream. Its own stream has the end or error, also when this one breaks."""
        number = expected.share.number
        if (users := self._users.get(connection)) is not None:
            users.add(number)
        else:  # the shared stream has ended; earlier pieces are in the queue
            expected.arrived.put_nowait(None)
        try:
            while (piece := await expected.arrived.get()) is not None:
                yield piece
                if piece.ends_request:
                    return
        finally:
            self._users.get(connection, set()).discard(number)

    async def _read(self, replica: str) -> None:
        connection = next(self._numbers)
        users = self._users[connection] = set()
        call = SharedStreamCall(self._ingress, connection, replica)
        response: Any = None
        has_ended = False
        try:
            response = streaming_handle(self._handle, by_value=True).open_shared_stream.remote(call)
            async for entries in without_heartbeats(response, SILENCE_S):
                for entry in entries:
                    if (expected := self._expected.get(entry[0])) is not None:  # else the request has ended
                        expected.arrived.put_nowait(_piece_of(entry, replica))
            has_ended = True
        except (FolioError, *CALL_ERRORS) as error:
            logger.info("no shared stream from %s: %s", replica, error)
        finally:
            if not has_ended:
                if response is not None:
                    response.cancel()
                self._not_before = time.monotonic() + self._again_s
            del self._users[connection], self._readers[replica]
            for number in users:
                self._expected[number].arrived.put_nowait(None)
