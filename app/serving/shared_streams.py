"""One stream for the pieces of many requests, from an engine replica to an ingress.

A message costs its way through Serve and gRPC, whatever is in it. So an ingress that has several streams at a replica
asks it for one more, a *shared stream*: each of its messages has what all of them have got since the last one, so there
is one a step, however many streams there are.

    ingress                                                                    replica
      generate_stream(request) ──────────────────────────────────────────────> engine
        <── [pieces]: the first, at once ───────────────────── its own stream ───┤
        <── connection: the others are in the shared stream ── its own stream ───┤
      share(ShareCall) ────────────────────────────────────────────────────────> │
        <── [(request, piece), (request, piece), …] ──────── shared stream ──────┤
        <── the end, or an error ──────────────────────────── its own stream ────┘

A request remains a call of its own: routing, admission, cancellation and errors are Serve's, as without it. When a
shared stream breaks, requests whose pieces were in it end with `UnavailableError`, as when the replica is gone. It ends
when none has used it for a while, and the replica decides that, since it alone knows which requests do.
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

from app.engine.request import FinishReason
from app.errors import FolioError, UnavailableError
from app.fleet.messages import Piece, SharedStreamCall, SharedStreamKey
from app.fleet.streams import SILENCE_S, without_heartbeats
from app.serving.failures import FAILURES

logger = logging.getLogger(__name__)

# A shared stream without requests ends after this: a replica that is to stop waits for it.
_IDLE_S = 1.0
# After one that could not be had, or broke, none is asked for before this.
_AGAIN_S = 1.0
# Output tokens of a message, beside those of its last piece, which may have as many as `calls.fits_by_value` allows.
_MOST_TOKENS = 32_768

# Number of the request, and the fields of its `Piece` but the replica. No text: its own stream says how it has ended.
Entry: TypeAlias = tuple[
    int, str | None, tuple[int, ...], int, FinishReason | None, str | int | None, int, int, float | None
]


class _Outlet:
    """What waits for the next message of a shared stream. In one event loop."""

    def __init__(self, connection: int) -> None:
        self.connection = connection
        self.num_users = 0
        self.is_open = True
        self._entries: list[Entry] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, entry: Entry) -> None:
        self._entries.append(entry)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Entry]:
        """All that is there, as far as it fits into a message; nothing if nothing comes for a while."""
        if not self._entries:
            self._waiter = asyncio.get_running_loop().create_future()
            timer = asyncio.get_running_loop().call_later(_IDLE_S, self._give_up)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        num_tokens = num_taken = 0
        while num_taken < len(self._entries) and num_tokens < _MOST_TOKENS:
            num_tokens += len(self._entries[num_taken][2])
            num_taken += 1
        taken, self._entries = self._entries[:num_taken], self._entries[num_taken:]
        return taken

    def _give_up(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SharedStreams:
    """The shared streams of a replica, one for each ingress that wants one."""

    def __init__(self) -> None:
        self._outlets: dict[str, _Outlet] = {}  # by ingress

    async def messages(self, call: SharedStreamCall) -> AsyncGenerator[list[Entry], None]:
        """The shared stream itself."""
        outlet = self._outlets[call.ingress] = _Outlet(call.connection)
        try:
            while (entries := await outlet.take()) or outlet.num_users:
                if entries:
                    yield entries
        finally:  # what comes from now on goes by the requests' own streams
            outlet.is_open = False
            if self._outlets.get(call.ingress) is outlet:
                del self._outlets[call.ingress]

    async def route_pieces(
        self, lists: AsyncGenerator[list[Piece], None], share: SharedStreamKey | None
    ) -> AsyncGenerator[list[Piece] | int, None]:
        """What goes into the request's own stream: the first list, and others until there is a shared stream; then its
        number, and nothing more.

        Raises:
            UnavailableError: the shared stream has broken.
        """
        if share is None:
            async for pieces in lists:
                yield pieces
            return
        outlet: _Outlet | None = None
        has_begun = False
        try:
            async for pieces in lists:
                if outlet is None and has_begun and (outlet := self._outlets.get(share.ingress)) is not None:
                    outlet.num_users += 1
                    yield outlet.connection
                if outlet is None:
                    yield pieces
                    has_begun = True
                    continue
                if not outlet.is_open:
                    raise UnavailableError("the stream has broken off; send the request again")
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
    """As a plain tuple, which is read in a tenth of the time. Pieces with log probabilities do not come here."""
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
    """A request of which pieces may come by a shared stream."""

    share: SharedStreamKey
    arrived: asyncio.Queue[Piece | None]
    replica: str | None = None


class SharedReader:
    """The shared streams of an ingress, one for each replica at which it has several streams."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._ingress = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._expected: dict[int, ExpectedStream] = {}
        self._num_streams: Counter[str] = Counter()  # that have begun, by replica
        self._readers: dict[str, asyncio.Task[None]] = {}  # by replica
        self._not_before = 0.0
        self._users: dict[int, set[int]] = {}  # of each connection that is open

    def expect(self) -> ExpectedStream:
        """A request is about to be sent; `forget` it at its end."""
        expected = ExpectedStream(SharedStreamKey(self._ingress, next(self._numbers)), asyncio.Queue())
        self._expected[expected.share.number] = expected
        return expected

    def begun(self, expected: ExpectedStream, replica: str) -> None:
        """Its first piece has come, by its own stream."""
        expected.replica = replica
        self._num_streams[replica] += 1
        if self._num_streams[replica] > 1 and replica not in self._readers and time.monotonic() >= self._not_before:
            # In a context of its own: Serve would cancel it with the request that happens to begin it.
            self._readers[replica] = asyncio.create_task(self._read(replica), context=contextvars.Context())

    def forget(self, expected: ExpectedStream) -> None:
        del self._expected[expected.share.number]
        if expected.replica is not None:
            self._num_streams[expected.replica] -= 1
            if not self._num_streams[expected.replica]:
                del self._num_streams[expected.replica]

    async def rest(self, expected: ExpectedStream, connection: int) -> AsyncGenerator[Piece, None]:
        """Its pieces in the shared stream. Its own stream says how it has ended: also when this breaks off."""
        number = expected.share.number
        if (users := self._users.get(connection)) is not None:
            users.add(number)
        else:  # it has ended; what came before that is there
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
            response = self._handle.options(stream=True, _by_reference=False).share.remote(call)
            async for entries in without_heartbeats(response, SILENCE_S):
                for entry in entries:
                    if (expected := self._expected.get(entry[0])) is not None:  # else its reader has left
                        expected.arrived.put_nowait(_piece_of(entry, replica))
            has_ended = True
        except (FolioError, *FAILURES) as error:
            logger.info("no shared stream from %s: %s", replica, error)
        finally:
            if not has_ended:
                if response is not None:
                    response.cancel()
                self._not_before = time.monotonic() + _AGAIN_S
            del self._users[connection], self._readers[replica]
            for number in users:
                self._expected[number].arrived.put_nowait(None)
