"""Collector: polls the replicas once a second while there are viewers, for all viewers of an ingress together."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from folio.app.dashboard.state import Candidate, DashboardState, Decision, FleetEvent
from folio.app.dashboard.traffic import TrafficLog
from folio.app.dashboard.views import ReplicaView, WatchCall
from folio.app.errors import OverloadedError
from folio.app.fleet.decisions import DECISIONS

PERIOD_S = 1.0
# Share of the period between two polls while a viewer follows a request: pages of a short answer come and go at once.
_FAST = 0.1
# A stream ends after this time, and its client opens another one: so an ingress that Serve stops is rid of its viewers,
# and a stalled client has no more than this in buffers.
STREAM_S = 120.0
MOST_VIEWERS = 32
# The most replicas in one viewer's details. A viewer that has chosen none gets the details of all, up to this number.
MOST_DETAILS = 4
_MOST_REQUESTS = 8
_MOST_EVENTS = 50
# After this time without an answer a replica is gone, whatever Serve says.
_SILENT_S = 30.0


@dataclass(frozen=True, slots=True)
class Wish:
    """A viewer's selection: the replicas to show in detail, and requests to show among their sequences.

    Attributes:
        is_fast: polls come ten times as often.
    """

    replicas: frozenset[str] = frozenset()
    requests: frozenset[str] = frozenset()
    is_fast: bool = False

    @staticmethod
    def of(replicas: Iterable[str], requests: Iterable[str], *, is_fast: bool = False) -> Wish:
        """The selection, cut to the numbers that are allowed."""
        chosen, followed = sorted(set(replicas))[:MOST_DETAILS], sorted(set(requests))[:_MOST_REQUESTS]
        return Wish(frozenset(chosen), frozenset(followed), is_fast)


class Source(Protocol):
    """The replicas behind an ingress."""

    @property
    def is_open(self) -> bool:
        """Whether viewers may stay: false once the server drains."""
        ...

    async def look(self, call: WatchCall) -> tuple[Sequence[ReplicaView], int]:
        """Poll the replicas. Returns the answers, and the number of replicas that have not answered."""
        ...

    async def num_starting(self) -> int: ...


@dataclass
class _Tick:
    """One poll of the replicas."""

    number: int
    common: str  # the JSON of a state without replicas, up to its closing brace
    views: list[ReplicaView]


@dataclass
class _Roster:
    """The replicas known so far, and when they came and went."""

    seen: dict[str, float] | None = None
    silent: set[str] = field(default_factory=set)
    events: deque[tuple[float, Literal["came", "went", "silent", "back"], str]] = field(
        default_factory=lambda: deque(maxlen=_MOST_EVENTS)
    )

    def note(self, names: Iterable[str], num_silent: int, now: float) -> None:
        """Note the replicas that have answered. Those of the first poll came earlier, which is no event."""
        present = set(names)
        if self.seen is None:
            self.seen = dict.fromkeys(present, now)
        for name in present:
            if name not in self.seen:
                self.events.appendleft((now, "came", name))
            elif name in self.silent:
                self.events.appendleft((now, "back", name))
            self.seen[name] = now
        self.silent -= present
        for name in self.seen.keys() - present:
            if not num_silent or now - self.seen[name] > _SILENT_S:
                self.events.appendleft((now, "went", name))
                self.silent.discard(name)
                del self.seen[name]
            elif name not in self.silent:
                self.silent.add(name)
                self.events.appendleft((now, "silent", name))


class Collector:
    """Polls all replicas once a second, for all viewers together; not without viewers. For one event loop.

    A viewer that reads slowly skips states: it holds one at most.

    Args:
        model: name of the model.
        links: name → URL, for the page.
    """

    def __init__(
        self,
        source: Source,
        traffic: TrafficLog,
        model: str,
        *,
        links: Mapping[str, str] | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._source = source
        self._traffic = traffic
        self._model = model
        self._links = dict(links or {})
        self._period_s = period_s
        self._wishes: Counter[Wish] = Counter()
        self._since: dict[str, int] = {}
        self._roster = _Roster()
        self._num_looks = 0
        self._next: asyncio.Future[_Tick] | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()  # set by a new viewer, for a poll soon

    @property
    def num_viewers(self) -> int:
        return self._wishes.total()

    async def state(self, wish: Wish) -> str:
        """The state once, as JSON. Raises `OverloadedError` if there are too many viewers."""
        with self._watching(wish):
            num_before = self._num_looks
            while (tick := await self._next_tick()).number <= num_before:  # that poll began without this wish
                pass
            return self._json(tick, wish)

    async def events(self, wish: Wish) -> AsyncGenerator[str, None]:
        """The states as server-sent events, until the server drains or for `STREAM_S`. Raises `OverloadedError` before
        the first event if there are too many viewers."""
        until = time.monotonic() + STREAM_S
        with self._watching(wish):
            yield "retry: 1000\n\n"
            while self._source.is_open and time.monotonic() < until:
                tick = await self._next_tick()
                yield f"id: {tick.number}\nevent: state\ndata: {self._json(tick, wish)}\n\n"

    @contextmanager
    def _watching(self, wish: Wish) -> Iterator[None]:
        if self.num_viewers >= MOST_VIEWERS:
            raise OverloadedError(
                f"{MOST_VIEWERS} viewers watch this ingress already, which is the most; close one, or try again later",
                STREAM_S,
            )
        self._wishes[wish] += 1
        self._wake.set()
        try:
            yield
        finally:
            self._wishes[wish] -= 1
            if not self._wishes[wish]:
                del self._wishes[wish]

    async def _next_tick(self) -> _Tick:
        """The next poll that ends. Any number of viewers wait for the same one."""
        if self._task is None or self._task.done():  # here, so that a viewer is not stranded by a failed poll
            self._task = asyncio.create_task(self._run())
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._next)

    async def _run(self) -> None:
        """Poll until there are no viewers."""
        self._traffic.start()
        DECISIONS.is_on = True
        try:
            while self.num_viewers:
                self._wake.clear()
                until = time.monotonic() + self._period_s
                tick = await self._look()
                if self._next is not None:
                    self._next.set_result(tick)
                    self._next = None
                await asyncio.sleep(self._period_s * _FAST)
                if not any(wish.is_fast for wish in self._wishes):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
                            await self._wake.wait()
        except Exception as error:
            if self._next is not None:
                self._next.set_exception(error)
                self._next.exception()  # its viewers may have left
            raise
        finally:
            self._next = None
            self._traffic.stop()
            DECISIONS.is_on = False
            DECISIONS.clear()
            self._since = {}
            self._roster = _Roster()

    async def _look(self) -> _Tick:
        chosen = frozenset(name for wish in self._wishes for name in wish.replicas)
        requests = frozenset(request for wish in self._wishes for request in wish.requests)
        has_chosen_none = any(not wish.replicas for wish in self._wishes)
        wants_all = has_chosen_none and len(self._roster.seen or ()) <= MOST_DETAILS
        call = WatchCall(None if wants_all else chosen, requests, self._since)
        self._num_looks += 1
        number = self._num_looks
        (views, num_silent), num_starting = await asyncio.gather(self._source.look(call), self._source.num_starting())
        now = time.monotonic()
        self._roster.note([view.name for view in views], num_silent, now)
        since = self._since | {view.name: view.last_step for view in views}
        self._since = {name: since[name] for name in self._roster.seen or ()}  # a silent replica keeps its last step
        state = DashboardState(
            at=time.time(),
            period_s=self._period_s,
            model=self._model,
            num_viewers=self.num_viewers,
            num_starting=num_starting,
            num_silent=num_silent,
            num_continued=DECISIONS.num_continued(now),
            links=self._links,
            traffic=self._traffic.summary(),
            decisions=_decisions(now),
            events=tuple(
                FleetEvent(ago_s=round(now - at, 1), kind=kind, replica=name) for at, kind, name in self._roster.events
            ),
            replicas=(),
        )
        common = state.model_dump_json(exclude={"replicas", "details"})[:-1]
        return _Tick(number, common, sorted(views, key=lambda view: view.name))

    def _json(self, tick: _Tick, wish: Wish) -> str:
        """The state for a viewer, from parts that are JSON already."""
        wants_all = not wish.replicas and len(tick.views) <= MOST_DETAILS
        replicas = ",".join(view.state for view in tick.views)
        details = ",".join(
            f"{json.dumps(view.name)}:{view.detail}"
            for view in tick.views
            if view.detail is not None and (wants_all or view.name in wish.replicas)
        )
        return f'{tick.common},"replicas":[{replicas}],"details":{{{details}}}}}'


def _decisions(now: float) -> tuple[Decision, ...]:
    return tuple(
        Decision(
            ago_s=round(now - decision.at, 1),
            request_id=decision.request_id,
            num_tokens=decision.num_tokens,
            chosen=decision.chosen,
            reason=decision.reason,
            candidates=tuple(Candidate.model_validate(score, from_attributes=True) for score in decision.scores),
        )
        for decision in DECISIONS.latest()[:32]
    )
