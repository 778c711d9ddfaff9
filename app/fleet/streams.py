"""Streams between replicas and ingresses: heartbeats, interleaving, pace.

Heartbeats: a lost machine or a stopped process closes no connection, and gRPC's own check takes minutes. A replica
sends an empty list when a stream has been idle for `BEAT_S`; an ingress treats a silent stream as a lost replica.

Pace: an item costs its way through replica, ingress and HAProxy, regardless of the number of its tokens. The first
token of a request is sent at once, later ones at a rate that keeps all streams of a replica within a budget of items
per second: few streams send every step, many send several tokens at a time.

The budget depends on what items compete for. Steps on a CPU need the cores, so the budget is a small share of all
cores. Steps on a GPU leave the cores idle, and event loops are the bound: the budget is what an ingress has time for,
and less while the replica's own loop, as measured, is busy for more than a share of the time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import UnavailableError

if TYPE_CHECKING:
    from folio.app.engine.async_engine import Pace

BEAT_S = 5.0
# The same for calls that show their progress.
PROGRESS_S = 0.75
# Time without a first item after which an ingress learns which replica has the call.
LATE_S = 0.25
# Far above `BEAT_S`: a replica's event loop may be late when other processes compute on its cores.
SILENCE_S = 30.0
# Budget of items for each core. An item takes 0.14 ms of all processes' time through HAProxy, 0.5 ms through Serve's
# proxy (2 cores, 32 streams, `benchmarks.streaming`): up to 1.5 percent of the machine.
_ITEMS_PER_CORE_S = 30.0
# Budget where the cores are free. The ingress's loop takes 59 us for an item (the replica's 20 us): 0.3 of its time.
_MOST_ITEMS_S = 5000.0
# Largest share of the replica's loop, with the tokens of all steps, requests and reports; and the time after which it
# is measured again.
_LOOP_SHARE, _MEASURED_S = 0.5, 0.5

# A gRPC message holds 4 MiB. An output token takes up to 16 bytes, id and text: all outputs of a call with this many
# tokens fit into half a message, even when a slow reader gets them in one item.
_MOST_TOKENS_BY_VALUE = 131_072

T = TypeVar("T")


async def with_heartbeats(
    items: AsyncGenerator[T, None],
    beat_s: float = BEAT_S,
    beat: Callable[[], Awaitable[Any]] | None = None,
    late: Any = None,
) -> AsyncGenerator[T | Any, None]:
    """The items, and whenever there has been none for `beat_s`, what `beat` returns, or an empty list.

    Args:
        late: comes first, if there is no item within `LATE_S`; `None`: nothing does.
    """
    coming: asyncio.Future[T] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(items))
            await asyncio.wait((coming,), timeout=beat_s if late is None else LATE_S)
            if not coming.done():
                yield late if late is not None else [] if beat is None else await beat() or []
                late = None
                continue
            ended, coming, late = coming, None, None
            try:
                item = ended.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait((coming,))
        await items.aclose()


async def without_heartbeats(
    response: AsyncIterable[Any], silence_s: float, first_s: float | None = None
) -> AsyncGenerator[Any, None]:
    """The items of a replica's stream without heartbeats.

    Args:
        silence_s: time without an item after which the replica counts as lost.
        first_s: the same for the first item; `None`: `silence_s`.

    Raises:
        UnavailableError: the replica is lost.
    """
    items, wait_s = aiter(response), silence_s if first_s is None else first_s
    while True:
        try:
            async with asyncio.timeout(wait_s):
                item = await anext(items)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise UnavailableError(
                f"the engine replica has been silent for {wait_s:g} s; send the request again"
            ) from None
        wait_s = silence_s
        if item != []:
            yield item


async def interleave(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams in order of arrival, each with the number of its stream.

    The first error ends the iteration. At its end, and when it is closed, all streams are closed.
    """
    if len(streams) == 1:  # the common case needs no tasks
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                arrived.put_nowait((number, item))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    for task in pumps:
        task.add_done_callback(arrived.put_nowait)
    num_open = len(pumps)
    try:
        while num_open:
            entry = await arrived.get()
            if isinstance(entry, asyncio.Task):
                num_open -= 1
                entry.result()  # raises the stream's error
            else:
                yield entry
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def fits_by_value(params: SamplingParams) -> bool:
    """Whether every item of a stream with these parameters fits into a message."""
    is_small = params.n == 1 if params.max_tokens is None else params.n * params.max_tokens <= _MOST_TOKENS_BY_VALUE
    return is_small and params.logprobs is None and params.prompt_logprobs is None


def affordable_items_per_s(budget: float, num_items: int, loop_s: float, wall_s: float) -> float:
    """The budget that keeps an event loop's thread below `_LOOP_SHARE`; at most `_MOST_ITEMS_S`.

    All of the thread's time is charged to the items, so a loop that is busy otherwise has fewer. A loop below its share
    does not lower the budget, because perhaps few items were wanted.

    Args:
        budget: the present one, in items per second.
        num_items: in `wall_s` seconds, in which the thread has computed for `loop_s`.
    """
    affordable = _LOOP_SHARE * num_items / max(loop_s, 1e-6)
    if loop_s <= _LOOP_SHARE * wall_s:
        affordable = max(affordable, budget)
    return min(affordable, _MOST_ITEMS_S)


class StreamPace:
    """The pace of one replica's streams. For one event loop.

    Args:
        items_per_s: budget of all streams together; by default `_ITEMS_PER_CORE_S` for each core of the machine, or,
            with free cores, what event loops have time for, if that is more.
        min_interval_s, max_interval_s: bounds of the interval between two items of a stream. Readers notice pauses of
            more than a quarter of a second.
    """

    def __init__(self, items_per_s: float | None = None, *, min_interval_s: float, max_interval_s: float) -> None:
        self._items_per_s = items_per_s
        self._min_interval_s, self._max_interval_s = min_interval_s, max_interval_s
        self._num_streams = 0
        self._free_items_per_s: float | None = None  # with free cores
        self._num_items, self._begun_at, self._begun_loop_s = 0, 0.0, 0.0  # of the measurement

    def use_free_cores(self) -> None:
        """Raise the budget for steps on a GPU: event loops bound the items, and not cores."""
        self._free_items_per_s = _MOST_ITEMS_S

    @contextmanager
    def stream(self) -> Iterator[Pace]:
        """Counts a stream; yields the function that returns the interval between its items, called for each item."""
        self._num_streams += 1
        try:
            yield self.interval_s
        finally:
            self._num_streams -= 1

    def interval_s(self) -> float:
        """The interval for the present number of streams. Counts an item of the calling thread's loop."""
        items_per_s = self._items_per_s
        if items_per_s is None:
            items_per_s = _ITEMS_PER_CORE_S * (os.cpu_count() or 1)
            if self._free_items_per_s is not None:
                items_per_s = max(items_per_s, self._measured(self._free_items_per_s))
        return min(max(self._num_streams / items_per_s, self._min_interval_s), self._max_interval_s)

    def _measured(self, items_per_s: float) -> float:
        """The budget, `items_per_s` until enough time has passed for a new measurement."""
        self._num_items += 1
        now = time.perf_counter()
        if (wall_s := now - self._begun_at) < _MEASURED_S:
            return items_per_s
        loop_s = time.thread_time()
        if wall_s < 2 * _MEASURED_S:  # else there were no items for a while
            items_per_s = affordable_items_per_s(items_per_s, self._num_items, loop_s - self._begun_loop_s, wall_s)
            self._free_items_per_s = items_per_s
        self._num_items, self._begun_at, self._begun_loop_s = 0, now, loop_s
        return items_per_s
