"""A replica without a cluster, mostly with an engine that returns given deltas."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.config.engine import EngineConfig
from app.engine import AsyncEngine, Delta, SamplingParams
from app.engine.async_engine import Pace
from app.engine.pooled import PoolingParams
from app.engine.report import StartTimes
from app.engine.turn import Turn
from app.errors import DeadlineError, OverloadedError, UnavailableError, UnknownRequestError
from app.fleet.messages import (
    ExpectedPrefix,
    ForkCall,
    GenerateRequest,
    HotPrefixes,
    Piece,
    SharedStreamCall,
    SharedStreamKey,
)
from app.fleet.streams import StreamPace
from app.serving import replica as replica_module
from tests.local_server import replica_of
from vmem import CachedPrefix

DELTAS = [
    Delta("r", (1,), "a", index=0, num_cached_tokens=3),
    Delta("r", (2,), "", index=1, num_cached_tokens=3),
    Delta("r", (3,), "b", "stop", index=1, num_cached_tokens=3, num_unfinished=1),
    Delta("r", (4,), "c", "length", index=0, num_cached_tokens=3),
]


class Engine:
    """Yields deltas and records its calls."""

    healthy = True

    def __init__(self, deltas: list[Delta], error: Exception | None = None) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.paces: list[Pace] = []
        self.closed = 0
        self._deltas = deltas
        self._error = error

    def generate(self, *args: Any, pace: Pace, **options: Any) -> AsyncGenerator[list[Delta], None]:
        self.paces.append(pace)
        self.asked.append((*args, options))
        return self._yield()

    def fork(self, *args: Any, pace: Pace, **options: Any) -> AsyncGenerator[list[Delta], None]:
        self.paces.append(pace)
        self.asked.append((*args, options))
        return self._yield()

    def close(self) -> None:
        pass

    async def _yield(self) -> AsyncGenerator[list[Delta], None]:
        try:
            for delta in self._deltas:
                yield [delta]
            if self._error is not None:
                raise self._error
        finally:
            self.closed += 1


class Audit:
    """`RoutingAudit` that records its notes."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []

    def note(self, expected_tokens: int, cached_tokens: int) -> None:
        self.noted.append((expected_tokens, cached_tokens))


async def outputs_of(replica: Any, call: GenerateRequest | ForkCall) -> list[Piece]:
    """Each output in one piece."""
    [outputs] = [item async for item in replica.complete_as_stream(call)]
    return cast(list[Piece], outputs)


def replica_with(engine: Any, audit: Audit | None = None) -> Any:
    return replica_of(engine, "here", StreamPace(10, min_interval_s=0.05, max_interval_s=1.0), audit)


REQUEST = GenerateRequest(
    "r",
    [1, 2],
    SamplingParams(n=2),
    priority=1,
    cache_salt="s",
    adapter="a",
    tenant="t",
    user="u",
    timeout_s=2.0,
    turn=Turn("tools", ("<call>",)),
    cache_ttl_s=60.0,
    owner="key:k",
    expected=ExpectedPrefix("here", 4),
    pooling=PoolingParams(dimensions=3),
)


async def test_outputs_whole_and_in_pieces() -> None:
    replica = replica_with(engine := Engine(DELTAS), audit := Audit())
    whole = await outputs_of(replica, REQUEST)
    assert [(p.index, p.text, p.token_ids, p.finish_reason) for p in whole] == [
        (0, "ac", (1, 4), "length"),
        (1, "b", (2, 3), "stop"),
    ]
    pieces = [piece async for some in replica.generate_stream(REQUEST) for piece in some]
    assert [(p.index, p.text, p.token_ids) for p in pieces] == [(0, "a", (1,)), (1, "b", (2, 3)), (0, "c", (4,))]
    assert [p.ends_request for p in pieces] == [False, False, True]
    assert {(p.replica, p.num_cached_tokens) for p in whole + pieces} == {("here", 3)}
    assert audit.noted == [(4, 3)] * 2
    whole_pace, stream_pace = engine.paces
    assert whole_pace() == math.inf, "the answer is read at its end"
    assert stream_pace() == 0.05


async def test_the_engine_gets_every_option() -> None:
    replica = replica_with(engine := Engine(DELTAS))
    await outputs_of(replica, REQUEST)
    options: dict[str, Any] = {
        "priority": 1,
        "cache_salt": "s",
        "adapter": "a",
        "tenant": "t",
        "user": "u",
        "timeout_s": 2.0,
        "turn": Turn("tools", ("<call>",)),
        "cache_ttl_s": 60.0,
        "owner": "key:k",
    }
    options |= {"expected_cached_tokens": 4, "pooling": PoolingParams(dimensions=3)}
    assert engine.asked == [([1, 2], REQUEST.params, "r", options)]


async def test_prompts_beside_each_other_are_outputs_of_one_call() -> None:
    engine = Engine([Delta("r", (), "", "stop", num_cached_tokens=3, pooled=b"1234")])
    replica = replica_with(engine, audit := Audit())
    pieces = await outputs_of(replica, replace(REQUEST, params=SamplingParams(), beside=([3], [4, 5])))
    assert [asked[0] for asked in engine.asked] == [[1, 2], [3], [4, 5]]
    assert [asked[3]["expected_cached_tokens"] for asked in engine.asked] == [4, None, None]
    assert [(piece.index, piece.pooled) for piece in pieces] == [(0, b"1234"), (1, b"1234"), (2, b"1234")]
    assert sorted(piece.num_unfinished for piece in pieces) == [0, 1, 2]
    assert audit.noted == [(4, 3)], "the router expects a prefix of the first prompt only"


