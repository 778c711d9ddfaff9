"""The interfaces of Ray Serve that `folio.app.compat.ray` relies on: these tests fail first when Ray changes."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray
from ray import serve
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError
from ray.serve import context, request_router
from ray.serve._private import router as serve_router
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.controller import ServeController
from ray.serve._private.handle_options import DynamicHandleOptions
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle
from ray.serve.schema import ServeDeploySchema

from folio.app.compat import ray as compat
from folio.app.errors import EngineError, FolioError, NoReplicaError, OverloadedError, RequestError, UnavailableError
from folio.app.serving.router import FolioRouter
from tests.app.compat.ray_types import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata, choose_replica
from tests.processes import until


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_the_version() -> None:
    assert ray.__version__.rpartition(".")[0] == compat.VERSION, "check the table of app/compat/ray.py, then VERSION"


def test_the_client_that_deploys_configurations() -> None:
    assert list(parameters(context._get_global_client)) == ["raise_if_no_controller_running"]
    assert {"config", "_blocking"} <= parameters(ServeControllerClient.deploy_apps).keys()
    source = inspect.getsource(ServeControllerClient.__init__)
    assert "self._controller: Any = controller" in source
    assert "self._shutdown = False" in source
    assert inspect.iscoroutinefunction(ServeController.graceful_shutdown)


async def test_broadcasts_have_one_result_for_each_replica() -> None:
    results = [SimpleNamespace(get_async=None), SimpleNamespace(get_async=None)]

    async def reached() -> list[Any]:
        return results

    assert await compat.replica_results(DeploymentBroadcastResponse(reached(), None)) == results
    assert inspect.iscoroutinefunction(ReplicaResult.get_async)


def test_streams_by_value() -> None:
    """A handle with options of its own starts Ray: so only its interface is looked at."""
    assert {"stream", "_by_reference"} <= parameters(DeploymentHandle.options).keys()
    assert "_by_reference" in {field.name for field in dataclasses.fields(DynamicHandleOptions)}
    handle: Any = SimpleNamespace(options=lambda **options: options)
    assert compat.streaming_handle(handle, by_value=True) == {"stream": True, "_by_reference": False}


@pytest.mark.processes
def test_a_raylet_that_has_ended_is_not_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's workers end when nothing is left of it."""
    assert not compat.raylet_has_ended()  # none is started here
    raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=raylet)]})
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    assert not compat.raylet_has_ended()
    raylet.kill()
    until(compat.raylet_has_ended)
    os.kill(raylet.pid, 0)
    assert compat.raylet_has_ended()
    raylet.communicate()
    assert compat.raylet_has_ended()


