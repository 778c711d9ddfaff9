"""Signs of life in streams between replicas and ingresses.

A machine that is lost, or a process that is stopped, does not say so, and gRPC asks once in minutes. So a replica sends
an empty list when a stream has had nothing else for a while, and an ingress takes a stream that is silent for a replica
that is gone.

Several streams as one.

How often streams send what has been generated.

An item of a stream costs its way through the replica, the ingress and HAProxy, however many tokens it has. So the
first token of a request leaves at once, and those after it as often as a budget of items a second allows that all
streams of a replica share: few streams send every step, many send several tokens at a time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from app.engine.async_engine import Pace
from app.errors import UnavailableError

BEAT_S = 5.0
# Of a replica that serves: its event loop may be late when many others compute on its cores.
SILENCE_S = 30.0

T = TypeVar("T")


async def with_heartbeats(
    items: AsyncGenerator[T, None], beat_s: float = BEAT_S
) -> AsyncGenerator[T | list[Any], None]:
    """The items as they come, and an empty list whenever none has come for `beat_s`."""
    coming: asyncio.Future[T] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(items))
            await asyncio.wait((coming,), timeout=beat_s)
            if not coming.done():
                yield []
                continue
            ended, coming = coming, None
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
    """The items of a replica's stream, without signs of life.

    Args:
        silence_s: how long it may be silent.
        first_s: how long its first item may take, if that is another time.

    Raises:
        UnavailableError: the replica is gone.
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
    """Items of all streams as they come, each with the number of its stream.

    The first error ends it. Whenever it ends, and when it is closed, all streams are closed.
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
                entry.result()  # raises what it ended with
            else:
                yield entry
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


# At 0.14 ms of all processes' time an item through HAProxy, and 0.5 ms through Serve's proxy, as measured on a machine
# of 2 cores with 32 streams (`benchmarks.streaming`), that is up to 1.5 percent of the machine.
_ITEMS_PER_CORE_S = 30.0


class StreamPace:
    """The pace of one replica's streams.

    Args:
        items_per_s: of all streams together; by default `_ITEMS_PER_CORE_S` for each core of the machine.
        min_interval_s, max_interval_s: between two items of a stream, whatever the budget says. A reader notices
            pauses of more than a quarter of a second.
    """

    def __init__(self, items_per_s: float | None = None, *, min_interval_s: float, max_interval_s: float) -> None:
        self._items_per_s = items_per_s
        self._min_interval_s, self._max_interval_s = min_interval_s, max_interval_s
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[Pace]:
        """Counts as a stream while it is open; yields how long it shall wait from one item to the next."""
        self._num_streams += 1
        try:
            yield self.interval_s
        finally:
            self._num_streams -= 1

    def interval_s(self) -> float:
        """With as many streams as there are now."""
        items_per_s = self._items_per_s or _ITEMS_PER_CORE_S * (os.cpu_count() or 1)  # of the machine that it runs on
        return min(max(self._num_streams / items_per_s, self._min_interval_s), self._max_interval_s)
