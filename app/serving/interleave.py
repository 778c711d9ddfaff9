"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


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
