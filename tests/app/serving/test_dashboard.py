"""The dashboard's source, when replicas or Serve's controller do not answer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from folio.app.dashboard.views import ReplicaView, WatchCall
from folio.app.errors import UnavailableError
from folio.app.serving import dashboard
from folio.app.serving.dashboard import WatchedReplicas

_VIEW = ReplicaView("a", 1, "{}", None)


class Replicas:
    """A `ReplicaClient` whose every call has these answers, or this error."""

    def __init__(self) -> None:
        self.answers: list[Any] | UnavailableError = [_VIEW, UnavailableError("silent")]

    async def call_each(self, method: str, call: WatchCall, *, timeout_s: float) -> list[Any]:
        if isinstance(self.answers, UnavailableError):
            raise self.answers
        return self.answers


async def test_replicas_are_silent_not_gone_while_none_can_be_called() -> None:
    """While the controller was away, all had gone, and came again afterwards."""
    replicas: Any = Replicas()
    source = WatchedReplicas(replicas, Any, lambda: 0)  # type: ignore[arg-type]
    assert await source.look(WatchCall()) == ([_VIEW], 1)
    replicas.answers = UnavailableError("no engine replica could be called within 2 s")
    assert await source.look(WatchCall()) == ([], 2)
    replicas.answers = []
    assert await source.look(WatchCall()) == ([], 0)


async def test_a_controller_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every viewer's page stood still until the controller had answered."""
    monkeypatch.setattr(dashboard, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(dashboard, "_STATUS_AGE_S", 0.0)
    may_answer, calls = threading.Event(), []

    def count() -> int | None:
        calls.append(1)
        may_answer.wait(60)
        return [3, None][len(calls) - 1]

    source = WatchedReplicas(Any, Any, count)  # type: ignore[arg-type]
    for _ in range(3):
        assert await source.num_starting() == 0
    assert len(calls) == 1
    may_answer.set()
    async with asyncio.timeout(30):
        while await source.num_starting() != 3:
            pass
        assert await source.num_starting() == 3  # also while the controller is away
