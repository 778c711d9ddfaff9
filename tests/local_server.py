"""The server in one process without Ray: HTTP, ingress, replica and an engine with the built-in model.

Ray Serve's part is left out: processes, routing, and the network between them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayTaskError

from folio.app.api.http import build_api
from folio.app.api.input import served_models
from folio.app.config.engine import EngineConfig
from folio.app.config.http import HttpSettings
from folio.app.config.shelf import ModelConfig, ShelfConfig
from folio.app.dashboard.collector import Collector
from folio.app.dashboard.http import add_dashboard
from folio.app.edge.guard import protect
from folio.app.engine import AsyncEngine
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.errors import FolioError
from folio.app.serving import ingress as ingress_module
from folio.app.serving import replica as replica_module
from folio.app.serving import tp_actors
from folio.app.serving.ingress import Ingress
from folio.app.serving.replica import EngineReplica
from folio.app.shelf import shelf as shelf_module
from folio.app.shelf.status import ModelStatus
from tests.processes import until


def guarded_api(
    service: Any,
    settings: HttpSettings | None = None,
    dashboard: Collector | None = None,
    bound_to: str | None = None,
) -> FastAPI:
    """The API of a service, guarded as an ingress guards it."""
    settings = settings or HttpSettings()
    api = build_api(service, settings.unknown_fields)
    if dashboard is not None:
        add_dashboard(api, dashboard)
    return protect(api, settings, bound_to=bound_to)


@contextmanager
def _replica_context(name: str) -> Iterator[pytest.MonkeyPatch]:
    """The context in which Serve constructs a replica. Logs and the garbage collector stay as they are."""
    context = SimpleNamespace(
        app_name="folio",
        deployment="EngineReplica",
        replica_id=SimpleNamespace(unique_id=name),
        world_size=1,
        rank=SimpleNamespace(rank=0),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "get_replica_context", lambda: context)
        for module in (ingress_module, replica_module):
            stub = dict.fromkeys(("collect", "freeze", "disable", "enable"), lambda: 0)
            patch.setattr(module, "gc", SimpleNamespace(**stub))
            patch.setattr(module, "configure_logs", lambda: None)
        patch.setattr(tp_actors, "actors_of_this_replica", lambda: None)
        yield patch


def replica_of(engine: Any, name: str = "local", shared_kv_memory_bytes: int | None = None) -> EngineReplica:
    """A replica of this engine."""
    with _replica_context(name) as patch:
        patch.setattr(shelf_module, "Shelf", lambda *_, **__: Shelf(builtin=engine))
        return EngineReplica(ShelfConfig(models=(a_model("builtin"),)), shared_kv_memory_bytes)


def replica_of_shelf(shelf: ShelfConfig, name: str = "local") -> EngineReplica:
    """A replica of a real shelf, without peers."""
    with _replica_context(name) as patch:
        patch.setattr(replica_module, "peer_prefixes", lambda *_: [])
        return EngineReplica(shelf)


def a_model(name: str, **settings: Any) -> ModelConfig:
    config: dict[str, Any] = {"model": "builtin"} | settings
    return ModelConfig(name=name, engine=EngineConfig(**config), keep="always")


class Shelf:
    """A shelf of these engines, all of them loaded."""

    def __init__(self, **engines: Any) -> None:
        self._engines = engines
        self.names = tuple(engines)

    def model(self, name: str) -> Any:
        engine = self._engines[name]

        async def ready() -> Any:
            return engine

        def progress(request_id: str, num_tokens: int) -> Any:
            return engine.progress(request_id)

        stream = getattr(engine, "stream", None)
        return SimpleNamespace(
            engine=engine, ready=ready, stream=stream, progress=progress, name=name, expected_wake_s=0.0
        )

    def device_status(self) -> None:
        return None

    def gpu_memory(self) -> None:
        return None

    def set_budget(self, budget_bytes: int, revision: int) -> Any:
        [engine] = self._engines.values()
        return engine.set_budget(budget_bytes, revision)

    def engines(self) -> dict[str, Any]:
        return self._engines

    def statuses(self) -> tuple[ModelStatus, ...]:
        return tuple(ModelStatus(name=name, state="awake") for name in self.names)

    @property
    def healthy(self) -> bool:
        return all(engine.healthy for engine in self._engines.values())

    def check(self) -> None:
        for engine in self._engines.values():
            engine.check()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def ingress_of(
    handle: Any, *models: ModelConfig, shelf: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> Any:
    """An ingress in front of a handle of replicas, without shared streams and Ray's metrics agents.

    Args:
        models: by default the built-in one.
        shelf: further settings of `ShelfConfig`.
    """
    with _replica_context("ingress") as patch:
        patch.setattr(served_models, "load_tokenizer", _tokenizer)
        patch.setattr(ingress_module, "SharedReader", lambda _: None)
        patch.setattr(ingress_module, "MetricsPage", lambda *_, **__: _Metrics())
        patch.setattr(ingress_module, "count_starting", lambda *_: 0)
        constructor: Any = Ingress.__bases__[0]  # Serve's subclass needs a cluster
        config = ShelfConfig(models=models or (a_model("builtin"),), **shelf)
        return constructor(config, handle, **settings)


_tokenizer = cache(load_tokenizer)


class LocalServer:
    """`api` is the ASGI application of `ingress`, `engine` its engine. Close it at the end."""

    def __init__(self, *, http: HttpSettings | None = None, **settings: Any) -> None:
        config = EngineConfig(
            **(
                {"model": "builtin", "kv_memory_bytes": 64 << 20, "max_num_batched_tokens": 512, "warm_up": False}
                | settings
            )
        )
        self.engine = AsyncEngine(config)
        self.ingress = ingress_of(LocalHandle(replica_of(self.engine)))
        self.api = guarded_api(self.ingress, http, self.ingress.dashboard)

    def wait_until_idle(self) -> None:
        """Unpin all prefixes, wait until no request runs or waits and no memory is owned, and audit the engine."""
        for pin in self.engine.report().pins:
            self.engine.unpin(pin.name)
        until(lambda: not self._left(), state=self._left)
        asyncio.run(self.engine.check_integrity())

    def close(self) -> None:
        self.engine.close()

    def _left(self) -> dict[str, int]:
        load, memory = self.engine.load(most_keys=0), self.engine.report()
        found = {"running": load.num_running, "waiting": load.num_waiting, "bytes": memory.active_bytes}
        return {name: number for name, number in found.items() if number}


@contextmanager
def listening(api: FastAPI) -> Iterator[str]:
    """Serve an API over HTTP on a port of this machine; yields the URL."""
    server = uvicorn.Server(uvicorn.Config(api, "127.0.0.1", 0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    assert server.started
    host, port = server.servers[0].sockets[0].getsockname()
    yield f"http://{host}:{port}"
    server.should_exit = True
    thread.join()


class _Metrics:
    """`MetricsPage` without Ray's agents."""

    async def text(self) -> str:
        return "# no metrics\n"


