"""`python -m app.serve [serve_config.yaml]`: serve until a signal comes, then finish what is under way.

It does what `serve run` does with a file: starts Ray, or connects to the cluster of RAY_ADDRESS, and deploys the
applications. It returns 1 with the reason if one of them cannot be deployed. On SIGTERM or SIGINT, as Ctrl-C sends it:

1. `/ready` and new requests are answered 503 with Retry-After;
2. requests under way are finished, for as long as `--grace-s` says;
3. Serve is shut down, and the command returns 0.

A second signal ends it at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.api import serve_start
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

logger = logging.getLogger("app.serve")

# For the processes of a cluster that is started here, unless they are set already.
ENVIRONMENT = {
    # What proxies and ingresses tell each other goes by value, at two thirds of the cost, so messages need room for the
    # largest bodies.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
    # A body goes to the ingress with the head of its request, instead of by a call of its own. While an ingress lets
    # nobody in, the proxy says so for it.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "app.serving.proxies.middlewares",
    # Our methods never block their event loop, so they share it with Serve's: else each item changes threads twice.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Serve's controller looks after its replicas ten times a second by default, each time asking for the cluster's
    # resources; less often, Ray's idle processes take a seventh less.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    # A proxy that starts more slowly, on a machine that does much else, would be killed, and the start fail with it.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Ray would run its workers at a lower priority than anything else on the machine.
    "RAY_worker_niceness": "0",
}

_POLL_S, _LOOK_S = 0.5, 0.1
# The last answers are on their way through Serve's proxies when no ingress has any left.
_LAST_BYTES_S = 1.0
_SHUTDOWN_TIMEOUT_S = 60.0


class Signals:
    """The first SIGTERM or SIGINT is noted, the second ends the process. Make it in the main thread, after Ray has set
    its own handlers."""

    def __init__(self) -> None:
        self._came = False  # no Event: its lock is the main thread's, which a handler interrupts
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @property
    def came(self) -> bool:
        return self._came

    def wait(self, timeout_s: float) -> bool:
        """Returns whether one has come."""
        ends_at = time.monotonic() + timeout_s
        while not self._came and (left_s := ends_at - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left_s))
        return self._came

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            # Ray's processes end with this one, if it has started them.
            os._exit(128 + number)
        self._came = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser("python -m app.serve", description="Serve until SIGTERM or SIGINT comes.")
    parser.add_argument("config", nargs="?", default="serve_config.yaml", type=Path, help="as `serve run` takes it")
    parser.add_argument("--grace-s", type=float, default=60.0, help="for requests under way when the signal comes")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        config = ServeDeploySchema.model_validate(yaml.safe_load(options.config.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        logger.error("%s cannot be used: %s", options.config, error)
        return 1
    sys.path.insert(0, os.getcwd())  # as `serve run` has it, for `import_path`
    set_environment()
    ray.init(namespace="serve")
    signals = Signals()
    try:
        return run(config, signals, options.grace_s)
    finally:
        ray.shutdown()


def set_environment() -> None:
    """Before Ray is started."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def run(config: ServeDeploySchema, signals: Signals, grace_s: float) -> int:
    """Serve the applications of a configuration until a signal comes; returns the exit status."""
    names = [application.name for application in config.applications]
    client: Any = serve_start(
        http_options=config.http_options.model_dump(),
        proxy_location=config.proxy_location,
        grpc_options=config.grpc_options.model_dump(),
    )
    try:
        client.deploy_apps(config, _blocking=False)
        status = wait_until_running(names, signals)
        if status:
            return status
        if not signals.came:
            host, port = config.http_options.host, config.http_options.port
            logger.info("serving on http://%s:%d", host, port)
        while not signals.wait(timeout_s=3600.0):
            pass
        drain(grace_s)
        return 0
    finally:
        client.shutdown(timeout_s=_SHUTDOWN_TIMEOUT_S)


def wait_until_running(names: Sequence[str], signals: Signals) -> int:
    """Returns 0 when all applications run, or a signal has come, and 1 when one cannot be deployed."""
    while not signals.wait(_POLL_S):
        applications = serve.status().applications
        statuses = {name: applications[name].status for name in names if name in applications}
        for name, status in statuses.items():
            if status == ApplicationStatus.DEPLOY_FAILED:
                logger.error("%s cannot be deployed: %s", name, applications[name].message)
                return 1
        if len(statuses) == len(names) and set(statuses.values()) <= {ApplicationStatus.RUNNING}:
            return 0
    return 0


def drain(grace_s: float) -> None:
    """Have all ingresses refuse what is new; returns when nothing is under way, or after the grace period."""
    logger.info("draining: new requests are refused, those under way have %g s; another signal ends them", grace_s)
    ends_at = time.monotonic() + grace_s
    # Again and again: an ingress that starts meanwhile has to be told, too.
    while num_under_way := sum(map(_drain_ingress, folio_applications())):
        if time.monotonic() >= ends_at:
            logger.warning("%d requests are broken off", num_under_way)
            return
        time.sleep(_POLL_S)
    time.sleep(_LAST_BYTES_S)


def folio_applications() -> list[str]:
    """Names of the applications with ingresses of ours that run: others know nothing of draining."""
    names = []
    for name, application in serve.status().applications.items():
        deployments: Any = application.deployments
        if {"Ingress", "EngineReplica"} <= deployments.keys() and deployments["Ingress"].replica_states.get("RUNNING"):
            names.append(name)
    return names


def _drain_ingress(name: str) -> int:
    """Requests under way at all ingresses of an application."""
    try:
        handle = serve.get_deployment_handle("Ingress", name)
        return sum(handle.broadcast("drain").results(timeout_s=10.0))
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("an ingress of %s does not answer: %s", name, error)
        return 1  # it is asked again, until the grace period ends


if __name__ == "__main__":
    sys.exit(main())
