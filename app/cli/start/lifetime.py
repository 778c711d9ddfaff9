"""The life of a server: deploy, wait for a signal, drain. `run` starts Ray, or connects to the cluster of RAY_ADDRESS,
and deploys the applications. The status is 1 if an application cannot be deployed. On SIGTERM or SIGINT:

1. `/ready` and new requests are answered 503 with Retry-After;
2. requests in flight are finished within the grace period;
3. Serve is shut down within 4 s, and the status is 0.

A second signal ends the process at once. One signal ends it within the grace period and 15 s, whatever Ray does.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError
from ray.job_config import JobConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from folio.app.cli.address import reserve_address, wait_for_listener
from folio.app.cli.start.env import prepared_environment
from folio.app.cli.start.gpus import fit_replicas, gpus_of_nodes, unseen_gpus
from folio.app.cli.start.greeting import base_url, greeting
from folio.app.cli.start.start_log import StartLog
from folio.app.compat.ray import (
    ServeInstance,
    by_value,
    cluster_address,
    filter_worker_lines,
    own_search_path,
    raylet_has_ended,
)
from folio.app.errors import UnavailableError
from folio.kernels import KernelError
from folio.kernels.cpu.build import compile_all, missing_libraries

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S, _LOOK_S = 0.5, 0.1
# For the last bytes to pass through HAProxy, or Serve's proxy, after the last request has ended.
_FLUSH_GRACE_S = 1.0
# Timeouts of an ingress's answer, of Serve's shutdown, and of the whole end, Ray's processes included.
_ANSWER_S, _SHUTDOWN_S, _END_S = 3.0, 1.0, 4.0
# Beyond the grace period, for all of them together.
_LONGEST_END_S = 15.0
_ROUTED_S, _RAYLET_LOOK_S = 10.0, 5.0
_LISTENS_S = 30.0  # for a cluster that starts at the same time
# Ray's limits in a second attempt to start it: for the GCS's port, the raylet, its agents and its workers.
LONGER_LIMITS = {
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_gcs_rpc_server_connect_timeout_s": "30",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_worker_register_timeout_seconds": "240",
}
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
# Last line of our exceptions in a traceback, as Serve's messages contain them.
_OUR_ERROR = re.compile(r"app\.errors\.(?:ConfigError|ModelError)(?:\(\w+\))?: (.*)")


class Signals:
    """Note the first SIGTERM or SIGINT in `came`; end the process at the second, or `longest_s` after the first, even
    if a call of Ray hangs. Construct in the main thread, after Ray has set its handlers."""

    def __init__(self, longest_s: float) -> None:
        self.came = False  # no Event: a handler interrupts the main thread, which may hold its lock
        read, self._first = os.pipe()
        threading.Thread(target=_end_after_byte, args=(read, longest_s), daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """Whether a signal has come within the timeout."""
        ends_at = time.monotonic() + timeout_s
        while not self.came and (left_s := ends_at - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left_s))
        return self.came

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            # Ray's processes end with this one if it has started them.
            os._exit(128 + number)
        self.came = True
        os.write(self._first, b"x")


def _end_after_byte(read: int, seconds: float) -> None:
    """End this process so many seconds after something can be read."""
    os.read(read, 1)
    time.sleep(seconds)
    logger.error("shutdown has taken %g s: ending this process and those that it has started", seconds)
    os._exit(0)


def run(
    config: ServeDeploySchema,
    grace_s: float,
    *,
    is_local: bool,
    ray_dashboard: bool = False,
    is_default_scale: bool = False,
    start_log: StartLog | None = None,
) -> int:
    """Serve a configuration's applications until a signal; returns the exit status.

    Args:
        is_local: start a cluster, instead of connecting to that of RAY_ADDRESS.
        ray_dashboard: of a cluster that is started. Its ten processes delay all others by their imports.
        is_default_scale: the user has not chosen the number of replicas; it follows the GPUs, if there are any.
        start_log: of the command.

    Raises:
        ConfigError: the address is in use, or the machine has too few GPUs.
        UnavailableError: Ray does not answer.
    """
    http = config.http_options
    # In a cluster that runs already, the port is its own.
    reserved = reserve_address(http.host, http.port) if is_local else None
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    log = start_log or StartLog()
    log.lap("packages are imported")
    if is_local:
        compile_kernels(log)
    with prepared_environment(has_tls=bool(http.ssl_certfile)) if is_local else nullcontext():
        try:
            gpus_of_ray = unseen_gpus() if is_local else None
            join_ray(is_local=is_local, dashboard=ray_dashboard, num_gpus=gpus_of_ray, log_level=log.ray_level)
            filter_worker_lines(log.visible)
            log.lap("Ray runs")
            gpus = gpus_of_nodes(ray.nodes())
            fit_replicas(config, gpus, is_default=is_default_scale, is_local=is_local)
            signals = Signals(grace_s + _LONGEST_END_S)
            return serve_until_signal(config, signals, grace_s, ray_dashboard=ray_dashboard, log=log)
        finally:
            ray.shutdown()
            if reserved is not None:
                reserved.close()


def compile_kernels(log: StartLog) -> None:
    """Compile the C++ kernels that this processor lacks. In a replica the further minute would be unexplained."""
    try:
        if missing := missing_libraries():
            log.say(f"compiling {len(missing)} C++ kernels for this processor, once; this takes a minute")
            compile_all()
            log.lap("C++ kernels are compiled")
    except KernelError as error:
        logger.warning("the C++ kernels cannot be compiled, so torch computes, several times slower: %s", error)


def join_ray(
    *, is_local: bool, dashboard: bool = False, num_gpus: int | None = None, log_level: int = logging.INFO
) -> None:
    """Start a cluster, or connect to that of RAY_ADDRESS. Raises `UnavailableError` if Ray does not answer in time.

    Args:
        num_gpus: of a cluster that is started; `None`: Ray counts them.
        log_level: of Ray's lines of this process.
    """
    try:
        if not is_local:
            # Ray would try for minutes, and say so in lines of its own.
            wait_for_listener(os.environ["RAY_ADDRESS"], ray.util.get_node_ip_address(), _LISTENS_S)
        _start_ray(
            namespace="serve",
            job_config=own_search_path() if is_local else JobConfig(),
            include_dashboard=dashboard if is_local else None,
            num_gpus=num_gpus,
            logging_level=log_level,
        )
    except Exception as error:  # Ray has no narrower class for a node that starts slowly
        logger.debug("ray.init", exc_info=True)
        reason = " ".join(str(error).split())
        where, remedy = "cannot be started on this machine", "other processes may keep it busy; try again"
        if not is_local:
            where = f"does not answer at RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
            remedy = "start the cluster, or unset the variable to start one here"
        elif isinstance(error, OSError) and _is_for_token(Path(str(error.filename))):
            remedy = "Ray keeps a token there; set HOME to a folder that can be written, or RAY_AUTH_TOKEN to a secret"
        raise UnavailableError(f"Ray {where} ({reason}): {remedy}") from error


def _is_for_token(path: Path) -> bool:
    """Whether a path is the folder of Ray's token, or in it, or above it, such as a HOME that does not exist."""
    folder = Path("~").expanduser() / ".ray"
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def _start_ray(**options: Any) -> None:
    """`ray.init`. On a busy machine Ray's processes may not be up in its time: they are ended, and started once more,
    with longer limits."""
    others = _children()
    try:
        ray.init(**options)
        return
    except Exception as error:
        if "RAY_ADDRESS" in os.environ or not _TIMED_OUT.search(str(error)):
            raise
        logger.warning("Ray has not started in time; trying once more, with longer limits")
    for child in _children() - others:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    for name, value in LONGER_LIMITS.items():
        os.environ.setdefault(name, value)
    ray.init(**options)


