"""An engine that returns given deltas, and a request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from folio.app.engine import Delta, SamplingParams
from folio.app.engine.async_engine import Pace
from folio.app.engine.request.engine_request import BegunOutput, EngineRequest
from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.request.turn import Turn
from folio.app.fleet.messages import ExpectedPrefix, GenerateRequest

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
        self.asked: list[EngineRequest] = []
        self.forks: list[tuple[Any, ...]] = []
        self.paces: list[Pace] = []
        self.closed = 0
        self._deltas = deltas
        self._error = error

    def stream(self, request: EngineRequest, pace: Pace) -> AsyncGenerator[list[Delta], None]:
        self.paces.append(pace)
        self.asked.append(request)
        return self._yield()

    def fork(
        self, *args: Any, pace: Pace, note: Callable[[EngineRequest], None], **options: Any
    ) -> AsyncGenerator[list[Delta], None]:
        self.paces.append(pace)
        note(EngineRequest("f-1", [1, 2], args[1], begun=(BegunOutput(0, [3], 1),)))
        self.forks.append((*args, options))
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
