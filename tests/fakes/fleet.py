"""Replicas that answer broadcasts, each as a function does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from folio.app.engine.report import ReplicaReport
from folio.app.errors import FolioError
from folio.app.fleet.status import ModelReport, ReplicaStatus
from folio.app.shelf.status import ModelStatus
from folio.vmem import MemoryReport, PinReport
from tests.app.compat.ray_types import DeploymentID
from tests.fakes.replicas import Engines

Act = Callable[[str, tuple[Any, ...]], Awaitable[Any]]


def status(name: str, factor: int, *pins: PinReport) -> ReplicaStatus:
    """Every figure of the reports is another number."""
    numbers = itertools.count(1)
    load: Any = ReplicaReport(**{field.name: factor * next(numbers) for field in fields(ReplicaReport)})
    memory: Any = MemoryReport(**{field.name: factor * next(numbers) for field in fields(MemoryReport)})
    memory = replace(memory, pins=pins)
    model = ModelStatus(name="m", state="asleep", weight_bytes=7, kv_bytes=factor, num_waiting=3, wake_s=0.5)
    return ReplicaStatus(name, factor * 0.5, (ModelReport(model, load, memory),))


class Fleet(Engines):
    """Replicas that do as these functions."""

    def __init__(self, *replicas: Act) -> None:
        super().__init__()
        self.broadcasts: list[tuple[str, tuple[Any, ...]]] = []
        self._replicas = replicas

    def broadcast(self, method: str, *args: Any) -> Any:
        self.broadcasts.append((method, args))

        async def results() -> list[Any]:
            if not self._replicas:
                raise DeploymentUnavailableError(DeploymentID("engine"))
            return [SimpleNamespace(get_async=lambda act=act: act(method, args)) for act in self._replicas]

        async def results_async() -> list[Any]:
            return [await result.get_async() for result in await results()]

        return SimpleNamespace(_fetch_replica_results_async=results, results_async=results_async)


def answers(value: Any) -> Act:
    async def act(method: str, args: tuple[Any, ...]) -> Any:
        if isinstance(value, FolioError):
            raise RayTaskError(method, "traceback", value)
        if isinstance(value, BaseException):
            raise value
        return value

    return act


async def hangs(method: str, args: tuple[Any, ...]) -> Any:
    await asyncio.Event().wait()
