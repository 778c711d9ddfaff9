"""How often, and where, one call of an engine replica is tried.

The calls of one request with several prompts.

Requests that come twice: never two at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

from app.errors import DeadlineError, NoReplicaError, OverloadedError, UnavailableError
from app.fleet.messages import GenerateRequest
from app.fleet.overload import LoadShedder

logger = logging.getLogger(__name__)

# A request that makes engines fail must not take down one after the other.
_MOST_REPEATS = 2
# Replicas that are asked for one request before it is refused. Once they have refused, others skip them for a while, so
# that only the first requests after it has become crowded ask so many.
_MOST_OFFERS = 8
# Serve replaces a replica in about this time, if its model is small.
_REPLACED_AFTER_S = 5.0

Reason = Literal["unavailable", "overloaded"]


class CallRetries:
    """What has become of one call so far, of which the caller has got nothing yet.

    It is sent again when its replica is gone, because nothing of it can be lost then; and offered to another one when
    the queue was full, to all again after a while if others of its batch are taken. It is not sent again after a failed
    step, in which it may have been the cause, and not past its deadline. The engine adds a number to its id: so the
    same replica may get it twice.

    Args:
        refusals: of all calls of this ingress.
        arrived: when the request came (`time.monotonic`); `None`: when the call is first sent.
        batch: calls of the same request; `None`: it is the only one.
    """

    def __init__(
        self,
        call: GenerateRequest,
        refusals: LoadShedder,
        arrived: float | None = None,
        batch: CallWindow | None = None,
    ) -> None:
        self._call = call
        self._refusals = refusals
        self._batch = batch
        self._num_ended = 0 if batch is None else batch.num_ended  # before it has been offered
        self._retry_after_s = math.inf  # as the replica says that may have room first
        self._pause_s: float | None = None
        self._arrived = arrived
        self._refused_by: tuple[str, ...] = ()
        self._stopped: tuple[str, ...] = ()
        self._num_repeats = 0

    def next_call(self) -> GenerateRequest:
        """The call to send now, with the time that is left to it.

        Raises:
            DeadlineError: none is.
        """
        now, timeout_s = time.monotonic(), self._call.timeout_s
        if self._arrived is None:
            self._arrived = now
        if timeout_s is not None:
            timeout_s -= now - self._arrived
            if timeout_s <= 0:
                raise DeadlineError(f"the request has not finished within its timeout_s of {self._call.timeout_s}")
        return replace(
            self._call,
            timeout_s=timeout_s,
            crowded=self._refusals.recent_refusers(now),
            refused_by=self._refused_by,
            stopped=self._stopped,
        )

    async def pause(self) -> None:
        """Before the next call, after one has failed."""
        if self._batch is not None and self._pause_s is not None:
            num_ended = self._batch.num_ended
            await self._batch.pause(self._pause_s)
            self._pause_s, self._num_ended = None, num_ended

    def note_failure(self, error: UnavailableError | OverloadedError) -> Reason:
        """The call has failed without any output; returns why it may be sent again.

        Raises:
            UnavailableError, OverloadedError: it may not.
        """
        if isinstance(error, OverloadedError):
            return self._refused(error)
        if isinstance(error, NoReplicaError):  # the router has waited for one already
            raise error
        if self._num_repeats >= _MOST_REPEATS:
            raise UnavailableError(error.message, error.retry_after_s or _REPLACED_AFTER_S) from error
        self._num_repeats += 1
        if error.replica:
            self._stopped = (*self._stopped, error.replica)
        logger.warning("%s is sent again, repeat %d: %s", self._call.request_id, self._num_repeats, error)
        return "unavailable"

    def _refused(self, error: OverloadedError) -> Reason:
        now = time.monotonic()
        if not error.replica:  # the router knows of none that has not refused
            if self._may_wait():
                return "overloaded"
            raise OverloadedError(error.message, self._refusals.note_all_refused(now)) from error
        if error.retry_after_s is not None:
            self._refusals.note_refusal(error.replica, error.retry_after_s, error.num_queued, now)
            self._retry_after_s = min(self._retry_after_s, error.retry_after_s)
        self._refused_by = (*self._refused_by, error.replica)
        if len(self._refused_by) >= _MOST_OFFERS and not self._may_wait():
            self._refusals.note_all_refused(now)  # so many are as good as all
            raise error
        return "overloaded"

    def _may_wait(self) -> bool:
        """Whether it may be offered to all of them again, after a pause."""
        if self._batch is None or not self._batch.may_offer_again(self._num_ended):
            return False
        self._pause_s, self._retry_after_s, self._refused_by = self._retry_after_s, math.inf, ()
        return True


# Between two offers of a call that has been refused.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0


class CallWindow:
    """Lets so many of the calls be sent at once, and knows whether they make progress: all at once could be more than
    the queues take even when nobody else is there, and such a request would never succeed.

    Args:
        window: calls at once.
    """

    def __init__(self, window: int) -> None:
        self._places = asyncio.Semaphore(window)
        self._num_inside = self._num_paused = 0
        self._num_ended = 0

    @property
    def num_ended(self) -> int:
        """Calls that have had their turn."""
        return self._num_ended

    @asynccontextmanager
    async def call_slot(self) -> AsyncIterator[None]:
        """A call may be sent while this is open."""
        async with self._places:
            self._num_inside += 1
            try:
                yield
            finally:
                self._num_inside -= 1
                self._num_ended += 1

    def may_offer_again(self, num_ended: int) -> bool:
        """Whether a call that has been refused may wait for room, because another one is under way, or more than
        `num_ended` are through: the replicas do take calls of this request."""
        return self._num_inside - self._num_paused > 1 or self._num_ended > num_ended

    async def pause(self, retry_after_s: float) -> None:
        """Until there may be room for a call that has been refused."""
        self._num_paused += 1
        try:
            await asyncio.sleep(min(max(retry_after_s, _LEAST_PAUSE_S), _MOST_PAUSE_S))
        finally:
            self._num_paused -= 1


# That a request which is cancelled takes to end, at most: a step, and the way of the cancellation.
_ENDS_WITHIN_S = 2.0


class DuplicateGuard:
    """The requests that run here, by their senders' keys.

    A request is sent again when its ingress died before any answer. So the first one's caller is dead, and it is about
    to be cancelled: the second waits for that, instead of running beside it. In one event loop.
    """

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def exclusive(self, key: str) -> AsyncIterator[None]:
        """The request with this key runs while this is open.

        Raises:
            UnavailableError: another one with this key does not end.
        """
        try:
            async with asyncio.timeout(_ENDS_WITHIN_S):
                while (other := self._running.get(key)) is not None:
                    await other.wait()
                # No other can come in between: this does not wait any more.
                ended = self._running[key] = asyncio.Event()
        except TimeoutError:
            raise UnavailableError(
                f"this request came before, and has not ended within {_ENDS_WITHIN_S:g} s; send it again later"
            ) from None
        try:
            yield
        finally:
            del self._running[key]
            ended.set()