@pytest.mark.parametrize("case", ["it listens", "its process is gone", "its machine is gone"])
async def test_a_replica_is_dropped_when_its_process_is_gone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: when a raylet dies, Ray calls the actors of its node dead. Polling `/ready` made the ingress drop its
    only replica, which answered all requests. Such a replica is called by value from then on."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    if case != "it listens":
        server.close()
        await server.wait_closed()
    if case == "its machine is gone":
        monkeypatch.setattr(compat, "_CONNECT_S", 0.3)
        monkeypatch.setattr(asyncio, "open_connection", lambda *_: asyncio.Event().wait())
    replica_id = ReplicaID("a", DeploymentID("EngineReplica", "test"))
    dead = ActorDiedError()

    class Actor:
        get_num_ongoing_requests = SimpleNamespace(remote=partial(failed, dead))

    info: Any = SimpleNamespace(
        replica_id=replica_id,
        node_ip="127.0.0.1",
        port=port,
        multiplexed_model_ids=[],
        is_cross_language=False,
        max_ongoing_requests=10,
        routing_stats={},
        get_actor_handle=Actor,
    )
    router = FolioRouter(
        deployment_id=replica_id.deployment_id,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    router.initialize_state(wait_for_replica_s=2.0)
    router.update_replicas([router.create_replica_wrapper(info)])
    router.on_replica_actor_died(replica_id)  # a call by reference has failed
    pending = request_router.PendingRequest([], {}, RequestMetadata("x", "internal", call_method="ready"))
    if case == "it listens":
        chosen = await choose_replica(router, pending)
        assert (chosen.replica_id, pending.metadata._by_reference) == (replica_id, False)
        server.close()
    else:
        with pytest.raises(NoReplicaError):
            await choose_replica(router, pending)
        assert not router.curr_replicas


async def failed(error: Exception) -> None:
    raise error


async def test_the_routers_hooks() -> None:
    router = request_router.RequestRouter
    assert list(parameters(router._choose_replica_for_request)) == ["self", "pending_request", "is_retry"]
    assert "_request_router._choose_replica_for_request" in inspect.getsource(serve_router)
    assert isinstance(router.num_pending_requests, property)
    pending = request_router.PendingRequest([], {}, SimpleNamespace())  # type: ignore[arg-type]
    assert not pending.routing_context.should_backoff
    compat.back_off(pending)
    assert pending.routing_context.should_backoff
    assert "routing_context.should_backoff" in inspect.getsource(router._choose_replicas_with_backoff)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serve's client of its controller, and the options for gRPC with which Serve is started."""
    client = SimpleNamespace(started=[])
    monkeypatch.setattr(serve, "start", lambda *, grpc_options, **_: client.started.append(grpc_options))
    monkeypatch.setattr(context, "_get_global_client", lambda **_: client)
    return client


@pytest.mark.parametrize("given", [None, True])
def test_reflection_is_off_unless_the_file_sets_it(given: bool | None, client: Any) -> None:
    """Ray's default is on, and nobody who asks needs a key."""
    options = {"port": 9000} | ({} if given is None else {"enable_reflection": given})
    config = ServeDeploySchema.model_validate({"applications": [], "grpc_options": options})
    assert config.grpc_options.enable_reflection
    compat.ServeInstance(config)
    [options] = client.started
    assert (options["enable_reflection"], options["port"]) == (bool(given), 9000)


def test_an_application_is_deployed_while_the_proxies_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as there is a controller. What keeps Serve from starting is told."""
    deployed, fails = threading.Event(), [False]

    def start(**_: Any) -> None:
        if fails[0]:
            raise RuntimeError("the port is in use")
        assert deployed.wait(60)

    found = iter([None, None, SimpleNamespace(deploy_apps=lambda *_, **__: deployed.set())])

    def client(*, raise_if_no_controller_running: bool) -> Any:
        if raise_if_no_controller_running:
            raise RayServeException("no controller")
        return next(found, None)

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(context, "_get_global_client", client)
    config = ServeDeploySchema(applications=[])
    compat.ServeInstance(config).deploy(config)
    assert deployed.is_set()
    fails[0] = True
    with pytest.raises(RuntimeError, match="the port is in use"):
        compat.ServeInstance(config)


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.1:6379", "LOCALHOST:6379"), ("10.0.0.7:6379", "10.0.0.7:6379")]
)
def test_the_address_for_others(address: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own spelling of a cluster's address on this machine reaches nobody: `tests/e2e/test_lifetime.py`."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
    assert compat.cluster_address() == expected


class Controller:
    """Ends as Ray calls it for its shutdown, or does not answer."""

    def __init__(self, calls: list[Any]) -> None:
        self.graceful_shutdown = self
        self._calls = calls

    def options(self, **options: Any) -> Controller:
        self._calls.append(options)
        return self

    def remote(self) -> str:
        return "reference"


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError()])
def test_serve_is_shut_down_once(monkeypatch: pytest.MonkeyPatch, client: Any, error: Exception) -> None:
    """Regression: a clean stop ended in "graceful_shutdown failed. There are infinite retries": Ray asked again."""
    calls: list[Any] = []

    def get(reference: str, timeout: float) -> None:
        calls.append((reference, timeout))
        raise error

    monkeypatch.setattr(ray, "get", get)
    client._controller = Controller(calls)
    compat.ServeInstance(ServeDeploySchema(applications=[])).shut_down(3.0)
    assert calls == [{"max_task_retries": 0}, ("reference", 3.0)]
    assert client._shutdown


def rpc_error(code: grpc.StatusCode) -> Exception:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


@pytest.mark.parametrize(
    ("error", "meaning", "message"),
    [
        (RayTaskError("f", "traceback", RequestError("too long", "prompt")), RequestError, "too long"),
        (RayTaskError("f", "traceback", ZeroDivisionError()), EngineError, "a replica failed; see its log"),
        (ActorDiedError(), UnavailableError, "a replica cannot be reached"),
        (rpc_error(grpc.StatusCode.UNAVAILABLE), UnavailableError, "a replica cannot be reached"),
        (rpc_error(grpc.StatusCode.INTERNAL), EngineError, "a replica failed"),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), OverloadedError, "Request dropped"),
    ],
)
def test_errors_of_calls(error: Exception, meaning: type[FolioError], message: str) -> None:
    with pytest.raises(meaning, match=message), compat.translate_failures("a replica"):
        raise error
