"""Retries of replica calls, the window of a request's calls, and the guard against duplicate requests."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

from folio.app.engine.request.engine_request import BegunOutput
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import DeadlineError, ModelUnavailableError, NoReplicaError, OverloadedError, UnavailableError
from folio.app.fleet.departures import DEPARTURES, CallMovedError
from folio.app.fleet.messages import ForkCall, GenerateRequest, Piece
from folio.app.fleet.overload import LoadShedder
from folio.app.fleet.roles import PrefilledError

logger = logging.getLogger(__name__)

# Retries after a replica has gone: a request that makes engines fail must not take down one after the other.
_MOST_RETRIES = 2
# Moves to other replicas. One that hangs leaves like one that stops, and the request may be the cause.
_MOST_MOVES = 8
# Replicas that may refuse a request before the client is refused. Later requests rank these replicas last for a while,
# so that only the first ones meet so many refusals.
_MOST_OFFERS = 8
# Serve replaces a replica with a small model in about this time.
_REPLACED_AFTER_S = 5.0
# Bounds of the pause between two offers of a refused call.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0
# Longest time in which a cancelled request ends: a step, and the delivery of the cancellation.
_ENDS_WITHIN_S = 2.0

Reason = Literal["unavailable", "overloaded", "continued", "moved", "prefilled"]


class DeliveredOutputs:
    """What a caller has of its call's outputs: 4 bytes a token, from which another replica continues. `begun_by`: the
    first replica; `held_by`: the one that has the call, or had it.

    Args:
        params: with a seed, from which alone the noise of every replica follows.
        given: what the call's outputs begin with, if anything.
    """

    def __init__(self, params: SamplingParams, given: Sequence[BegunOutput] = ()) -> None:
        self._selects = params.num_sequences > params.n
        self._given = given or [BegunOutput(index, ()) for index in range(params.n)]
        self._left = {output.index: array("i", output.token_ids) for output in self._given}
        self._num_cached_tokens: int | None = None  # `None`: nothing is delivered
        self.begun_by = self.held_by = ""
        self.is_continued = False

    def note(self, piece: Piece) -> Piece:
        """Note a piece before it is delivered; returns it with the cached tokens that the first replica has found."""
        if piece.finish_reason is not None:
            self._left.pop(piece.index, None)
        else:
            self._left[piece.index].extend(piece.token_ids)
        if self._num_cached_tokens is None:
            self._num_cached_tokens, self.begun_by = piece.num_cached_tokens, piece.replica
        return replace(piece, num_cached_tokens=self._num_cached_tokens) if self.is_continued else piece

    def begun(self) -> tuple[BegunOutput, ...]:
        """The outputs to continue; empty if nothing is delivered."""
        self.is_continued = self.is_begun
        left = (output for output in self._given if output.index in self._left)
        begun = tuple(replace(output, token_ids=self._left[output.index][:]) for output in left)
        return begun if self.is_begun or any(output.token_ids for output in begun) else ()

    @property
    def is_begun(self) -> bool:
        """Whether anything is delivered."""
        return self._num_cached_tokens is not None

    @property
    def can_continue(self) -> bool:
        """Whether `begun` is all that a replica needs. Selected outputs are delivered together, in their order of
        merit."""
        return not (self.is_begun and self._selects)

    @property
    def can_move(self) -> bool:
        """Whether no work is lost with the replica: selected outputs begin again."""
        return not self._selects


class CallRetries:
    """Retry state of one call. A call that has delivered output continues where it is.

    A call is retried when its replica is gone, and offered to another replica when the queue was full; if other calls
    of the same request make progress, it is offered to all replicas again after a pause. There is no retry after a
    failed step, which the call may have caused, and none after its deadline. The same replica may get a call twice:
    the engine makes the request's id unique.

    Args:
        shedder: learns of refusals.
        arrived: arrival of the request (`time.monotonic`); `None`: when the call is first sent.
        window: of the request's calls; `None`: it has only one.
    """

    def __init__(
        self,
        call: GenerateRequest | ForkCall,
        shedder: LoadShedder,
        arrived: float | None = None,
        window: CallWindow | None = None,
    ) -> None:
        if call.params.seed is None and not (isinstance(call, GenerateRequest) and call.pooling is not None):
            call = replace(call, params=replace(call.params, seed=secrets.randbits(63)))
        self._call = call
        self._delivered = DeliveredOutputs(call.params, call.begun if isinstance(call, GenerateRequest) else ())
        self._shedder = shedder
        self._window = window
        self._num_ended = 0 if window is None else window.num_ended  # at the time of the first offer
        self._retry_after_s = math.inf  # least of the refusing replicas
        self._pause_s: float | None = None
        self._arrived = arrived
        self._refused_by: tuple[str, ...] = ()
        self._stopped: tuple[str, ...] = ()
        self._failure: ModelUnavailableError | None = None
        self._num_retries = self._num_moves = 0
        self._left: tuple[str, ...] = ()  # the replica that it has left last
        self._alone_since: float | None = None  # when no replica was there first

    def becomes(self, call: GenerateRequest) -> None:
        """The call's forks have begun; `call` gets the same from any replica."""
        self._call, self._delivered = call, DeliveredOutputs(call.params, call.begun)

    def next_call(self, fetched_by: str = "") -> GenerateRequest | ForkCall:
        """The call to send now, with the time left, first to the replica that has fetched its blocks, unless it
        has left that one. Raises `DeadlineError` when there is none."""
        now, timeout_s = time.monotonic(), self._call.timeout_s
        if self._arrived is None:
            self._arrived = now
        if timeout_s is not None:
            timeout_s -= now - self._arrived
            if timeout_s <= 0:
                raise DeadlineError(f"the request has not finished within its timeout_s of {self._call.timeout_s}")
        if isinstance(self._call, ForkCall):
            return replace(self._call, timeout_s=timeout_s)
        begun, adapter = self._delivered.begun(), self._call.adapter
        return replace(
            self._call,
            timeout_s=timeout_s,
            adapter=self._call.adapter_key or adapter if begun else adapter,  # the same weights, not only their name
            crowded=(*self._shedder.recent_refusers(now), *self._left),
            refused_by=self._refused_by,
            stopped=self._stopped,
            begun=begun,
            begun_by=self._delivered.begun_by,
            held_at=DEPARTURES.held_at(self._delivered.held_by, self._call.model),
            fetched_by="" if fetched_by in self._left else fetched_by,
        )

    def note_place(self, replica: str) -> None:
        """Note the replica that has the call."""
        self._delivered.held_by = replica

    @property
    def can_leave(self) -> bool:
        """Whether nothing but a pause is lost when the call moves; one that has often moved stays."""
        return self._delivered.can_move and self._num_moves < _MOST_MOVES // 2

    def delivered(self, piece: Piece) -> Piece:
        """Note a piece before its delivery; see `DeliveredOutputs.note`."""
        return self._delivered.note(piece)

    async def pause(self) -> None:
        """Wait before the next attempt, where necessary."""
        if self._window is not None and self._pause_s is not None:
            num_ended = self._window.num_ended
            await self._window.pause(self._pause_s)
            self._pause_s, self._num_ended = None, num_ended

    def note_failure(self, error: UnavailableError | OverloadedError) -> Reason | None:
        """The reason to send a failed call again, `None` if no replica has got it yet. Raises the error if it is not to
        be sent again."""
        if isinstance(self._call, ForkCall) or not self._delivered.can_continue:
            raise error
        if isinstance(error, OverloadedError):
            return self._refused(error)
        if isinstance(error, NoReplicaError):
            self._check_alone(error)
            return None
        self._alone_since = None
        if isinstance(error, PrefilledError):
            return "prefilled"
        if isinstance(error, CallMovedError):
            self._num_moves += 1
            self._left = (error.replica,)
            if self._num_moves > _MOST_MOVES:
                raise error
            return "moved"
        if self._num_retries >= _MOST_RETRIES:
            raise UnavailableError(error.message, error.retry_after_s or _REPLACED_AFTER_S) from error
        if isinstance(error, ModelUnavailableError):  # perhaps no other replica has the model either: no pause
            self._num_retries += 1
            self._refused_by, self._failure = (*self._refused_by, error.replica), error
            return self._reason
        self._num_retries += 1
        if error.replica:
            self._stopped = (*self._stopped, error.replica)
        logger.warning("retrying %s (retry %d): %s", self._call.request_id, self._num_retries, error)
        return self._reason

    def _check_alone(self, error: NoReplicaError) -> None:
        """Raise the error, unless a replica is being started; the router has waited for a while."""
        if self._alone_since is None:
            self._alone_since = time.monotonic() - (error.retry_after_s or 0.0)
        if time.monotonic() - self._alone_since >= error.replaced_within_s:
            raise error

    @property
    def _reason(self) -> Reason:
        return "continued" if self._delivered.is_begun else "unavailable"

    def _refused(self, error: OverloadedError) -> Reason:
        now = time.monotonic()
        if not error.replica and self._failure is not None:
            raise UnavailableError(
                self._failure.message, self._failure.retry_after_s or _REPLACED_AFTER_S
            ) from self._failure
        if not error.replica:  # the router has no replica left
            if self._may_wait():
                return "overloaded"
            raise OverloadedError(error.message, self._shedder.note_all_refused(now)) from error
        if error.retry_after_s is not None:
            self._shedder.note_refusal(error.replica, error.retry_after_s, error.num_queued, now)
            self._retry_after_s = min(self._retry_after_s, error.retry_after_s)
        self._refused_by = (*self._refused_by, error.replica)
        if len(self._refused_by) >= _MOST_OFFERS and not self._may_wait():
            self._shedder.note_all_refused(now)  # so many refusals stand for all replicas
            raise error
        return "overloaded"

    def _may_wait(self) -> bool:
        """Whether the call may be offered to all replicas again, after a pause."""
        if self._window is None or not self._window.may_offer_again(self._num_ended):
            return False
        self._pause_s, self._retry_after_s, self._refused_by = self._retry_after_s, math.inf, ()
        return True


