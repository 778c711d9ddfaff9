"""The same request twice, of which the first one's caller is dead."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import UnavailableError
from app.fleet import retry as repeats_module
from app.fleet.retry import DuplicateGuard


async def run_until(release: asyncio.Event, repeats: DuplicateGuard, key: str, running: list[str], name: str) -> None:
    async with repeats.exclusive(key):
        running.append(name)
        try:
            await release.wait()
        finally:
            running.remove(name)


def test_the_second_begins_when_the_first_is_cancelled() -> None:
    """Regression: both ran, and the first one for nobody."""

    async def run() -> None:
        repeats, running, release = DuplicateGuard(), [], asyncio.Event()
        first = asyncio.create_task(run_until(release, repeats, "k", running, "first"))
        await asyncio.sleep(0)
        second = asyncio.create_task(run_until(release, repeats, "k", running, "second"))
        other = asyncio.create_task(run_until(release, repeats, "another", running, "other"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert running == ["first", "other"]
        first.cancel()
        while "second" not in running:
            assert "first" not in running or not second.done()
            await asyncio.sleep(0)
        assert running == ["other", "second"]
        release.set()
        await asyncio.gather(second, other)
        assert not repeats._running

    asyncio.run(run())


def test_it_is_refused_when_the_first_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats_module, "_ENDS_WITHIN_S", 0.01)

    async def run() -> None:
        repeats = DuplicateGuard()
        async with repeats.exclusive("k"):
            with pytest.raises(UnavailableError, match="earlier copy"):
                async with repeats.exclusive("k"):
                    pytest.fail("it runs beside the first")
        async with repeats.exclusive("k"):
            pass

    asyncio.run(run())


def test_of_several_only_one_goes_on_and_the_key_is_free_after_an_error() -> None:
    async def run() -> None:
        repeats, running, release = DuplicateGuard(), [], asyncio.Event()
        tasks = [asyncio.create_task(run_until(release, repeats, "k", running, str(number))) for number in range(4)]
        for number in range(3):
            while not running:
                await asyncio.sleep(0)
            for _ in range(3):
                await asyncio.sleep(0)
            assert running == [str(number)]
            tasks[number].cancel()
            while str(number) in running:
                await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(ValueError, match="broken"):
            async with repeats.exclusive("k"):
                raise ValueError("broken")
        assert not repeats._running

    asyncio.run(run())


def test_a_second_that_is_cancelled_while_it_waits_leaves_the_first() -> None:
    async def run() -> None:
        repeats, running, release = DuplicateGuard(), [], asyncio.Event()
        first = asyncio.create_task(run_until(release, repeats, "k", running, "first"))
        second = asyncio.create_task(run_until(release, repeats, "k", running, "second"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert running == ["first"]
        assert list(repeats._running) == ["k"]
        release.set()
        await first
        assert not repeats._running

    asyncio.run(run())
