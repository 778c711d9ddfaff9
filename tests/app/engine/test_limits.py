"""How long requests may take, how many may wait, and whose turn it is; in an engine."""

from __future__ import annotations

import asyncio
import math
import pickle
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.config.engine import EngineConfig
from folio.app.engine import AsyncEngine
from folio.app.engine.engine import Engine
from folio.app.engine.report import StepTimes
from folio.app.engine.schedule.load_report import LoadMeter, retry_after_s
from folio.app.errors import DeadlineError, OverloadedError, RequestError
from tests.app.engine.engines import MakeEngine, folder_of, greedy
from tests.conftest import MakeCheckpoint

GREEDY, LONG = greedy(4), greedy(900)


def config(make_checkpoint: MakeCheckpoint, **settings: Any) -> EngineConfig:
    defaults = {"kv_memory_bytes": 8 << 20, "skip_tokenizer_init": True, "max_num_seqs": 1, "num_threads": 1}
    return EngineConfig(model=str(folder_of(make_checkpoint, "tiny")), **(defaults | settings))


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine("tiny", max_num_seqs=1, max_queued_requests=3, fair_tenants=True, max_num_batched_tokens=32)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the engine's clock."""
    ahead = [0.0]
    clock = SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr("folio.app.engine.engine.time", clock)
    return lambda seconds: ahead.append(ahead.pop() + seconds)


def test_a_request_past_its_deadline_ends(engine: Engine, pass_time: Callable[[float], None]) -> None:
    """Whether it runs or waits, and even while nothing can be scheduled; its memory is free at once."""
    engine.submit("runs", [1, 2, 3], LONG, timeout_s=2e3)
    engine.step()
    engine.submit("waits", [1, 2, 3], LONG, timeout_s=1e3)
    engine.submit("in time", [1, 2, 3], GREEDY, timeout_s=1e6)
    pass_time(3e3)
    engine.scheduler.schedule = lambda *_, **__: pytest.fail("a step is computed for nobody")  # type: ignore[method-assign, assignment]
    deltas = engine.step()
    assert [(d.request_id, type(d.error), d.ends_request) for d in deltas] == [
        ("waits", DeadlineError, True),
        ("runs", DeadlineError, True),
    ]
    del engine.scheduler.schedule
    assert engine.report().active_bytes == 0
    while engine.has_work:
        assert not any(delta.error for delta in engine.step())


def test_requests_expire_at_their_deadlines_earliest_first(engine: Engine, pass_time: Callable[[float], None]) -> None:
    """Whatever the order in which they came, and which of them have ended since."""
    for name, timeout_s in (("20", 20.0), ("10", 10.0), ("none", None), ("11", 11.0)):
        engine.submit(name, [1, 2, 3], LONG, timeout_s=timeout_s)
        pass_time(0.1)
    engine.cancel("10")
    engine.submit("10", [1, 2, 3], LONG)  # has no deadline of the last request of this name
    ended = []
    for _ in range(5):
        pass_time(7)
        while (deltas := engine.step()) and deltas[0].error is not None:
            ended.append([delta.request_id for delta in deltas])
    assert ended == [["11"], ["20"]]
    pass_time(1e6)
    assert not any(delta.error for delta in engine.step())
    assert engine.requests.keys() == {"none", "10"}


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf])
def test_a_timeout_that_cannot_pass_is_refused(engine: Engine, timeout_s: float) -> None:
    with pytest.raises(RequestError, match="timeout_s"):
        engine.submit("0", [1], GREEDY, timeout_s=timeout_s)
    assert not engine.has_work


def test_more_requests_than_may_wait_are_refused(engine: Engine) -> None:
    for name in "abcd":  # one of them begins with the next step
        engine.submit(name, [1, 2, 3], GREEDY)
    for _ in range(2):
        with pytest.raises(OverloadedError, match="max_queued_requests") as refused:
            engine.submit("e", [1, 2, 3], GREEDY)
        assert 0 < refused.value.retry_after_s <= 60
        engine.step()
    engine.cancel("a")  # who runs; so another one begins with the next step
    engine.submit("e", [1, 2, 3], GREEDY)
    for name in "bcde":
        engine.cancel(name)


def test_the_error_survives_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(OverloadedError("full", 2.5)))
    assert (type(error), str(error), error.retry_after_s) == (OverloadedError, "full", 2.5)


SLOW = StepTimes(fixed_s=1.0, token_s=0.01, attended_s=0.0)
QUICK = StepTimes(fixed_s=0.001, token_s=0.0, attended_s=0.0)
WAITING = [1000] * 8