class CallWindow:
    """Bounds the calls that one request has in flight, and tracks their progress. Without a bound, a request with many
    prompts could exceed the queues of an idle fleet and never succeed.

    Args:
        window: calls in flight.
    """

    def __init__(self, window: int) -> None:
        self._slots = asyncio.Semaphore(window)
        self._num_in_flight = self._num_paused = 0
        self._num_ended = 0

    @property
    def num_ended(self) -> int:
        return self._num_ended

    @asynccontextmanager
    async def call_slot(self) -> AsyncIterator[None]:
        """Waits for a slot in the window, and holds it."""
        async with self._slots:
            self._num_in_flight += 1
            try:
                yield
            finally:
                self._num_in_flight -= 1
                self._num_ended += 1

    def may_offer_again(self, num_ended: int) -> bool:
        """Whether a refused call may wait for room: another call of the request is in flight, or more than `num_ended`
        have ended, so replicas do accept calls of this request."""
        return self._num_in_flight - self._num_paused > 1 or self._num_ended > num_ended

    async def pause(self, retry_after_s: float) -> None:
        """Wait until a replica may have room for a refused call."""
        self._num_paused += 1
        try:
            await asyncio.sleep(min(max(retry_after_s, _LEAST_PAUSE_S), _MOST_PAUSE_S))
        finally:
            self._num_paused -= 1


class DuplicateGuard:
    """Runs requests with the same key one at a time.

    HAProxy repeats a request whose ingress has died before any answer. The first copy is about to be cancelled then,
    and the second waits for its end. In one event loop.
    """

    def __init__(self, ends_within_s: float = _ENDS_WITHIN_S) -> None:
        self._ends_within_s = ends_within_s
        self._running: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def exclusive(self, key: str) -> AsyncIterator[None]:
        """The context in which the request with this key runs. Raises `UnavailableError` if another one does not
        end."""
        try:
            async with asyncio.timeout(self._ends_within_s):
                while (other := self._running.get(key)) is not None:
                    await other.wait()
                # No await between the check and this line.
                ended = self._running[key] = asyncio.Event()
        except TimeoutError:
            raise UnavailableError(
                f"an earlier copy of this request has not ended within {self._ends_within_s:g} s; send it again later"
            ) from None
        try:
            yield
        finally:
            del self._running[key]
            ended.set()
