"""Other ways to serve many models in the memory of a few: a static split, and one process at a time.

Both get the better of each choice. The static split serves the set of models that covers most of the requests to come,
which no operator knows. Swapping, as llama-swap does it, has its queue in the load generator, where it costs nothing;
all waiting requests to the model whose turn it is are served together, where llama-swap keeps the order of arrival; and
its servers start as quickly as `benchmarks.lean_server` can.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.fleet.shelf_models import BenchModel, ModelAsk
from benchmarks.serving.loops import new_session
from folio.app.cli.bench.load import Ask, Clock, HttpTarget, Record, Send

# Status of requests to models that a static split does not serve, as of the API for unknown models.
NOT_SERVED = 404


class Server(Protocol):
    """A running server of one model."""

    url: str

    async def memory_bytes(self) -> tuple[int, int]: ...

    def kill(self) -> None: ...


# Starts the server of a model, and returns when it takes requests.
Start = Callable[[str], Server]
# Makes the target of a model at a URL.
Connect = Callable[[str, str], Send]


def best_split(models: Iterable[BenchModel], asks: Sequence[ModelAsk], budget_bytes: int) -> tuple[BenchModel, ...]:
    """The models that fit together and are asked for most."""
    asked = Counter(ask.model for ask in asks)
    subsets = itertools.chain.from_iterable(
        itertools.combinations(tuple(models), count) for count in range(1, len(asked) + 1)
    )
    fitting = (subset for subset in subsets if sum(model.need_bytes for model in subset) <= budget_bytes)
    return max(fitting, key=lambda subset: sum(asked[model.name] for model in subset), default=())


class StaticSplit:
    """Sends each request to the server of its model; requests to other models are not served.

    Args:
        targets: model → where its requests go.
    """

    def __init__(self, targets: Mapping[str, Send]) -> None:
        self._targets = targets

    async def __call__(self, ask: Ask, record: Record, clock: Clock) -> None:
        assert isinstance(ask, ModelAsk)
        if (target := self._targets.get(ask.model)) is not None:
            await target(ask, record, clock)
        else:
            record.status, record.sent_s, record.ended_s = NOT_SERVED, clock.now(), clock.now()
            record.error = f"{ask.model} is not served"


@dataclass(slots=True)
class _Waiting:
    model: str
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class OneAtATime:
    """Serves one model at a time: a request to another one waits until the requests that run have ended, then the
    server is replaced. The model of the request that has waited longest is next, with all its waiting requests.

    Args:
        start: called in a thread.
        connect: makes the target of a server that has started.

    Attributes:
        server, model: of now; `None` while the next one starts.
        starts: seconds of each start, the end of the previous server included.
    """

    def __init__(self, start: Start, connect: Connect) -> None:
        self._start, self._connect = start, connect
        self.server: Server | None = None
        self.model: str | None = None
        self._target: Send | None = None
        self._num_running = 0
        self._waiting: deque[_Waiting] = deque()
        self._switching: asyncio.Task[None] | None = None
        self.starts: list[float] = []

    async def __call__(self, ask: Ask, record: Record, clock: Clock) -> None:
        assert isinstance(ask, ModelAsk)
        if ask.model == self.model and not self._waiting and self._switching is None:
            self._num_running += 1
        else:
            waiting = _Waiting(ask.model)
            self._waiting.append(waiting)
            self._go_on()
            await waiting.turn  # counts it as running
        assert self._target is not None
        try:
            await self._target(ask, record, clock)
        finally:
            self._num_running -= 1
            self._go_on()

    def _go_on(self) -> None:
        if self._waiting and not self._num_running and self._switching is None:
            self._switching = asyncio.create_task(self._switch(self._waiting[0].model))

    async def _switch(self, model: str) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            if model != self.model:
                if self.server is not None:
                    await asyncio.to_thread(self.server.kill)
                    self.server = self.model = None
                self.server = await asyncio.to_thread(self._start, model)
                self.model, self._target = model, self._connect(model, self.server.url)
                self.starts.append(loop.time() - began)
            served = [waiting for waiting in self._waiting if waiting.model == model]
            self._waiting = deque(waiting for waiting in self._waiting if waiting.model != model)
            self._num_running += len(served)
            for waiting in served:
                waiting.turn.set_result(None)
        except RuntimeError as error:  # it does not start
            for waiting in self._waiting:
                waiting.turn.set_exception(error)
            self._waiting.clear()
        finally:
            self._switching = None

    async def close(self) -> None:
        if self.server is not None:
            await asyncio.to_thread(self.server.kill)
            self.server = self.model = None


@asynccontextmanager
async def connections() -> AsyncIterator[Connect]:
    """A function that makes targets, which share a session."""
    async with new_session() as session:
        yield lambda model, url: HttpTarget(model, url, model, session)
