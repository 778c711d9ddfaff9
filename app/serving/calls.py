"""The engine replicas as the ingress calls them: whole, streamed, cancelled, tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Any, cast

from ray.serve import metrics
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from app.engine.sampling.params import SamplingParams
from app.errors import OverloadedError, UnavailableError
from app.fleet.messages import ForkCall, GenerateRequest, Piece, ReplicaFacts
from app.fleet.overload import LoadShedder
from app.fleet.retry import CallRetries, CallWindow
from app.fleet.streams import SILENCE_S, interleave, without_heartbeats
from app.serving.failures import FAILURES, call_broken_error, translate_failures, unwrap
from app.serving.shared_streams import SharedReader

# A message may have 4 MiB. An output token takes up to 16 bytes, id and text: so all outputs of a call with so many
# tokens fit into half of that, even if its reader was so slow that they come in one.
_MOST_TOKENS_BY_VALUE = 131_072
# For what all replicas have to do, such as computing a prefix. One that hangs shall not hold the caller for ever.
ANSWER_TIMEOUT_S = 120.0


class ReplicaClient:
    """All engine replicas of the application, behind their handle. Every method raises `FolioError`s.

    Args:
        refusals: by replicas whose queue was full.
        batch_window: of the calls of one request, so many are sent at once.
        shared: streams that those of several requests share; `None`: each has its own only.
        wait_for_replica_s: that the router lets a call wait when there is none.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        refusals: LoadShedder,
        batch_window: int = 32,
        shared: SharedReader | None = None,
        wait_for_replica_s: float = 10.0,
    ) -> None:
        self._handle = handle
        self._first_s = wait_for_replica_s + SILENCE_S
        self._shared = shared
        self._batch_window = batch_window
        self._refusals = refusals
        self._sent_again = metrics.Counter(
            "folio_repeated_calls",
            "Calls of a replica that were sent to another one: it was gone, or its queue was full.",
            tag_keys=("reason",),
        )

    async def complete_calls(self, calls: Sequence[GenerateRequest], arrived: float | None = None) -> list[list[Piece]]:
        """The outputs of each call, each output in one piece. When one call fails, the others are cancelled.

        Args:
            arrived: when their request came (`time.monotonic`): the calls' `timeout_s` count from there.
        """
        batch = self._batch_of(calls)
        return await _all_of([self._whole(call, arrived, batch) for call in calls])

    def stream_calls(
        self, calls: Sequence[GenerateRequest], arrived: float | None = None
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all calls as they come, each with the number of its call. Close it to cancel them."""
        batch = self._batch_of(calls)
        return interleave([self._stream(call, arrived, batch) for call in calls])

    async def complete_fork(self, call: ForkCall) -> list[Piece]:
        """The forks, each in one piece. They are not tried again: what they go on from is gone with its replica."""
        return cast(list[Piece], await _result_of(self._handle.fork.remote(call)))

    async def stream_fork(self, call: ForkCall) -> AsyncGenerator[Piece, None]:
        """The forks piece by piece. Close it to cancel them."""
        method = self._streaming(call.params).fork_stream
        async with aclosing(_pieces_of(method, call, self._first_s)) as pieces:
            async for piece in pieces:
                yield piece

    async def facts(self) -> ReplicaFacts:
        """What one replica says of the model."""
        return cast(ReplicaFacts, await _result_of(self._handle.facts.remote()))

    async def call_any(self, method: str, *args: Any) -> Any:
        """What one replica answers."""
        return await _result_of(getattr(self._handle, method).remote(*args))

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """What every replica answers. One that does not in time is unavailable."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                with translate_failures():
                    return await self._handle.broadcast(method, *args).results_async()
        except TimeoutError:
            raise UnavailableError(f"not all engine replicas have answered within {ANSWER_TIMEOUT_S:g} s") from None

    async def call_each(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """What every replica answers, or the `FolioError` that came of it: who does not answer in time is
        unavailable, and the others are heard nevertheless. Nobody answers when there is no replica."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        response = self._handle.broadcast(method, *args)
        # Its public methods know one timeout for all replicas together, and then none of the answers.
        try:
            async with asyncio.timeout_at(deadline):
                results = await response._fetch_replica_results_async()
        except DeploymentUnavailableError:
            return []
        except FAILURES as error:
            raise unwrap(error) from error
        except TimeoutError:
            raise UnavailableError(f"no engine replica could be asked within {timeout_s} s") from None
        answers = [asyncio.ensure_future(result.get_async()) for result in results]
        if not answers:
            return []
        try:
            await asyncio.wait(answers, timeout=deadline - loop.time())
        finally:
            for answer in answers:
                answer.cancel()  # those that are there stay as they are
        return [_answer_of(answer, timeout_s) for answer in answers]

    def _batch_of(self, calls: Sequence[GenerateRequest]) -> CallWindow | None:
        return CallWindow(self._batch_window) if len(calls) > 1 else None

    async def _whole(self, call: GenerateRequest, arrived: float | None, batch: CallWindow | None) -> list[Piece]:
        async with batch.call_slot() if batch else nullcontext():
            attempts = CallRetries(call, self._refusals, arrived, batch)
            while True:
                try:
                    return await self._at_once(attempts.next_call())
                except (UnavailableError, OverloadedError) as error:
                    self._sent_again.inc(tags={"reason": attempts.note_failure(error)})
                await attempts.pause()

    async def _at_once(self, call: GenerateRequest) -> list[Piece]:
        """As a stream of one item, where that can go by value: a replica does not hear that the caller of anything else
        has died, and would go on to the end."""
        if not fits_by_value(call.params):
            return cast(list[Piece], await _result_of(self._handle.generate.remote(call)))
        return await _only_item_of(self._streaming(call.params).generate_at_once.remote(call), self._first_s)

    async def _stream(
        self, call: GenerateRequest, arrived: float | None, batch: CallWindow | None
    ) -> AsyncGenerator[Piece, None]:
        """Tried again as long as nothing has come of it: afterwards the caller would see a beginning twice."""
        async with batch.call_slot() if batch else nullcontext():
            attempts, begun = CallRetries(call, self._refusals, arrived, batch), False
            method = self._streaming(call.params).generate_stream
            shared = self._shared if fits_by_value(call.params) else None
            while True:
                try:
                    async with aclosing(_pieces_of(method, attempts.next_call(), self._first_s, shared)) as pieces:
                        async for piece in pieces:
                            begun = True
                            yield piece
                    return
                except (UnavailableError, OverloadedError) as error:
                    if begun:
                        raise
                    self._sent_again.inc(tags={"reason": attempts.note_failure(error)})
                await attempts.pause()

    def _streaming(self, params: SamplingParams) -> DeploymentHandle[Any]:
        """By value an item costs half as much, and the replica hears when this process dies; but it may not be long."""
        return self._handle.options(stream=True, _by_reference=not fits_by_value(params))


def fits_by_value(params: SamplingParams) -> bool:
    """Whether no item of a stream with these parameters can be too long for a message."""
    if params.logprobs is not None or params.prompt_logprobs is not None:
        return False
    if params.max_tokens is None:
        return params.n == 1
    return params.n * params.max_tokens <= _MOST_TOKENS_BY_VALUE


def _answer_of(answer: asyncio.Future[Any], timeout_s: float) -> Any:
    if not answer.done() or answer.cancelled():
        return UnavailableError(f"the engine replica has not answered within {timeout_s} s")
    error = answer.exception()
    if error is None:
        return answer.result()
    if isinstance(error, FAILURES):
        return unwrap(error)
    raise error


async def _pieces_of(
    method: Any, call: GenerateRequest | ForkCall, first_s: float, shared: SharedReader | None = None
) -> AsyncGenerator[Piece, None]:
    """What a replica's stream brings, up to its end. Nothing is sent before the first piece is asked for: what has been
    sent has to be cancelled.

    Args:
        first_s: that the first item, or sign of life, may take.
        shared: by which all but the first pieces may come; `None`: they do not.
    """
    expected = None
    if shared is not None and isinstance(call, GenerateRequest):
        expected = shared.expect()
        call = replace(call, share=expected.share)
    response, finished = None, False
    try:
        response = method.remote(call)
        with translate_failures():
            async for item in without_heartbeats(response, SILENCE_S, first_s):
                if isinstance(item, int):  # the rest is in the shared stream of that number
                    assert shared is not None
                    assert expected is not None
                    async with aclosing(shared.rest(expected, item)) as rest:
                        async for piece in rest:
                            finished = piece.ends_request
                            yield piece
                    continue
                if shared is not None and expected is not None and expected.replica is None:
                    shared.begun(expected, item[0].replica)
                finished = item[-1].ends_request
                for piece in item:
                    yield piece
            if not finished:
                raise call_broken_error()
    finally:
        if response is not None and not finished:  # dropping the generator would not stop the replica
            response.cancel()
        if shared is not None and expected is not None:
            shared.forget(expected)


async def _only_item_of(response: Any, first_s: float) -> list[Piece]:
    """Of a replica's stream; it is cancelled when this task is."""
    pieces: list[Piece] | None = None
    try:
        with translate_failures():
            async for item in without_heartbeats(response, SILENCE_S, first_s):
                pieces = item
            if pieces is None:
                raise call_broken_error()
            return pieces
    finally:
        if pieces is None:
            response.cancel()


async def _all_of(calls: Sequence[Coroutine[Any, Any, list[Piece]]]) -> list[list[Piece]]:
    """Await all; when one fails, or this is cancelled, the others are cancelled."""
    if len(calls) == 1:  # the common case needs no tasks
        return [await calls[0]]
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _result_of(response: Any) -> Any:
    """Await a call of a replica; it is cancelled when this task is."""
    try:
        with translate_failures():
            return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