def _children() -> set[int]:
    """Ids of the processes that this process has started, on Linux."""
    children = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.add(int(stat.parent.name))
    return children


def serve_until_signal(
    config: ServeDeploySchema, signals: Signals, grace_s: float, *, ray_dashboard: bool = False, log: StartLog
) -> int:
    """Serve the applications of a configuration until a signal comes; returns the exit status."""
    names = [application.name for application in config.applications]
    instance = ServeInstance(config)
    status, has_ended = 1, True
    try:
        instance.deploy(config)
        log.lap("Serve runs")
        status = wait_until_running(names, signals, log)
        if status:
            return status
        wait_until_routed(base_url(config), signals)
        if not signals.came:
            log.end()
            print(greeting(config, cluster_address(), ray_dashboard=ray_dashboard), flush=True)
        ingresses = folio_ingresses()
        watch(signals)
        has_ended = drain_ingresses(grace_s, ingresses)
        if raylet_has_ended():
            # Ray's orderly end crashes without it where a call still waits. Its processes end with this one.
            os._exit(status)
        return status
    finally:
        end_within(_END_S, status)
        instance.shut_down(_SHUTDOWN_S if has_ended else 0.0)


def watch(signals: Signals, raylet_has_ended: Callable[[], bool] = raylet_has_ended) -> None:
    """Wait for a signal. If Ray's raylet ends meanwhile, that is logged: what runs can still answer."""
    while not signals.wait(_RAYLET_LOOK_S):
        if raylet_has_ended():
            logger.error(
                "Ray's raylet on this machine has ended: requests are answered as long as the processes of this server "
                "run, but none that ends is replaced any more; restart folio serve"
            )
            break
    while not signals.wait(3600.0):
        pass


