"""Duplicates of a request whose first caller has died run one at a time."""

from __future__ import annotations

import asyncio

import pytest

from folio.app.errors import UnavailableError
from folio.app.fleet import retry
from folio.app.fleet.retry import DuplicateGuard


async def run_until(release: asyncio.Event, guard: DuplicateGuard, key: str, running: list[str], name: str) -> None:
    async with guard.exclusive(key):
        running.append(name)
        try:
            await release.wait()
        finally:
            running.remove(name)


async def test_the_second_begins_after_the_first_is_cancelled() -> None:
    """Regression: both ran."""
    guard, running, release = DuplicateGuard(), [], asyncio.Event()
    first = asyncio.create_task(run_until(release, guard, "k", running, "first"))
    await asyncio.sleep(0)
    second = asyncio.create_task(run_until(release, guard, "k", running, "second"))
    other = asyncio.create_task(run_until(release, guard, "another", running, "other"))
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


async def test_the_second_is_refused_if_the_first_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_ENDS_WITHIN_S", 0.01)
    guard = DuplicateGuard()
    async with guard.exclusive("k"):
        with pytest.raises(UnavailableError, match="earlier copy"):
            async with guard.exclusive("k"):
                pytest.fail("it runs beside the first")
    async with guard.exclusive("k"):
        pass


async def test_one_of_several_runs_and_an_error_frees_the_key() -> None:
    guard, running, release = DuplicateGuard(), [], asyncio.Event()
    tasks = [asyncio.create_task(run_until(release, guard, "k", running, str(number))) for number in range(4)]
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
        async with guard.exclusive("k"):
            raise ValueError("broken")
    async with guard.exclusive("k"):
        pass


async def test_cancelling_the_second_leaves_the_first() -> None:
    guard, running, release = DuplicateGuard(), [], asyncio.Event()
    first = asyncio.create_task(run_until(release, guard, "k", running, "first"))
    second = asyncio.create_task(run_until(release, guard, "k", running, "second"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert running == ["first"]
    third = asyncio.create_task(run_until(release, guard, "k", running, "third"))
    await asyncio.sleep(0)
    assert running == ["first"]
    release.set()
    await asyncio.gather(first, third)