@pytest.mark.parametrize(
    ("queued", "step", "most_tokens", "free_tokens", "lately", "expected"),
    [
        # Coming back is worth it when half of them have begun.
        ([500, 500], SLOW, 100, 10**12, {}, (10 + 10) / 2),
        ([5], SLOW, 100, 10**12, {}, 1.05 / 2),
        ([10**9], SLOW, 100, 10**12, {}, 60.0),
        ([1] * 60, SLOW, 100, 10**12, {"ended_requests": 10}, 30.0),  # one a second: 60 of them take a minute
        # Who waits for room in the cache waits longer, by the room that requests have made lately; if any has.
        (WAITING, QUICK, 1000, 0, {}, 60.0),
        (WAITING, QUICK, 1000, 4000, {}, 0.05),  # half of them fit, and are computed at once
        (WAITING, QUICK, 1000, 0, {"freed_tokens": 5000}, 4000 / 500),  # 500 a second
        (WAITING, QUICK, 1000, 3000, {"freed_tokens": 5000}, 1000 / 500),
    ],
)
def test_when_to_come_back(
    queued: list[int], step: StepTimes, most_tokens: int, free_tokens: int, lately: dict[str, int], expected: float
) -> None:
    meter = LoadMeter()
    for name, count in lately.items():
        getattr(meter, name).add(count, 0.0)
    seconds = retry_after_s(queued, step, meter, step_tokens=most_tokens, free_tokens=free_tokens, now=0.0)
    assert seconds == pytest.approx(expected)


async def test_what_was_sent_and_has_not_begun_counts(make_checkpoint: MakeCheckpoint) -> None:
    """Refused before anything is sent; who comes later, when there is room again, is served."""
    engine = AsyncEngine(config(make_checkpoint, max_queued_requests=2))
    running = engine.generate([1, 2], LONG)
    await anext(running)
    waiting = [asyncio.create_task(anext(engine.generate([3], GREEDY))) for _ in range(2)]
    await asyncio.sleep(0)  # both have been sent; whether the thread has seen them makes no difference
    for _ in range(20):
        with pytest.raises(OverloadedError) as refused:
            await anext(engine.generate([4], GREEDY))
        assert refused.value.retry_after_s > 0
    await running.aclose()  # type: ignore[attr-defined]
    await asyncio.gather(*waiting)
    async for _ in engine.generate([4], GREEDY):
        pass
    engine.close()


async def test_a_late_request_of_an_async_engine_raises(make_checkpoint: MakeCheckpoint) -> None:
    engine = AsyncEngine(config(make_checkpoint))
    with pytest.raises(DeadlineError, match="timeout_s"):
        async for _ in engine.generate([1], LONG, timeout_s=1e-6):
            pass
    assert engine.report().active_bytes == 0
    engine.close()


def test_tenants_take_turns(engine: Engine) -> None:
    """Two requests of one tenant came before that of another, and need not all go first."""
    order = []
    for i in range(2):
        engine.submit(f"a{i}", list(range(40)), GREEDY, tenant="a")
    engine.submit("b", list(range(40, 80)), GREEDY, tenant="b")
    while engine.has_work:
        order += [delta.request_id for delta in engine.step() if delta.finished]
    assert order == ["a0", "b", "a1"]


def test_places_in_the_queue(engine: Engine) -> None:
    """Requests by turns of tenants, and one that has not arrived in the engine; those with a token are not told."""
    assert engine.load.progress({}) == {}
    engine.submit("running", [1] * 8, LONG, tenant="a")
    engine.step()
    engine.submit("a 1", [1] * 100, GREEDY, tenant="a")
    engine.submit("a 2", [1] * 10, GREEDY, tenant="a")
    engine.submit("b 1", [1] * 300, GREEDY, tenant="b")
    told = engine.load.progress({"arriving": (50, 20)})
    places = {name: (one.queue, one.computed_tokens, one.prompt_tokens) for name, one in told.items()}
    assert places == {"a 2": (1, 0, 10), "b 1": (2, 0, 300), "a 1": (3, 0, 100), "arriving": (4, 0, 50)}
    expected = [one.expected_s for one in told.values()]
    assert expected == sorted(expected)
    # A request of 900 tokens runs, and may have ended long before: the time is that of its remaining steps at most.
    step_s = engine.recovery.step_times.seconds(1, 1, 9)
    assert told["a 2"].expected_s <= 900 * step_s + engine.recovery.step_times.prefill_s(10, 0, 32) + 0.1
    for name in ("running", "a 1", "a 2"):
        engine.cancel(name)
    engine.step()
    [(name, begun)] = engine.load.progress({}).items()
    assert (name, begun.queue, begun.prompt_tokens) == ("b 1", 0, 300)
    assert 0 < begun.computed_tokens <= 32
    engine.cancel(name)
    assert engine.load.progress({}) == {}
