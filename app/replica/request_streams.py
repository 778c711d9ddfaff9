"""The requests of a replica: each runs on its model, whose deltas become pieces."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from folio.app.engine import Delta
from folio.app.engine.report import Progress
from folio.app.errors import (
    ModelUnavailableError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
    UnknownRequestError,
)
from folio.app.fleet.messages import ForkCall, GenerateRequest, Piece, PieceCollector
from folio.app.fleet.retry import DuplicateGuard
from folio.app.fleet.streams import StreamPace, interleave
from folio.app.tracing import traced

if TYPE_CHECKING:
    from folio.app.engine.async_engine import AsyncEngine, Pace
    from folio.app.shelf.shelf import Shelf
    from folio.app.shelf.shelved_model import ShelvedModel


# Interval between the items of a call that wants whole outputs: so much is computed again when its replica dies.
_WHOLE_S = 2.0


class RequestStreams:
    """The outputs of calls. Closing a stream cancels its request.

    Args:
        shelf: owned by the caller.
        first: the model of calls that name none.
        model_of: returns the model with a name, which may be empty, and an adapter: see `ShelfAdditions.model`.
        replica: the replica's name.
        note_cached: called with the cached tokens that a router expected, and those that were found.
        on_failure: called when a request was refused or its engine has stopped.
    """

    def __init__(
        self,
        shelf: Shelf,
        first: str,
        model_of: Callable[[str, str | None], Awaitable[ShelvedModel]],
        *,
        replica: str,
        pace: StreamPace,
        note_cached: Callable[[int, int], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._shelf, self._first, self._replica = shelf, first, replica
        self._model_of = model_of
        self._pace, self._note_cached, self._on_failure = pace, note_cached, on_failure
        self._duplicates = DuplicateGuard()

    async def pieces(self, call: GenerateRequest | ForkCall) -> AsyncGenerator[list[Piece] | GenerateRequest, None]:
        """A piece of each output that has grown, as often as `pace` allows; seldom if the call wants whole outputs. Of
        forks, first the call that gets the same from any replica.

        Raises:
            UnknownRequestError: the request to fork is not here, or has ended.
            OverloadedError, UnavailableError: with this replica's name, for the retry at another one.
        """
        collector, forks = PieceCollector(self._replica), list[GenerateRequest]()
        pools = isinstance(call, GenerateRequest) and call.pooling is not None
        interval_s = 0.0 if not call.whole else math.inf if pools else _WHOLE_S
        send_at = time.monotonic() + interval_s
        with nullcontext(lambda: interval_s) if call.whole else self._pace.stream() as pace:
            async with aclosing(self._deltas(call, pace, forks)) as deltas:
                async for some in deltas:
                    while forks:
                        yield forks.pop()
                    collector.hold(some)
                    if some[-1].ends_request or time.monotonic() >= send_at:
                        send_at += interval_s
                        if pieces := collector.pieces():
                            yield pieces

    def progress(self, call: GenerateRequest) -> Progress | None:
        """The progress of a call before its first token. May wait for the memory's lock."""
        with suppress(UnknownModelError):  # it has not reached this replica yet
            return self._shelf.model(call.model or self._first).progress(call.request_id, len(call.prompt_token_ids))
        return None

    def _deltas(
        self, call: GenerateRequest | ForkCall, pace: Pace, forks: list[GenerateRequest]
    ) -> AsyncGenerator[list[Delta], None]:
        if isinstance(call, GenerateRequest):
            return self._generated(call, pace)
        if call.replica != self._replica:
            raise UnknownRequestError(f"the replica that had the request {call.fork_of!r} is gone", "request_id")
        if (engine := self.engine_of(call.model)) is None:
            raise UnknownRequestError(f"there is no request {call.fork_of!r} here", "request_id")
        return engine.fork(
            call.fork_of,
            call.params,
            call.request_id,
            index=call.index,
            timeout_s=call.timeout_s,
            pace=pace,
            owner=call.owner,
            note=lambda asked: forks.append(call.as_generated(asked)),
        )

    def has_output(self, model: str, request_id: str, index: int) -> bool:
        """Whether a fork can continue that output here."""
        with suppress(UnknownModelError):
            return (engine := self.engine_of(model)) is not None and engine.has_output(request_id, index)
        return False

    def engine_of(self, model: str) -> AsyncEngine | None:
        """The engine of a model, if it is loaded. Raises `UnknownModelError`."""
        return self._shelf.model(model or self._first).engine

    async def _generated(self, request: GenerateRequest, pace: Pace) -> AsyncGenerator[list[Delta], None]:
        try:
            model = await self._model_of(request.model, request.adapter)
        except ModelUnavailableError as missed:
            missed.replica = self._replica
            raise
        key, expected = request.repeat_key, request.expected
        if expected is not None and expected.replica != self._replica:  # the expectation concerns another replica
            expected = None

        def begin() -> AsyncGenerator[list[Delta], None]:
            first = request if expected is None else replace(request, expected_cached_tokens=expected.cached_tokens)
            if not request.more_prompts:
                return model.stream(first, pace)
            others = (replace(request, prompt_token_ids=prompt) for prompt in request.more_prompts)
            return pool_together([model.stream(one, pace) for one in (first, *others)])

        try:
            async with (
                nullcontext() if key is None else self._duplicates.exclusive(key),
                aclosing(traced(begin(), request.num_prompt_tokens)) as deltas,
            ):
                async for some in deltas:
                    if expected is not None and not some[0].index:
                        self._note_cached(expected.cached_tokens, some[0].num_cached_tokens)
                        expected = None
                    yield some
        except (OverloadedError, UnavailableError) as failure:
            error = self._of_model(failure, model)
            error.replica = self._replica
            self._on_failure()
            if error is failure:
                raise
            raise error from failure

    def _of_model(
        self, failure: OverloadedError | UnavailableError, model: ShelvedModel
    ) -> OverloadedError | UnavailableError:
        """The failure as one of a single model, unless the shelf has failed; its retry waits for the model's wake."""
        if isinstance(failure, UnavailableError):
            if not self._shelf.healthy:
                return failure
            return ModelUnavailableError(failure.message, failure.retry_after_s)
        wake_s = model.expected_wake_s
        if failure.retry_after_s is None or model.engine is None or not wake_s:  # `ready` counts the first load
            return failure
        seconds = failure.retry_after_s + wake_s
        later = OverloadedError(f"queue full while {model.name!r} wakes; try again in {max(seconds, 1):.0f} s", seconds)
        later.num_queued = failure.num_queued
        return later


async def pool_together(streams: list[AsyncGenerator[list[Delta], None]]) -> AsyncGenerator[list[Delta], None]:
    """The deltas of several pooled requests, one of each, as outputs of one request."""
    num_unfinished = len(streams)
    async with aclosing(interleave(streams)) as lists:
        async for number, [delta] in lists:
            num_unfinished -= 1
            yield [replace(delta, index=number, num_unfinished=num_unfinished)]
