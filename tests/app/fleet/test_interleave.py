"""Streams that take turns, end, and fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.fleet.streams import interleave


class Source:
    """Yields what it is given when it is told to, and knows when it is closed."""

    def __init__(self, items: list[str], error: Exception | None = None) -> None:
        self.go = asyncio.Semaphore(0)
        self.closed = False
        self._items = items
        self._error = error

    async def stream(self) -> AsyncGenerator[str, None]:
        try:
            for item in self._items:
                await self.go.acquire()
                yield item
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


@pytest.mark.parametrize("num_streams", [0, 1, 3])
def test_everything_arrives(num_streams: int) -> None:
    async def run() -> None:
        sources = [Source([f"{i}{j}" for j in range(i + 2)]) for i in range(num_streams)]
        for source in sources:
            for _ in range(9):
                source.go.release()
        arrived: list[list[str]] = [[] for _ in sources]
        async for number, item in interleave([source.stream() for source in sources]):
            arrived[number].append(item)
        assert arrived == [[f"{i}{j}" for j in range(i + 2)] for i in range(num_streams)]

    asyncio.run(run())


def test_one_that_is_ready_does_not_wait_for_others() -> None:
    async def run() -> None:
        sources = [Source(["a"]), Source(["b"])]
        both = interleave([source.stream() for source in sources])
        sources[1].go.release()
        assert await anext(both) == (1, "b")
        sources[0].go.release()
        assert await anext(both) == (0, "a")
        assert await anext(both, None) is None

    asyncio.run(run())


@pytest.mark.parametrize("num_streams", [1, 2])
def test_the_first_error_closes_all(num_streams: int) -> None:
    async def run() -> None:
        sources = [Source([], ValueError("first")), Source(["never"])][:num_streams]
        with pytest.raises(ValueError, match="first"):
            async for _ in interleave([source.stream() for source in sources]):
                pass
        assert all(source.closed for source in sources)

    asyncio.run(run())


@pytest.mark.parametrize("num_streams", [1, 2])
def test_closing_it_closes_all(num_streams: int) -> None:
    async def run() -> None:
        sources = [Source(["a", "b"]) for _ in range(num_streams)]
        all_of_them = interleave([source.stream() for source in sources])
        sources[0].go.release()
        await anext(all_of_them)
        await all_of_them.aclose()
        assert all(source.closed for source in sources)

    asyncio.run(run())
