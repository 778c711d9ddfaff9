"""Ray Serve: every use of its undocumented interfaces, and its errors as Folio's.

Seen to work with `VERSION`. `tests/app/compat/test_ray.py` fails first when Ray changes. For each use, the reason:

- `ServeControllerClient.deploy_apps`: `serve.run` takes Python objects, not a configuration; the REST API
  for configurations needs the dashboard.
- `_get_global_client`: `serve.start` waits for the proxies, whose imports take as long as those of the application.
- `JobConfig(_client_job=, _py_driver_sys_path=)`: otherwise Ray's workers look for modules in the working directory
  first, where a user's `folio.py` would hide ours.
- `global_worker_stdstream_dispatcher`, `print_to_stdstream`: a driver prints all lines of its workers, or none.
- `ServeControllerClient._controller`, `_shutdown`: `serve.shutdown` has no timeout, and logs "infinite retries" when
  the controller ends before it answers.
- `DeploymentBroadcastResponse._fetch_replica_results_async`: `results_async` has one timeout for all replicas, and
  drops the answers that have come.
- `DeploymentHandle.options(_by_reference=)`: by value an item of a stream costs half as much, a replica learns of its
  caller's death, and calls go on without the raylet.
- `RequestRouter._choose_replica_for_request`: without a replica Serve waits for ever. `choose_replica` and `dispatch`
  would reserve a slot at the replica first, by a further message for each request.
- `RequestRouter.create_replica_wrapper`, `RunningReplica.get_queue_len`, `._replica_info`: when a raylet dies, Ray
  calls the actors of its node dead, and Serve drops replicas whose processes run on.
- `PendingRequest.routing_context.should_backoff`: otherwise Serve asks a router again at once, and for ever, while all
  replicas are full.
- `ServeControllerClient.http_config`: whether everybody can reach the server decides which hosts' names it takes.
- `get_serve_logs_dir`: where Serve's own exporter of traces writes, and log collectors look.
- `grpc.aio.AioRpcError`, `RayTaskError.cause`: the errors of calls between deployments.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import ray
from ray import serve
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.job_config import JobConfig
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig, ServeDeploySchema

from folio.app.errors import EngineError, FolioError, OverloadedError, UnavailableError

VERSION = "2.60"

_CONNECT_S, _LOOK_S = 3.0, 0.05


def own_search_path() -> JobConfig:
    """A job whose workers on this machine import from this process's `sys.path`, in its order."""
    # The workers put one folder after another in front of their own. `_client_job`: without the working directory.
    return JobConfig(_client_job=True, _py_driver_sys_path=sys.path[::-1])


def cluster_address() -> str:
    """RAY_ADDRESS for other programs of this machine. They replace 127.0.0.1 and localhost by an address at which
    others reach the machine, where a cluster of its own does not listen; this spelling they keep."""
    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    return f"{'LOCALHOST' if host == '127.0.0.1' else host}:{port}"


def filter_worker_lines(visible: Callable[[str, Sequence[str]], list[str]]) -> None:
    """Have Ray print those lines of the workers' output that `visible(actor, lines)` returns. After `ray.init`."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher
    from ray._private.worker import print_to_stdstream

    def show(data: dict[str, Any]) -> None:
        if lines := visible(data.get("actor_name") or data.get("task_name") or str(data["pid"]), data["lines"]):
            print_to_stdstream(data | {"lines": lines}, ignore_prefix=False)

    name = "ray_print_logs"  # Ray removes it at its end
    global_worker_stdstream_dispatcher.remove_handler(name)
    global_worker_stdstream_dispatcher.add_handler(name, show)


class ServeInstance:
    """Serve on this cluster, started by this process unless it runs already. Its controller runs before its proxies."""

    def __init__(self, config: ServeDeploySchema) -> None:
        grpc_options = config.grpc_options
        if "enable_reflection" not in grpc_options.model_fields_set:  # it needs no key
            grpc_options = grpc_options.model_copy(update={"enable_reflection": False})
        start = partial(
            serve.start,
            http_options=config.http_options.model_dump(),
            proxy_location=config.proxy_location,
            grpc_options=grpc_options.model_dump(),
            # The ingress logs requests; the proxy's log would be a second one.
            logging_config=config.logging_config or LoggingConfig(enable_access_log=False),
        )
        self._start = ThreadPoolExecutor(1).submit(start)
        while (client := _serve_client(is_needed=False)) is None and not self._start.done():
            time.sleep(_LOOK_S)
        if client is None:
            self._start.result()
            client = _serve_client()
        self._client = client

    def deploy(self, config: ServeDeploySchema) -> None:
        """Deploy the applications of a configuration, without waiting for them, but for the proxies."""
        self._client.deploy_apps(config, _blocking=False)
        self._start.result()

    def shut_down(self, timeout_s: float) -> None:
        """Shut Serve down. Processes left after `timeout_s` end with the cluster, or later if the cluster runs on."""
        with suppress(RayError, TimeoutError):  # the controller ends before it can answer: no retries
            controller = self._client._controller
            ray.get(controller.graceful_shutdown.options(max_task_retries=0).remote(), timeout=timeout_s)
        self._client._shutdown = True


def _serve_client(*, is_needed: bool = True) -> Any:
    """Serve's client of its controller; `None` if there is no controller, and none `is_needed`."""
    from ray.serve.context import _get_global_client  # not needed by clients, which import this module, too

    return _get_global_client(raise_if_no_controller_running=is_needed)


