"""One look a second for all viewers, none without viewers, and nothing that piles up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

import pytest

from folio.app.dashboard.collector import MOST_VIEWERS, Collector, Wish
from folio.app.dashboard.state import DashboardState, Load, ReplicaState, Steps
from folio.app.dashboard.traffic import EndedRequest, TrafficLog
from folio.app.dashboard.views import ReplicaView, WatchCall
from folio.app.errors import OverloadedError
from folio.app.fleet.decisions import DECISIONS
from tests.processes import until_async

_LOAD = dict.fromkeys(Load.model_fields, 1)


class Replicas:
    """Replicas by name; `details` are asked for by the call."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_silent = 0
        self.is_open = True
        self.calls: list[WatchCall] = []

    async def look(self, call: WatchCall) -> tuple[Sequence[ReplicaView], int]:
        self.calls.append(call)
        await self.may_answer.wait()
        views = []
        for name in self.names:
            last = call.since.get(name, 0) + 3
            state = ReplicaState(
                name=name, model="m", age_s=1, load=_LOAD, memory=None, maps=(), steps=Steps(), last_step=last
            )
            wanted = call.details is None or name in call.details
            detail = '{"maps":[],"sequences":[],"num_sequences":0,"parked":[],"num_parked":0,"region_blocks":[]}'
            views.append(ReplicaView(name, last, state.model_dump_json(), detail if wanted else None))
        return views, self.num_silent

    async def num_starting(self) -> int:
        return 2


def collector_of(replicas: Replicas, traffic: TrafficLog | None = None) -> Collector:
    return Collector(replicas, traffic or TrafficLog(), "m", links={"Grafana": "https://g.example"}, period_s=0.01)


def parse(event: str) -> DashboardState:
    [data] = [line for line in event.splitlines() if line.startswith("data: ")]
    return DashboardState.model_validate_json(data[6:])


async def states(collector: Collector, wish: Wish = Wish()) -> Callable[[], Awaitable[DashboardState]]:  # noqa: B008
    """Returns the next state of an open stream."""
    events = collector.events(wish)
    assert (await anext(events)).startswith("retry:")

    async def take() -> DashboardState:
        async with asyncio.timeout(30):
            return parse(await anext(events))

    return take


async def test_nobody_watches_nothing_is_done() -> None:
    replicas, traffic = Replicas("a"), TrafficLog()
    collector = collector_of(replicas, traffic)
    await asyncio.sleep(0)
    assert not replicas.calls
    assert not traffic.is_on
    async with aclosing(collector.events(Wish())) as events:
        await anext(events)
        await anext(events)
        assert traffic.is_on
        assert DECISIONS.is_on
    await until_async(lambda: not traffic.is_on)
    assert not DECISIONS.is_on
    num_calls = len(replicas.calls)
    await asyncio.sleep(0.05)  # five periods
    assert len(replicas.calls) == num_calls


async def test_viewers_share_looks_and_each_gets_the_details_it_wants() -> None:
    replicas = Replicas(*(f"r{i}" for i in range(64)))
    collector = collector_of(replicas)
    first = await states(collector, Wish.of(["r1"], []))
    second = await states(collector, Wish.of(["r2", "r3"], ["chat-1"]))
    for _ in range(5):
        one, two = await asyncio.gather(first(), second())
    assert one.at == two.at
    assert [replica.name for replica in one.replicas] == sorted(replicas.names)
    assert one.num_viewers == 2
    assert one.num_starting == 2
    assert one.links == {"Grafana": "https://g.example"}
    assert one.details.keys() == {"r1"}
    assert two.details.keys() == {"r2", "r3"}
    assert replicas.calls[-1].details == {"r1", "r2", "r3"}
    assert replicas.calls[-1].requests == {"chat-1"}
    assert len(replicas.calls) <= 7
    assert replicas.calls[-1].since["r5"] == 3 * (len(replicas.calls) - 1)


async def test_a_few_replicas_are_all_shown_in_detail() -> None:
    replicas = Replicas("a", "b")
    take = await states(collector_of(replicas))
    await take()
    assert (await take()).details.keys() == {"a", "b"}


async def test_a_slow_viewer_skips_states() -> None:
    replicas = Replicas("a")
    collector = collector_of(replicas)
    slow, quick = await states(collector), await states(collector)
    first = await slow()
    for _ in range(10):
        await quick()
    second = await slow()
    assert second.at - first.at > 0.05


