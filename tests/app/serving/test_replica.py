"""A replica without a cluster, mostly with an engine that returns given deltas."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.config.engine import EngineConfig
from folio.app.engine import AsyncEngine
from folio.app.engine.model.fingerprints import Fingerprints
from folio.app.engine.report import StartTimes
from folio.app.errors import UnavailableError, UnknownRequestError
from folio.app.fleet.messages import HotPrefixes, SharedStreamCall, SharedStreamKey
from folio.app.serving import replica as replica_module
from folio.vmem import CachedPrefix
from tests.app.replica.given_deltas import DELTAS, REQUEST, Engine
from tests.local_server import replica_of


async def test_the_hot_prefixes() -> None:
    replica = replica_of(engine := Engine(DELTAS))
    engine.hot_prefixes = lambda: [CachedPrefix((1,), (), 2)]  # type: ignore[attr-defined]
    engine.fingerprints = Fingerprints("f", "o")  # type: ignore[attr-defined]
    assert await replica.hot_prefixes("f") == HotPrefixes("f", [CachedPrefix((1,), (), 2)])
    assert await replica.hot_prefixes("g") is None


def test_a_replica_whose_budget_cannot_change_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the thread that shares memory ended, and the replica went on, its budget counted for ever."""
    member = SimpleNamespace(healthy=True, close=lambda: None, wait_for_budget=lambda: None, attach=None)
    member.follow = lambda load: None
    monkeypatch.setattr(replica_module, "member_of_this_replica", lambda *_: member)
    engine = SimpleNamespace(healthy=True, check=lambda: None, close=lambda: None, load=lambda: None)
    replica = replica_of(engine, shared_kv_memory_bytes=1 << 20)
    replica.check_health()
    member.healthy = False
    with pytest.raises(UnavailableError, match="budget"):
        replica.check_health()
    replica_of(engine).check_health()


async def test_nothing_waits_for_the_memory_on_the_event_loop() -> None:
    """Regression: reports for routers, the budget and pins took the memory's lock in the loop that all streams and
    health checks share. The lock is held here until the loop has gone on."""
    engine = AsyncEngine(EngineConfig(model="builtin", kv_memory_bytes=16 << 20, warm_up=False))
    replica = replica_of(engine)
    memory, held, loop_went_on = engine.driver.engine.memory, threading.Event(), threading.Event()
    in_time: list[bool] = []

    def hold() -> None:
        with memory.lock:
            held.set()
            in_time.append(loop_went_on.wait(60))

    await replica.pin("a", list(range(64)), None)
    holder = threading.Thread(target=hold)
    holder.start()
    await asyncio.to_thread(held.wait, 60)
    asked = [
        asyncio.ensure_future(call)
        for call in (
            replica.status(),
            replica.record_routing_stats(),
            replica.record_autoscaling_stats(),
            replica.set_budget(12 << 20, 1),
            replica.hot_prefixes("f"),
            replica.unpin("a"),
            replica.pin("b", list(range(64)), None),
        )
    ]
    await asyncio.sleep(0)  # each of them has begun
    replica.check_health()
    loop_went_on.set()
    assert (await asyncio.gather(*asked))[3] in ("applied", "deferred")
    await asyncio.to_thread(holder.join, 60)
    assert in_time == [True]
    engine.unpin("b")
    engine.close()


async def test_a_call_that_hangs_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(replica_module, "_ANSWER_S", 0.01)
    engine = SimpleNamespace(set_budget=lambda *_: go_on.wait(60), close=lambda: None)

    try:
        with pytest.raises(UnavailableError, match="has not answered"):
            await replica_of(engine).set_budget(1, 1)
    finally:
        go_on.set()


@pytest.mark.parametrize("first_asked", ["generate_stream", "record_routing_stats", "check_health"])
async def test_a_stopped_engine_ends_its_process_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch, first_asked: str
) -> None:
    """Regression: only a health check ended the process, and until then routers took the replica for idle."""
    timers: list[str] = []

    def timer(seconds: float, ends: Callable[..., None], _: tuple[int]) -> SimpleNamespace:
        if seconds < 60:  # not that of a replica which is closed meanwhile
            timers.append(ends.__name__)
        return SimpleNamespace(start=lambda: None, cancel=lambda: None)

    def check() -> None:
        raise UnavailableError("the engine has stopped")

    engine: Any = Engine([], UnavailableError("the engine has stopped"))
    engine.healthy, engine.check, engine.load = False, check, lambda **_: check()
    engine.speculation, engine.start_times = None, StartTimes()
    monkeypatch.setattr(replica_module.threading, "Timer", timer)
    replica = replica_of(engine)

    async def call() -> None:
        if first_asked == "generate_stream":
            await anext(replica.generate_stream(REQUEST))
        else:
            await getattr(replica, first_asked)()

    for _ in range(2):
        with pytest.raises(UnavailableError):
            await call()
    assert timers == ["_exit"]


async def test_only_its_own_shared_stream() -> None:
    """A shared stream of another replica would carry pieces of other requests."""
    replica = replica_of(Engine(DELTAS), "here")
    with pytest.raises(UnknownRequestError):
        await anext(replica.open_shared_stream(SharedStreamCall("i", 1, "there")))
    stream = replica.open_shared_stream(SharedStreamCall("i", 1, "here"))
    opening = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    request = replace(REQUEST, share=SharedStreamKey("i", 7))
    own = [item async for item in replica.generate_stream(request)]
    assert [item if isinstance(item, int) else [p.text for p in item] for item in own] == [["a"], 1]
    assert [entry[:2] for entry in await opening] == [(7, "b"), (7, "c")]
    await stream.aclose()
