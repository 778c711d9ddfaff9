"""The whole server in one process and without Ray: HTTP, ingress, replica and a real engine with the built-in model.

What Ray Serve does in between is left out: processes, routing, and that clients come over a network.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from ray.exceptions import RayTaskError

from app.config.engine import EngineConfig
from app.config.http import HttpSettings
from app.edge.admission import AdmissionControl
from app.edge.guard import protect
from app.engine import AsyncEngine
from app.engine.model.loader import load_tokenizer
from app.errors import FolioError
from app.fleet.overload import LoadShedder
from app.fleet.retry import DuplicateGuard
from app.fleet.streams import StreamPace
from app.openai.http import build_api
from app.openai.translate import Translator
from app.serving.calls import ReplicaClient
from app.serving.ingress import Ingress
from app.serving.metrics import RequestMeter
from app.serving.replica import EngineReplica
from app.serving.shared_streams import SharedStreams


def guarded_api(service: Any, settings: HttpSettings | None = None) -> FastAPI:
    """The API of a service, guarded as an ingress guards it."""
    return protect(build_api(service), settings or HttpSettings())


class LocalServer:
    """`api` is the ASGI application, `engine` what it stands on. Close it at the end."""

    def __init__(self, **settings: Any) -> None:
        config = EngineConfig(
            **({"model": "builtin", "kv_memory_bytes": 64 << 20, "max_num_batched_tokens": 512} | settings)
        )
        self.engine = AsyncEngine(config)
        replica: Any = object.__new__(EngineReplica)
        replica._closing, replica._leaving, replica._member = False, None, None
        replica._engine, replica._name = self.engine, "local"
        replica._shared, replica._alone = SharedStreams(), DuplicateGuard()
        replica._pace = StreamPace(math.inf, min_interval_s=0.0, max_interval_s=0.0)
        ingress: Any = object.__new__(Ingress.__bases__[0])  # what Serve makes of it needs a cluster
        ingress._translator = Translator(load_tokenizer(config.model), "builtin", ())
        ingress._model_names, ingress._created, ingress._max_model_len = ("builtin",), 0, None
        refusals = LoadShedder()
        ingress._replicas = ReplicaClient(_Handle(replica), refusals)  # type: ignore[arg-type]
        ingress._admission, ingress._meter, ingress._metrics = AdmissionControl(refusals), RequestMeter(), _Metrics()
        self.api = guarded_api(ingress)

    def wait_until_idle(self, deadline_s: float = 60.0) -> None:
        """Until no request runs or waits and all pages are free, those of pinned prefixes too; then the books have to
        add up."""
        for pin in self.engine.report().pins:
            self.engine.unpin(pin.name)
        deadline = time.monotonic() + deadline_s
        while left := self._left():
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
        asyncio.run(self.engine.check_integrity())

    def close(self) -> None:
        self.engine.close()

    def _left(self) -> dict[str, int]:
        load, memory = self.engine.load(most_keys=0), self.engine.report()
        found = {"running": load.num_running, "waiting": load.num_waiting, "bytes": memory.active_bytes}
        return {name: number for name, number in found.items() if number}


@contextmanager
def listening(api: FastAPI) -> Iterator[str]:
    """Serve it over HTTP on a port of this machine; gives the URL."""
    server = uvicorn.Server(uvicorn.Config(api, "127.0.0.1", 0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    yield f"http://{host}:{port}"
    server.should_exit = True
    thread.join()


class _Metrics:
    """Ray's agents are left out, too."""

    async def text(self) -> str:
        return "# nothing is counted\n"


class _Handle:
    """A `DeploymentHandle` of one replica."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    def options(self, **_: Any) -> _Handle:
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
    """To all replicas, of which there is one."""

    def __init__(self, response: _Response) -> None:
        self._response = response

    async def results_async(self) -> list[Any]:
        return [await self._response]

    async def _fetch_replica_results_async(self) -> list[_Response]:
        return [self._response]


class _Response:
    """What a handle returns: to be awaited, iterated over, or cancelled."""

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
