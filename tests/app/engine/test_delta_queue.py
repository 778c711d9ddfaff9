"""Deltas wait for their reader, and the reader for its time."""

from __future__ import annotations

import asyncio
import math

from folio.app.engine.request.delta import Delta, DeltaQueue

GOES_ON, LAST = Delta("r", (1,), "a"), Delta("r", (2,), "b", "stop")


async def test_a_reader_gets_all_that_has_come() -> None:
    queue = DeltaQueue()
    reader = asyncio.create_task(queue.get_all())
    await asyncio.sleep(0)
    assert not reader.done()
    queue.put(GOES_ON)
    queue.put(GOES_ON)
    assert await reader == [GOES_ON, GOES_ON]
    queue.put(LAST)
    assert await queue.get_all() == [LAST]


async def test_a_reader_is_not_woken_before_its_time_but_at_the_end() -> None:
    queue = DeltaQueue()
    for never in (math.inf, asyncio.get_running_loop().time() + 3600):
        reader = asyncio.create_task(queue.get_all(never))
        queue.put(GOES_ON)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not reader.done()
        queue.put(LAST)
        assert await reader == [GOES_ON, LAST]
        queue = DeltaQueue()


async def test_its_time_comes_with_or_without_deltas() -> None:
    queue, loop = DeltaQueue(), asyncio.get_running_loop()
    queue.put(GOES_ON)
    soon = loop.time() + 0.01
    assert await queue.get_all(soon) == [GOES_ON]
    assert loop.time() >= soon
    soon = loop.time() + 0.01
    reader = asyncio.create_task(queue.get_all(soon))
    while loop.time() < soon:
        await asyncio.sleep(0.001)
    assert not reader.done(), "there is nothing to take"
    queue.put(GOES_ON)
    assert await reader == [GOES_ON]


async def test_errors_end_the_wait() -> None:
    queue = DeltaQueue()
    reader = asyncio.create_task(queue.get_all(math.inf))
    await asyncio.sleep(0)
    failed = Delta("r", (), "", error=RuntimeError("x"))  # type: ignore[arg-type]
    queue.put(failed)
    assert await reader == [failed]
