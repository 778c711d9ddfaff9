"""The interfaces of Ray Serve that `app.compat.ray` relies on: these tests fail first when Ray changes."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError
from ray.serve import context, request_router
from ray.serve._private import router as serve_router
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.controller import ServeController
from ray.serve._private.handle_options import DynamicHandleOptions
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from app.compat import ray as compat
from app.errors import EngineError, FolioError, OverloadedError, RequestError, UnavailableError


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
def test_serve_is_shut_down_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Regression: a clean stop ended in "graceful_shutdown failed. There are infinite retries": Ray asked again."""
    calls: list[Any] = []

    def get(reference: str, timeout: float) -> None:
        calls.append((reference, timeout))
        raise error

    monkeypatch.setattr(ray, "get", get)
    instance = compat.ServeInstance.__new__(compat.ServeInstance)
    instance._client = SimpleNamespace(_controller=Controller(calls), _shutdown=False)
    instance.shut_down(3.0)
    assert calls == [{"max_task_retries": 0}, ("reference", 3.0)]
    assert instance._client._shutdown


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
