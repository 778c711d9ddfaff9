"""Streams between replicas and ingresses: heartbeats, interleaving, pace."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any

import pytest

from folio.app.errors import UnavailableError
from folio.app.fleet import streams
from folio.app.fleet.streams import StreamPace, affordable_items_per_s, interleave, with_heartbeats, without_heartbeats

BEAT_S = 0.01


class Items:
    """A stream of the items in its queue, `None` at its end."""

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


async def test_heartbeats_fill_silence_and_no_item_is_lost() -> None:
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


@pytest.mark.parametrize("is_late", [False, True])
async def test_what_comes_first_when_the_first_item_is_late(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LATE_S", 0.0 if is_late else 60.0)
    items = Items()
    if not is_late:
        items.queue.put_nowait(["a"])
    async with aclosing(with_heartbeats(items(), BEAT_S, late="replica")) as stream:
        assert [await anext(stream), await anext(stream)] == (["replica", []] if is_late else [["a"], []])


async def test_closing_with_heartbeats_closes_the_stream() -> None:
    """Otherwise the request of a client that has gone would go on."""
    for begun in (False, True):
        items = Items()
        stream = with_heartbeats(items(), BEAT_S)
        if begun:
            items.queue.put_nowait(["a"])
        await anext(stream)
        await stream.aclose()
        assert items.closed
        assert len(asyncio.all_tasks()) == 1


async def test_errors_pass_heartbeats() -> None:
    items = Items()
    items.queue.put_nowait(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        await anext(with_heartbeats(items(), BEAT_S))
    assert items.closed


@pytest.mark.parametrize(
    ("items", "limits"),
    [
        ([["a"]], {"silence_s": 0.05, "first_s": 60.0}),
        ([], {"silence_s": 1.0, "first_s": 0.05}),
        ([], {"silence_s": 0.05}),
    ],
)
async def test_a_silent_replica_is_lost(items: list[list[str]], limits: dict[str, float]) -> None:
    """Regression: requests at a machine that had lost its network waited for as long as their clients did."""
    source = Items()
    stream = without_heartbeats(source(), **limits)
    for item in ([], *items) if items else ():
        source.queue.put_nowait(item)
    async with asyncio.timeout(5.0):
        for item in items:
            assert await anext(stream) == item
        with pytest.raises(UnavailableError, match=r"silent for 0\.05 s"):
            await anext(stream)
    assert source.closed


async def test_heartbeats_keep_a_stream_and_are_not_passed_on() -> None:
    source = Items()
    asyncio.get_running_loop().call_later(0.6, source.queue.put_nowait, ["b"])
    asyncio.get_running_loop().call_later(0.6, source.queue.put_nowait, None)
    beating = with_heartbeats(source(), 0.06)
    assert [item async for item in without_heartbeats(beating, silence_s=0.5)] == [["b"]]  # longer than `silence_s`


def streams_of(*sources: list[Any]) -> tuple[list[Items], AsyncGenerator[tuple[int, Any], None]]:
    """Streams with these items already there, and all of them as one."""
    made = [Items() for _ in sources]
    for stream, items in zip(made, sources, strict=True):
        for item in items:
            stream.queue.put_nowait(item)
    return made, interleave([stream() for stream in made])


@pytest.mark.parametrize("num_streams", [0, 1, 3])
async def test_all_items_arrive_in_their_streams_order(num_streams: int) -> None:
    sent = [[f"{i}{j}" for j in range(i + 2)] for i in range(num_streams)]
    arrived: list[list[str]] = [[] for _ in sent]
    async for number, item in streams_of(*([*items, None] for items in sent))[1]:
        arrived[number].append(item)
    assert arrived == sent


async def test_a_ready_item_does_not_wait_for_other_streams() -> None:
    sources, both = streams_of([], ["b", None])
    assert await anext(both) == (1, "b")
    sources[0].queue.put_nowait("a")
    sources[0].queue.put_nowait(None)
    assert await anext(both) == (0, "a")
    assert await anext(both, None) is None


@pytest.mark.parametrize("first", [ValueError("first"), "a"])
@pytest.mark.parametrize("num_streams", [1, 2])
async def test_the_first_error_and_closing_close_all_streams(num_streams: int, first: Any) -> None:
    sources, both = streams_of(*([first], [])[:num_streams])
    if isinstance(first, ValueError):
        with pytest.raises(ValueError, match="first"):
            await anext(both)
    else:
        assert await anext(both) == (0, "a")
        await both.aclose()
    assert all(source.closed for source in sources)


def test_streams_share_a_budget_of_items() -> None:
    pace = StreamPace(100, min_interval_s=0.02, max_interval_s=0.25)
    with ExitStack() as streams:
        first = streams.enter_context(pace.stream())
        assert first() == 0.02, "least interval"
        for _ in range(15):
            streams.enter_context(pace.stream())
        assert first() == 0.16
        with ExitStack() as more:
            for _ in range(80):
                more.enter_context(pace.stream())
            assert first() == 0.25, "largest interval"
        assert first() == 0.16


@pytest.mark.parametrize(
    ("item_us", "other_share", "budget"),
    [(20, 0.2, 5000), (50, 0.4, 2000), (100, 0.1, 4000), (20, 0.7, 0)],
    ids=["as on CPUs", "many tokens", "slow cores", "a busy loop"],
)
def test_items_leave_half_of_the_event_loop(item_us: float, other_share: float, budget: float) -> None:
    """From any budget before, within 20 measurements; where fewer items are wanted, all of them fit."""
    for wanted, start in ((math.inf, 5000.0), (math.inf, 100.0), (budget / 2, 5000.0)):
        items_per_s = start
        for _ in range(20):
            num_items = max(round(min(items_per_s, wanted) / 2), 1)
            loop_s = other_share / 2 + num_items * item_us * 1e-6
            items_per_s = affordable_items_per_s(items_per_s, num_items, loop_s, 0.5)
        if wanted < math.inf:
            assert items_per_s >= wanted
        else:
            assert items_per_s == pytest.approx(budget, rel=0.25, abs=30), "StreamPace keeps 30 for each core"


def spin(seconds: float) -> None:
    ends_at = time.thread_time() + seconds
    while time.thread_time() < ends_at:
        pass


def test_a_gpu_leaves_the_cores_to_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 64 streams on 16 cores got an item every 133 ms, and a step took 7 ms."""
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    intervals = {}
    now = 0.0
    monkeypatch.setattr("folio.app.fleet.streams.time.perf_counter", lambda: now)
    for device in ("cpu", "cuda", "cuda, a busy loop"):
        pace = StreamPace(min_interval_s=0.02, max_interval_s=0.25)
        if device != "cpu":
            pace.use_free_cores()
        with ExitStack() as streams:
            for _ in range(64):
                interval_s = streams.enter_context(pace.stream())
            for _ in range(40):
                now += 0.04
                intervals[device] = interval_s()
                spin(0.03 if "busy" in device else 0)
    assert intervals == {"cpu": 64 / 480, "cuda": 0.02, "cuda, a busy loop": 64 / 480}


def test_a_given_budget_is_kept_on_a_gpu() -> None:
    pace = StreamPace(100, min_interval_s=0.02, max_interval_s=0.25)
    pace.use_free_cores()
    with pace.stream() as first, pace.stream(), pace.stream():
        assert first() == 0.03
