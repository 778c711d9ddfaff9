"""Delta: what one step adds to one output; and the queue of a request's deltas."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Literal

from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.errors import FolioError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step adds to one output of a request. An `error` ends the whole request.

    Attributes:
        index: number of the output, of `n`.
        num_unfinished: other outputs of the request that have not ended.
        stop_reason: the stop string or token id that ended the output, unless an end-of-sequence token did.
        num_cached_tokens: prompt tokens found in the prefix cache.
        logprobs: for each token, if requested.
        prompt_logprobs: for each prompt token but the first, if requested, with the first delta.
        score: of an output of a beam search.
        queue_s: seconds from the request's arrival to the step that computed its first tokens.
        pooled: the vector that `PoolingParams` ask for, as little-endian float32.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: FolioError | None = None
    num_cached_tokens: int = 0
    index: int = 0
    num_unfinished: int = 0
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None
    queue_s: float = 0.0
    pooled: bytes | None = None

    @property
    def finished(self) -> bool:
        """Whether this output is complete."""
        return self.finish_reason is not None or self.error is not None

    @property
    def ends_request(self) -> bool:
        """Whether this is the request's last delta."""
        return self.error is not None or (self.finish_reason is not None and not self.num_unfinished)


class DeltaQueue:
    """Queue of a request's deltas, from callbacks of an event loop to one task of that loop.

    A slow or paced reader takes all deltas at once, so that the cost of waking it does not grow with the number of
    steps. The request's end wakes it at once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deltas: list[Delta] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._not_before = 0.0

    def put(self, delta: Delta) -> None:
        """Add a delta, in the loop's thread."""
        self._deltas.append(delta)
        self._ended = self._ended or delta.ends_request
        if self._ended or self._loop.time() >= self._not_before:
            self._wake()

    async def get_all(self, not_before: float = 0.0) -> list[Delta]:
        """Wait for a delta; returns all that have come, in order.

        Args:
            not_before: earliest time to return, on the loop's clock, unless the request has ended.
        """
        self._not_before = not_before
        while not self._deltas or (not self._ended and self._loop.time() < not_before):
            self._waiter = self._loop.create_future()
            waits = self._loop.time() < not_before < math.inf
            timer = self._loop.call_at(not_before, self._wake) if waits else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        taken, self._deltas = self._deltas, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