class LocalHandle:
    """A `DeploymentHandle` of one replica."""

    deployment_name = "EngineReplica"

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    def options(self, **_: Any) -> LocalHandle:
        return self

    def broadcast(self, name: str, *args: Any) -> _Broadcast:
        return _Broadcast(_Response(getattr(self._replica, name)(*args)))

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._replica, name))


class _Method:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any) -> _Response:
        return _Response(self._method(*args))


class _Broadcast:
    """A broadcast to one replica."""

    def __init__(self, response: _Response) -> None:
        self._response = response

    async def results_async(self) -> list[Any]:
        return [await self._response]

    async def _fetch_replica_results_async(self) -> list[_Response]:
        return [self._response]


class _Response:
    """`DeploymentResponse`: awaited, iterated over, or cancelled."""

    def __init__(self, running: Any) -> None:
        self._running = running
        self._task: asyncio.Task[Any] | None = None
        if asyncio.iscoroutine(running):
            self._task = asyncio.create_task(running)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._whole().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for item in self._running:
                yield item
        except FolioError as error:
            raise _failed(error) from error

    async def get_async(self) -> Any:
        return await self

    def cancel(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._running.aclose())
        else:
            self._task.cancel()

    async def _whole(self) -> Any:
        assert self._task is not None
        try:
            return await self._task
        except FolioError as error:
            raise _failed(error) from error


def _failed(error: FolioError) -> RayTaskError:
    return RayTaskError("replica", "traceback", error)
