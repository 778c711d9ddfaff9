"""Signs of life in streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from app.errors import UnavailableError
from app.fleet.streams import with_heartbeats, without_heartbeats

BEAT_S = 0.01


class Items:
    """Items that come when they are put; notes how it is left."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.closed = False

    async def __call__(self) -> AsyncGenerator[Any, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


def test_a_silent_stream_beats_and_loses_nothing() -> None:
    async def run() -> None:
        items = Items()
        async with aclosing(with_heartbeats(items(), BEAT_S)) as stream:
            assert [await anext(stream) for _ in range(3)] == [[], [], []]
            items.queue.put_nowait(["a"])
            items.queue.put_nowait(7)
            assert [item for item in [await anext(stream), await anext(stream)] if item != []] == [["a"], 7]
            assert await anext(stream) == []
            items.queue.put_nowait(None)
            assert [item async for item in stream if item != []] == []
        assert items.closed

    asyncio.run(run())


def test_its_end_ends_what_it_waits_for() -> None:
    """A client that leaves while its request waits: else that would run on at the engine."""

    async def run() -> None:
        for begun in (False, True):
            items = Items()
            stream = with_heartbeats(items(), BEAT_S)
            if begun:
                items.queue.put_nowait(["a"])
            await anext(stream)
            await stream.aclose()
            assert items.closed
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_errors_come_through() -> None:
    async def run() -> None:
        items = Items()
        items.queue.put_nowait(ValueError("x"))
        with pytest.raises(ValueError, match="x"):
            await anext(with_heartbeats(items(), BEAT_S))
        assert items.closed

    asyncio.run(run())


def test_a_replica_that_is_gone_without_a_word() -> None:
    """Two requests at a machine that had lost its network waited for as long as their clients did."""

    async def run() -> None:
        items = Items()
        stream = without_heartbeats(items(), silence_s=0.05, first_s=60.0)
        items.queue.put_nowait([])
        items.queue.put_nowait(["a"])
        assert await anext(stream) == ["a"]
        with pytest.raises(UnavailableError, match=r"silent for 0\.05 s"):
            await anext(stream)
        assert items.closed

    asyncio.run(run())


def test_signs_of_life_are_heard_but_not_passed_on() -> None:
    async def run() -> None:
        items = Items()

        async def slowly() -> None:
            for _ in range(10):
                await asyncio.sleep(0.06)
                items.queue.put_nowait([])
            items.queue.put_nowait(["b"])
            items.queue.put_nowait(None)

        task = asyncio.create_task(slowly())
        assert [item async for item in without_heartbeats(items(), silence_s=0.5)] == [["b"]]  # 0.6 s later
        await task

    asyncio.run(run())
