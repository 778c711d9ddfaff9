"""Duplicates of a request whose first caller has died run one at a time; and what an ingress keeps of a call."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from folio.app.engine import SamplingParams
from folio.app.errors import UnavailableError
from folio.app.fleet.messages import Piece
from folio.app.fleet.retry import DeliveredOutputs, DuplicateGuard


class Calls:
    """Calls with a key each, which run until `release`. `running`: their names."""

    def __init__(self) -> None:
        self.guard, self.release = DuplicateGuard(), asyncio.Event()
        self.running: list[str] = []

    async def begin(self, name: str, key: str = "k") -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(name, key))
        await self.turns()
        return task

    async def turns(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _run(self, name: str, key: str) -> None:
        async with self.guard.exclusive(key):
            self.running.append(name)
            try:
                await self.release.wait()
            finally:
                self.running.remove(name)


async def test_one_at_a_time_runs_in_turn() -> None:
    """Regression: a call ran beside another one with its key. Calls with another key run beside."""
    calls = Calls()
    tasks = [await calls.begin(str(number)) for number in range(4)]
    other = await calls.begin("other", "another")
    for number in range(3):
        async with asyncio.timeout(10):
            while str(number) not in calls.running:
                await asyncio.sleep(0)
        await calls.turns()
        assert set(calls.running) == {str(number), "other"}
        tasks[number].cancel()
        while str(number) in calls.running:
            await asyncio.sleep(0)
    calls.release.set()
    await asyncio.gather(*tasks, other, return_exceptions=True)


async def test_the_second_is_refused_if_the_first_does_not_end() -> None:
    guard = DuplicateGuard(ends_within_s=0.01)
    async with guard.exclusive("k"):
        with pytest.raises(UnavailableError, match="earlier copy"):
            async with guard.exclusive("k"):
                pytest.fail("it runs beside the first")
    async with guard.exclusive("k"):
        pass


async def test_an_error_frees_the_key() -> None:
    guard = DuplicateGuard()
    with pytest.raises(ValueError, match="broken"):
        async with guard.exclusive("k"):
            raise ValueError("broken")
    async with guard.exclusive("k"):
        pass


async def test_cancelling_the_second_leaves_the_first() -> None:
    calls = Calls()
    first, second = await calls.begin("first"), await calls.begin("second")
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert calls.running == ["first"]
    third = await calls.begin("third")
    assert calls.running == ["first"]
    calls.release.set()
    await asyncio.gather(first, third)


def test_delivered_tokens_take_few_bytes() -> None:
    """A stream may have 100,000 tokens, and an ingress a thousand streams."""
    params, pieces = SamplingParams(n=2), [Piece("x" * 40, tuple(range(10))) for _ in range(10_000)]
    tracemalloc.start()
    try:
        delivered = DeliveredOutputs(params)
        for piece in pieces:
            delivered.note(piece)
        assert tracemalloc.get_traced_memory()[0] < 8 * 100_000
    finally:
        tracemalloc.stop()
    assert [len(output.token_ids) for output in delivered.begun()] == [100_000, 0]