async def test_a_closed_stream_ends_its_request() -> None:
    replica = replica_with(engine := Engine(DELTAS))
    pieces = replica.generate_stream(REQUEST)
    await anext(pieces)
    await pieces.aclose()
    assert engine.closed == 1


async def test_errors_come_through() -> None:
    replica = replica_with(Engine(DELTAS[:1], DeadlineError("too late")))
    with pytest.raises(DeadlineError):
        await outputs_of(replica, REQUEST)
    with pytest.raises(DeadlineError):
        _ = [piece async for piece in replica.generate_stream(REQUEST)]


@pytest.mark.parametrize("error", [OverloadedError("full", 2.0), UnavailableError("stopped")])
async def test_a_refusal_names_the_replica(error: OverloadedError | UnavailableError) -> None:
    replica = replica_with(Engine([], error))
    with pytest.raises(type(error)) as refused:
        await outputs_of(replica, REQUEST)
    assert refused.value.replica == "here"


async def test_forks() -> None:
    replica = replica_with(engine := Engine(DELTAS))
    call = ForkCall("f", "r", 1, "here", SamplingParams(n=2), 3.0, "key:k")
    whole = await outputs_of(replica, call)
    assert [piece.text for piece in whole] == ["ac", "b"]
    assert "".join([piece.text async for some in replica.generate_stream(call) for piece in some]) == "abc"
    assert engine.asked == [("r", call.params, "f", {"index": 1, "timeout_s": 3.0, "owner": "key:k"})] * 2


async def test_a_fork_of_another_replicas_request() -> None:
    replica = replica_with(engine := Engine(DELTAS))
    call = ForkCall("f", "r", 0, "another", SamplingParams())
    with pytest.raises(UnknownRequestError, match="is gone"):
        await outputs_of(replica, call)
    with pytest.raises(UnknownRequestError, match="is gone"):
        _ = [piece async for piece in replica.generate_stream(call)]
    assert not engine.asked


async def test_the_hot_prefixes() -> None:
    replica = replica_with(engine := Engine(DELTAS))
    engine.hot_prefixes = lambda: [CachedPrefix((1,), (), 2)]  # type: ignore[attr-defined]
    engine.prefix_fingerprint = "f"  # type: ignore[attr-defined]
    assert await replica.hot_prefixes("f") == HotPrefixes("f", [CachedPrefix((1,), (), 2)])
    assert await replica.hot_prefixes("g") is None


def test_a_replica_whose_budget_cannot_change_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the thread that shares memory ended, and the replica went on, its budget counted for ever."""
    member = SimpleNamespace(healthy=True, close=lambda: None, wait_for_budget=lambda: None, attach=None)
    member.follow = lambda load: None
    monkeypatch.setattr(replica_module, "BudgetMember", lambda *_: member)
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
    replica = replica_with(engine)
    memory, held, loop_went_on = engine._engine.memory, threading.Event(), threading.Event()
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
            replica.named_report(),
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
    assert (await asyncio.gather(*asked))[4] in ("applied", "deferred")
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
            await replica_with(engine).set_budget(1, 1)
    finally:
        go_on.set()


@pytest.mark.parametrize("first_asked", ["complete_as_stream", "record_routing_stats", "check_health"])
async def test_a_stopped_engine_ends_its_process_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch, first_asked: str
) -> None:
    """Regression: only a health check ended the process, and until then routers took the replica for idle."""
    timers: list[Callable[..., None]] = []

    def timer(_: float, ends: Callable[..., None], __: tuple[int]) -> SimpleNamespace:
        timers.append(ends)
        return SimpleNamespace(start=lambda: None)

    def check() -> None:
        raise UnavailableError("the engine has stopped")

    engine: Any = Engine([], UnavailableError("the engine has stopped"))
    engine.healthy, engine.check, engine.load = False, check, lambda **_: check()
    engine.speculation, engine.start_times = None, StartTimes()
    monkeypatch.setattr(replica_module.threading, "Timer", timer)
    replica = replica_with(engine)

    async def call() -> None:
        if first_asked == "complete_as_stream":
            await outputs_of(replica, REQUEST)
        else:
            await getattr(replica, first_asked)()

    for _ in range(2):
        with pytest.raises(UnavailableError):
            await call()
    assert timers == [replica_module.os._exit]


async def test_a_repeated_request_never_runs_beside_the_first() -> None:
    """Regression: a request whose ingress had died was computed twice at once when it was sent again."""
    engine = Engine(DELTAS)
    replica = replica_with(engine)
    request = replace(REQUEST, repeat_key="k")
    first = replica.generate_stream(request)
    await anext(first)
    second = asyncio.ensure_future(outputs_of(replica, request))
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(engine.asked) == 1
    await first.aclose()
    assert [piece.text for piece in await second] == ["ac", "b"]
    assert (len(engine.asked), engine.closed) == (2, 2)


async def test_only_its_own_shared_stream() -> None:
    """A shared stream of another replica would carry pieces of other requests."""
    replica = replica_with(Engine(DELTAS))
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