async def test_viewers_are_bounded() -> None:
    collector = collector_of(Replicas("a"))
    streams = [await states(collector) for _ in range(MOST_VIEWERS)]
    with pytest.raises(OverloadedError, match=f"{MOST_VIEWERS} viewers"):
        await collector.state(Wish())
    assert len(streams) == collector.num_viewers


async def test_streams_end_when_the_server_drains() -> None:
    replicas = Replicas("a")
    collector = collector_of(replicas)
    take = await states(collector)
    await take()
    replicas.is_open = False
    with pytest.raises(StopAsyncIteration):
        [await take() for _ in range(1000)]
    assert collector.num_viewers == 0


async def test_replicas_come_go_and_fall_silent() -> None:
    replicas = Replicas("a", "b")
    take = await states(collector_of(replicas))
    assert (await take()).events == ()
    replicas.names.append("c")
    await take()
    assert [(e.kind, e.replica) for e in (await take()).events] == [("came", "c")]
    replicas.names.remove("a")
    replicas.num_silent = 1
    await take()
    assert (await take()).events[0].kind == "silent"
    replicas.num_silent = 0
    await take()
    assert [(e.kind, e.replica) for e in (await take()).events] == [("went", "a"), ("silent", "a"), ("came", "c")]


async def test_a_failed_look_ends_the_streams_and_the_next_viewer_starts_again() -> None:
    replicas = Replicas("a")
    collector = collector_of(replicas)
    take = await states(collector)
    await take()
    names, replicas.names = replicas.names, None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        [await take() for _ in range(1000)]
    replicas.names = names
    assert json.loads(await collector.state(Wish()))["replicas"][0]["name"] == "a"


async def test_a_viewer_that_was_reading_while_a_look_failed_is_not_stranded() -> None:
    """It waited for ever, and kept its place: only a new viewer began the looks again."""
    replicas = Replicas("a")
    collector = collector_of(replicas)
    take = await states(collector)
    await take()
    names, replicas.names = replicas.names, None  # type: ignore[assignment]
    await until_async(lambda: not DECISIONS.is_on)  # the looks have ended
    replicas.names = names
    assert (await take()).replicas[0].name == "a"


async def test_the_state_once_has_its_details_while_others_watch() -> None:
    """It came from the look in progress, which had begun without the wish."""
    replicas = Replicas(*"abcdef")
    collector = collector_of(replicas)
    take = await states(collector, Wish.of("a", []))
    await take()
    num_before = len(replicas.calls)
    replicas.may_answer.clear()
    await until_async(lambda: len(replicas.calls) > num_before)
    once = asyncio.create_task(collector.state(Wish.of("b", [])))
    await asyncio.sleep(0)
    replicas.may_answer.set()
    async with asyncio.timeout(30):
        assert json.loads(await once)["details"].keys() == {"b"}


async def test_a_replica_that_was_silent_goes_on_where_it_was() -> None:
    """All its steps came again, and counted as those of the last second."""
    replicas = Replicas("a", "b")
    take = await states(collector_of(replicas))
    await take()
    await take()
    replicas.names.remove("a")
    replicas.num_silent = 1
    async with asyncio.timeout(30):
        while not (await take()).num_silent:
            pass
    known = replicas.calls[-1].since["a"]
    await take()
    await take()
    assert replicas.calls[-1].since["a"] == known > 0
    replicas.num_silent = 0
    await take()
    await take()
    assert replicas.calls[-1].since.keys() == {"b"}


def test_traffic_has_rates_and_percentiles() -> None:
    traffic = TrafficLog()
    assert traffic.summary().requests_per_s == 0
    traffic.start()
    for number in range(100):
        ended = {"prompt_tokens": 40, "cached_tokens": 10, "output_tokens": 7, "token_s": [0.5] * 64}
        traffic.note(EndedRequest(is_ok=number % 10 > 0, first_s=number / 100, whole_s=number, **ended))
    found = traffic.summary()
    assert found.requests_per_s == 100
    assert found.failed_per_s == 10
    assert found.output_tokens_per_s == 700
    assert found.cached_tokens / found.prompt_tokens == 0.25
    assert found.ttft_s.p50 == pytest.approx(0.495)
    assert found.ttft_s.num == 100
    assert found.tpot_s.p99 == 0.5
    assert found.whole_s.num == 90  # of complete answers
    traffic.stop()
    assert not traffic.is_on
    assert traffic.summary().prompt_tokens == 0
