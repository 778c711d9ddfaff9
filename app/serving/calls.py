"""Client of the engine replicas: calls in one answer or as streams, with retries and cancellation."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from ray.serve import metrics
from ray.serve.handle import DeploymentHandle

from folio.app.compat.ray import by_value, call_broken_error, streaming_handle, translate_failures
from folio.app.engine.report import Progress
from folio.app.errors import OverloadedError, UnavailableError, UnknownRequestError
from folio.app.fleet.departures import DEPARTURES, CallMovedError, PlacedCall
from folio.app.fleet.messages import ForkCall, GenerateRequest, Piece, ServedPooling, grouped_to_pool, whole_outputs
from folio.app.fleet.overload import LoadShedder
from folio.app.fleet.retry import CallRetries, CallWindow, Reason
from folio.app.fleet.roles import Prefilled, PrefilledError
from folio.app.fleet.streams import SILENCE_S, fits_by_value, interleave, without_heartbeats
from folio.app.http.request_context import checked, current_context
from folio.app.serving.peers import BlocksAhead, answers_of_each, holder_of
from folio.app.serving.shared_streams import ExpectedStream, SharedReader

# Timeout of calls that all replicas carry out, such as computing a pinned prefix.
ANSWER_TIMEOUT_S = 120.0


class ReplicaClient:
    """All engine replicas of the application, behind their handle. Every method raises `FolioError`s.

    Args:
        shedder: learns of replicas whose queues are full.
        batch_window: most calls of one request that are in flight together.
        shared: shared streams; `None`: each request has its own stream only.
        wait_for_replica_s: how long the router lets a call wait when there is no replica.
        shedders: model → the shedder of its calls, in place of `shedder`.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        shedder: LoadShedder,
        batch_window: int = 32,
        shared: SharedReader | None = None,
        wait_for_replica_s: float = 10.0,
        shedders: Mapping[str, LoadShedder] = MappingProxyType({}),
    ) -> None:
        self._handle = by_value(handle)
        self._first_s = wait_for_replica_s + SILENCE_S
        self._shared = shared
        self._batch_window = batch_window
        self._shedder = shedder
        self._shedders = shedders
        self._num_retries = metrics.Counter(
            "folio_repeated_calls",
            "Calls sent again to another replica, because the first was gone or its queue was full.",
            tag_keys=("reason",),
        )
        self._num_continued = metrics.Counter(
            "folio_continued_calls",
            "Calls that went on at another replica: the first was gone and they had output, is to go, or prefills.",
            tag_keys=("reason",),
        )

    async def complete_calls(self, calls: Sequence[GenerateRequest], arrived: float | None = None) -> list[list[Piece]]:
        """The outputs of each call, each output in one piece. When one call fails, the others are cancelled.

        Args:
            arrived: arrival of the HTTP request (`time.monotonic`), from which the calls' `timeout_s` count.
        """
        if len(calls) == 1:  # the common case needs no interleaving
            return [whole_outputs([piece async for piece in self._retried(_whole(calls[0]), arrived)])]
        outputs: list[list[Piece]] = [[] for _ in calls]
        async for number, piece in self.stream_calls([*map(_whole, calls)], arrived):
            outputs[number].append(piece)
        return [*map(whole_outputs, outputs)]

    async def complete_pooled(
        self, calls: Sequence[GenerateRequest], arrived: float | None = None
    ) -> list[list[Piece]]:
        """`complete_calls` for pooling calls that differ only in their prompts. A replica gets several short prompts in
        one call, because a call takes longer than a short prompt."""
        groups = grouped_to_pool(calls, self._batch_window)
        most = max(1 + len(group.more_prompts) for group in groups)
        starts = list(itertools.accumulate((1 + len(group.more_prompts) for group in groups), initial=0))
        outputs: list[list[Piece]] = [[] for _ in calls]
        window = CallWindow(max(self._batch_window // most, 1)) if len(groups) > 1 else None
        async for number, piece in self._interleaved([*map(_whole, groups)], arrived, window):
            outputs[starts[number] + piece.index].append(piece)
        return outputs

    def stream_calls(
        self, calls: Sequence[GenerateRequest], arrived: float | None = None
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all calls in order of arrival, each with the number of its call. Closing cancels the calls."""
        return self._interleaved(calls, arrived, CallWindow(self._batch_window) if len(calls) > 1 else None)

    async def complete_fork(self, call: ForkCall) -> list[Piece]:
        """The forks, each in one piece."""
        return whole_outputs([piece async for piece in self.stream_fork(replace(call, whole=True))])

    async def stream_fork(self, call: ForkCall) -> AsyncGenerator[Piece, None]:
        """The forks as they are generated. Closing cancels them. The output to fork may have continued elsewhere."""
        has_begun, asked = False, {call.replica}
        while True:
            try:
                async with aclosing(self._retried(call)) as pieces:
                    async for piece in pieces:
                        has_begun = True
                        yield piece
                return
            except (UnknownRequestError, UnavailableError):
                if has_begun or (replica := await holder_of(self._handle, call)) is None or replica in asked:
                    raise
                asked.add(replica)
                call = replace(call, replica=replica)

    async def ready(self) -> None:
        """Return when any replica has answered. Raises `UnavailableError` if it has stopped."""
        await _answered(self._handle.ready.remote())

    async def max_model_len(self, model: str) -> int:
        """A model's context length, from a replica that has loaded it, or loads it now."""
        return cast(int, await _answered(self._handle.max_model_len.remote(model)))

    async def pooling(self, model: str) -> ServedPooling:
        """Describes the vectors that a model makes of prompts. Waits as `max_model_len`."""
        return cast(ServedPooling, await _answered(self._handle.pooling.remote(model)))

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Every replica's answer. Raises `UnavailableError` when one is missing after `ANSWER_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                with translate_failures():
                    return await self._handle.broadcast(method, *args).results_async()
        except TimeoutError:
            raise UnavailableError(f"not all engine replicas have answered within {ANSWER_TIMEOUT_S:g} s") from None

    async def call_each(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Every replica's answer, or the `FolioError` in place of it: `answers_of_each`."""
        return await answers_of_each(self._handle, method, *args, timeout_s=timeout_s)

    def _interleaved(
        self, calls: Sequence[GenerateRequest], arrived: float | None, window: CallWindow | None
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        return interleave([self._retried(call, arrived, window) for call in calls])

    async def _retried(
        self, call: GenerateRequest | ForkCall, arrived: float | None = None, window: CallWindow | None = None
    ) -> AsyncGenerator[Piece, None]:
        """The call's pieces, of as many replicas as it takes."""
        async with window.call_slot() if window else nullcontext(), BlocksAhead(self._handle) as ahead:
            retries = CallRetries(call, self._shedders.get(call.model, self._shedder), arrived, window)
            while True:
                try:
                    async with aclosing(self._pieces(retries, ahead)) as pieces:
                        async for piece in pieces:
                            yield retries.delivered(piece)
                    return
                except (UnavailableError, OverloadedError) as error:
                    self._count(retries.note_failure(error))
                await retries.pause()

    def _count(self, reason: Reason | None) -> None:
        if reason in ("continued", "moved", "prefilled"):
            self._num_continued.inc(tags={"reason": reason})
            if reason != "prefilled" and (context := current_context()) is not None:
                context.num_continued += 1
        elif reason is not None:
            self._num_retries.inc(tags={"reason": reason})

    async def _pieces(self, retries: CallRetries, ahead: BlocksAhead) -> AsyncGenerator[Piece, None]:
        """The pieces of a replica's stream. The call is sent when the first piece is requested: a stream that is never
        read needs no cancellation."""
        call, shared = self._expect(retries.next_call(ahead.replica))
        handle = streaming_handle(self._handle, by_value=fits_by_value(call.params))
        response: Any = None
        finished, place = False, None
        offer = ExitStack()
        offer.enter_context(checked(DEPARTURES.has_replicas))
        try:
            response = handle.generate_stream.remote(call)
            with translate_failures():
                async for item in without_heartbeats(response, SILENCE_S, self._first_s):
                    if isinstance(item, Progress):
                        if (context := current_context()) is not None:
                            context.progress = item
                        continue
                    if isinstance(item, GenerateRequest):
                        retries.becomes(item)
                        continue
                    if isinstance(item, int):  # the number of the shared stream that has the later pieces
                        assert shared is not None
                        async with aclosing(shared[0].rest(shared[1], item)) as rest:
                            async for piece in rest:
                                finished = piece.ends_request
                                yield piece
                        continue
                    if place is None:
                        offer.close()
                        replica = item if isinstance(item, str) else item[0].replica
                        place = DEPARTURES.place(PlacedCall(replica, call.model, response.cancel, retries.can_leave))
                        retries.note_place(replica)
                    pieces = [] if isinstance(item, str) else item  # a name: the first piece is late
                    ahead.note(call, item)
                    if pieces and shared is not None and shared[1].replica is None:
                        shared[0].begun(shared[1], place.replica)
                    for piece in pieces:
                        finished |= piece.ends_request
                        yield piece
                    if isinstance(item, Prefilled):
                        raise PrefilledError(f"{place.replica} has computed the prompt")
                if not finished:
                    raise call_broken_error()
        except UnavailableError:
            if place is not None and place.is_leaving and not finished:
                raise CallMovedError(place.replica) from None
            if not finished:  # else nothing is missing but the end of the stream
                raise
        finally:
            offer.close()
            if response is not None and not finished:  # dropping the generator would not stop the replica
                response.cancel()
            if place is not None:
                DEPARTURES.remove(place)
            if shared is not None:
                shared[0].forget(shared[1])

    def _expect(
        self, call: GenerateRequest | ForkCall
    ) -> tuple[GenerateRequest | ForkCall, tuple[SharedReader, ExpectedStream] | None]:
        """Register a call for shared streams, if its pieces are many, and small enough to come by one."""
        if self._shared is None or isinstance(call, ForkCall) or call.whole or not fits_by_value(call.params):
            return call, None
        expected = self._shared.expect()
        return replace(call, share=expected.share), (self._shared, expected)


def _whole(call: GenerateRequest) -> GenerateRequest:
    return replace(call, whole=True)


async def _answered(response: Any) -> Any:
    """A replica's answer to a call."""
    try:
        with translate_failures():
            return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