def end_within(seconds: float, status: int) -> None:
    """End this process after so many seconds, and with it the processes of Serve and Ray that it started, even if their
    orderly end hangs."""
    watchdog = threading.Timer(seconds, os._exit, (status,))
    watchdog.daemon = True
    watchdog.start()


def wait_until_running(names: Sequence[str], signals: Signals, log: StartLog) -> int:
    """Wait until all applications run, or a signal comes. Returns 1 when an application cannot be deployed, else 0."""
    while not signals.wait(_LOOK_S):
        applications = serve.status().applications
        statuses = {name: applications[name].status for name in names if name in applications}
        for name, status in statuses.items():
            deployments: Any = applications[name].deployments
            messages = [applications[name].message, *(deployment.message for deployment in deployments.values())]
            # Our errors are permanent: do not wait for Serve's retries.
            permanent = [reason for message in messages for reason in _OUR_ERROR.findall(message)]
            if permanent or status == ApplicationStatus.DEPLOY_FAILED:
                log.fail(is_explained=bool(permanent))
                reason = permanent[0] if permanent else applications[name].message
                logger.error("%s cannot be deployed: %s", name, reason)
                return 1
        if len(statuses) == len(names) and set(statuses.values()) <= {ApplicationStatus.RUNNING}:
            return 0
    return 0


def wait_until_routed(url: str, signals: Signals) -> None:
    """Wait until HAProxy, or Serve's proxy, on this node has the applications' routes. Ends at a signal, and after a
    timeout, because the node may have no proxy."""
    ends_at = time.monotonic() + _ROUTED_S
    while not signals.came and time.monotonic() < ends_at:
        try:
            with urllib.request.urlopen(f"{url}/-/healthz", timeout=_ANSWER_S):
                return
        except (OSError, HTTPException):
            signals.wait(_LOOK_S)


def drain_ingresses(grace_s: float, ingresses: dict[str, Any]) -> bool:
    """Drain all ingresses. Returns whether all requests in flight have ended within the grace period.

    Args:
        ingresses: the ingresses known so far, for the case that Serve's controller has ended.
    """
    logger.info("draining: new requests are refused, requests in flight have %g s; another signal ends them", grace_s)
    ends_at = time.monotonic() + grace_s
    has_waited, is_answered = False, True
    while True:
        if is_answered:  # repeated, because ingresses may start meanwhile
            found = _within(_ANSWER_S, folio_ingresses)
            is_answered, ingresses = found is not None, ingresses if found is None else found
        num_in_flight = sum(_drain_ingress(name, ingress) for name, ingress in ingresses.items())
        if not num_in_flight:
            break
        has_waited = True
        if time.monotonic() >= ends_at:
            logger.warning("the grace period is over: %d requests are cut off", num_in_flight)
            return False
        time.sleep(_POLL_S)
    if has_waited:
        time.sleep(_FLUSH_GRACE_S)
    return True


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """A call's result; `None` if it has none in time, or fails."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(call())
        except (RayError, RayServeException) as error:
            logger.warning("Serve's controller does not answer: %s", error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def folio_ingresses() -> dict[str, Any]:
    """Handles of the running ingresses of Folio's applications, by the applications' names; others cannot drain."""
    ingresses = {}
    for name, application in serve.status().applications.items():
        deployments: Any = application.deployments
        if {"Ingress", "EngineReplica"} <= deployments.keys() and deployments["Ingress"].replica_states.get("RUNNING"):
            ingresses[name] = by_value(serve.get_deployment_handle("Ingress", name))
    return ingresses


def _drain_ingress(name: str, ingress: Any) -> int:
    """Start draining an application's ingresses; returns their requests in flight."""
    try:
        return sum(ingress.broadcast("drain").results(timeout_s=_ANSWER_S))
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("an ingress of %s does not answer: %s", name, error)
        return 1  # it is asked again, until the grace period ends