def http_host() -> str:
    """The address at which Serve's proxies, or HAProxy, listen."""
    return str(_serve_client().http_config.host)


def streaming_handle(handle: DeploymentHandle[Any], *, by_value: bool) -> DeploymentHandle[Any]:
    """The handle, for streams whose items travel in gRPC messages (`by_value`, at most 4 MiB) or in Ray's object
    store."""
    return handle.options(stream=True, _by_reference=not by_value)


def by_value(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """The handle, for calls straight to the replicas' processes, which need neither raylet nor GCS."""
    return handle.options(_by_reference=False)


def raylet_has_ended() -> bool:
    """Whether the raylet that this process started has ended. It stays a zombie: once nothing is left of it, all Ray
    workers of this node end, in the middle of their requests."""
    node: Any = ray._private.worker._global_node
    if node is None or not (raylets := node.all_processes.get("raylet")):
        return False
    with suppress(ChildProcessError):  # it has been waited for
        return os.waitid(os.P_PID, raylets[0].process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


async def replica_results(response: DeploymentBroadcastResponse) -> Sequence[Any]:
    """One result for each replica that a broadcast has reached, to be awaited by `get_async()`."""
    return cast(Sequence[Any], await response._fetch_replica_results_async())


class _Replica(RunningReplica):
    """A replica that is gone only when Ray says so and its process does not listen any more.

    Attributes:
        is_cut_off: Ray calls it dead, but its process listens: calls by value reach it.
    """

    is_gone = is_cut_off = False
    _asking: asyncio.Task[None] | None = None

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """The number of its requests, unknown and taken for 0 while it is cut off."""
        try:
            number = await super().get_queue_len(deadline_s=deadline_s)
        except ActorDiedError:
            if not self.is_gone:
                if self._asking is None or self._asking.done():
                    self._asking = asyncio.create_task(self._ask())
                # Serve cancels this call at its deadline; that a machine is silent counts in a later one.
                await asyncio.shield(self._asking)
            if self.is_gone:
                raise
            self.is_cut_off = True
            return 0
        self.is_cut_off = False
        return number

    async def _ask(self) -> None:
        """Note whether its process listens. A kernel takes a connection at once, however busy its machine is; one that
        is gone says nothing for minutes."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(self._replica_info.node_ip, self._replica_info.port)
        except OSError:  # of which TimeoutError is one
            self.is_gone = True
        else:
            writer.close()


class BoundedWaitRouter(FIFOMixin, RequestRouter):
    """A request router that bounds the time for which a request waits for a replica, and drops no replica whose process
    listens.

    `FIFOMixin`: calls of one HTTP request share an id, by which Serve finds only one of them; the others are placed in
    the order of their arrival.
    """

    @abstractmethod
    def bounded_wait(self, pending: PendingRequest) -> AbstractAsyncContextManager[None]:
        """The context in which Serve chooses a replica. An error that leaves it fails the call."""

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return _Replica(replica_info)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop a replica that is gone; ask another one before its next request (`_Replica.get_queue_len`)."""
        replica = self._replicas.get(replica_id)
        if isinstance(replica, _Replica) and not replica.is_gone:
            self.on_replica_actor_unavailable(replica_id)
        else:
            super().on_replica_actor_died(replica_id)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        async with self.bounded_wait(pending_request):
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if isinstance(replica, _Replica) and replica.is_cut_off:
            pending_request.metadata._by_reference = False  # else Serve would try in vain, without a pause
        return replica


def back_off(pending: PendingRequest) -> None:
    """Have Serve pause before it asks for another ranking of this request."""
    pending.routing_context.should_backoff = True


def logs_directory() -> Path:
    """Serve's folder of logs on this node, within a replica."""
    return Path(get_serve_logs_dir())


# Errors of a call that failed at the callee, could not be delivered, or was refused by Serve.
CALL_ERRORS = (RayError, DeploymentUnavailableError, BackPressureError, grpc.aio.AioRpcError)
# Status codes of a replica whose process is gone, or is about to end.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_REPLICA = "the engine replica"


def call_broken_error(callee: str = _REPLICA) -> UnavailableError:
    """The error of a call that ended without its answer."""
    return UnavailableError(f"the connection to {callee} was lost; send the request again")


def folio_error(error: Exception, callee: str = _REPLICA) -> FolioError:
    """The cause of one of `CALL_ERRORS`, as Folio's error."""
    if isinstance(error, BackPressureError):
        return OverloadedError(str(error), error.retry_after_s)
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, FolioError):
            return error.cause
    elif not isinstance(error, grpc.aio.AioRpcError) or error.code() in _GONE:
        # Ray's other errors are about processes, nodes and objects, not about the request.
        return UnavailableError(f"{callee} cannot be reached; send the request again")
    return EngineError(f"{callee} failed; see its log")


@contextmanager
def translate_failures(callee: str = _REPLICA) -> Iterator[None]:
    """Raise `CALL_ERRORS` as the `FolioError`s that they mean."""
    try:
        yield
    except CALL_ERRORS as error:
        raise folio_error(error, callee) from error
    except asyncio.CancelledError:
        # When a replica that stops breaks a call off, Serve raises as if this task had been cancelled.
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise call_broken_error(callee) from None
        raise
