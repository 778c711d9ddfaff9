"""`python -m app.serve [serve_config.yaml]`: serve until a signal comes, then finish what is under way.

It does what `serve run` does with a file: starts Ray, or connects to the cluster of RAY_ADDRESS, and deploys the
applications. What is wrong with the file, and an address in use, are told before anything starts, a line each, and the
status is 2; with `--check` that is all. It is 1 if an application cannot be deployed. On SIGTERM or SIGINT, as Ctrl-C
sends it:

1. `/ready` and new requests are answered 503 with Retry-After;
2. requests under way are finished, for as long as `--grace-s` says;
3. Serve is shut down, which takes 5 s at most, and the status is 0.

A second signal ends it at once.

The server's address, taken before anything starts.

Serve's proxies listen with SO_REUSEPORT: another server may listen at the same address, and each then gets some of the
connections, without an error anywhere. So whoever is about to start proxies asks without that option first, which
tells of every listener. Between that and the proxy pass seconds, in which another Folio may ask, too: so a Folio also
binds a Unix socket named after the address, from the first moment to the last. Only one can, and it goes with the
process. (Two that start in the same seconds, one at an address and one at all of them, are not told apart.)
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from app import haproxy
from app.checks import FOLIO, load_config
from app.compat.ray import ServeInstance
from app.config.args import AppArgs
from app.errors import ConfigError

logger = logging.getLogger("app.serve")

# For the processes of a cluster that is started here, unless they are set already.
ENVIRONMENT = {
    # What proxies and ingresses tell each other goes by value, at two thirds of the cost, so messages need room for the
    # largest bodies.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
    # Of gRPC clients, where there are any: Serve would take 2 GiB of anybody. Bodies have their own bound.
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(16 << 20),
    # Our methods never block their event loop, so they share it with Serve's: else each item changes threads twice.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Serve's controller looks after its replicas ten times a second by default, each time asking for the cluster's
    # resources; less often, Ray's idle processes take a seventh less.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    # A proxy that starts more slowly, on a machine that does much else, would be killed, and the start fail with it.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # A proxy that died is replaced after three checks; Serve's default is one every 10 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Threads of a step that wait for each other soon give their core away: by default they spin for milliseconds, and
    # beside anything else on the same cores, such as another replica, a step takes ten times as long. libgomp looks at
    # the count (up to 60 us; a step without any takes a tenth longer), other OpenMP libraries at the policy.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "1000",
    # Ray would run its workers at a lower priority than anything else on the machine.
    "RAY_worker_niceness": "0",
}
HOST = "127.0.0.1"  # where the file names none: Serve's default is every address of the machine

_POLL_S, _LOOK_S = 0.5, 0.1
# The last answers are on their way through HAProxy, or Serve's proxy, when no ingress has any left.
_LAST_BYTES_S = 1.0
# For an ingress to say how many requests it has; for Serve to stop its processes; and for that and Ray's together.
_ANSWER_S, _SHUTDOWN_S, _END_S = 3.0, 3.0, 5.0
_ROUTED_S = 10.0
# How Python writes the last line of an exception of ours; Serve's messages have whole tracebacks.
_OUR_ERROR = re.compile(r"app\.errors\.(?:ConfigError|ModelError)(?:\(\w+\))?: (.*)")


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
    parser.add_argument("--check", action="store_true", help="say what is wrong with the file, and start nothing")
    parser.add_argument("--port", type=int, help="instead of http_options.port")
    parser.add_argument("--grace-s", type=float, default=60.0, help="for requests under way when the signal comes")
    parser.add_argument(
        "--environment",
        action="store_true",
        help="print what to export before `ray start` on this node, and start nothing",
    )
    options = parser.parse_args(arguments)
    if options.environment:
        for name, value in environment(_haproxy_directory()).items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    sys.path.insert(0, os.getcwd())  # as `serve run` has it, for `import_path`
    is_local = "RAY_ADDRESS" not in os.environ
    try:
        config = load_config(options.config, is_local=is_local)
        if options.check:
            print(f"{options.config}: ok")
            return 0
        http = config.http_options
        if "host" not in http.model_fields_set:
            http.host = HOST
        if options.port is not None:
            http.port = options.port
        claimed = (
            reserve_address(http.host, http.port) if is_local else None
        )  # of a cluster that runs, the port is its own
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    with prepared_environment(has_tls=bool(http.ssl_certfile)) if is_local else nullcontext():
        try:
            context = ray.init(namespace="serve")
            return serve_until_signal(config, Signals(), options.grace_s, context.dashboard_url)
        finally:
            ray.shutdown()
            if claimed is not None:
                claimed.close()


@contextmanager
def prepared_environment(*, has_tls: bool = False) -> Iterator[None]:
    """Variables for the processes of a cluster that is started within, unless they are set already."""
    directory, before = _haproxy_directory(), dict(os.environ)
    values = environment(directory, has_tls=has_tls)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]
        shutil.rmtree(directory, ignore_errors=True)


def environment(directory: Path, *, has_tls: bool = False) -> dict[str, str]:
    """Variables for a node's processes that are not set yet. HAProxy takes HTTP requests where it can, and else Serve's
    proxy, which is right, too, but slower.

    Args:
        directory: of HAProxy's files.
    """
    values = dict(ENVIRONMENT)
    if os.environ.get(haproxy.SWITCH, "1") == "1":
        try:
            haproxy.check_haproxy(has_tls=has_tls)
            values |= haproxy.environment(directory)
        except haproxy.NoHAProxyError as error:
            logger.warning("Serve's proxy takes HTTP requests, which is slower than HAProxy: %s", error)
            values[haproxy.SWITCH] = "0"
    decided_here = {haproxy.SWITCH, "FORWARDED_ALLOW_IPS"}  # from what is set
    return {name: value for name, value in values.items() if name not in os.environ or name in decided_here}


def _haproxy_directory() -> Path:
    """A new one, with a short path, of this user alone."""
    return Path(tempfile.mkdtemp(prefix="folio-", dir="/tmp"))


def serve_until_signal(
    config: ServeDeploySchema, signals: Signals, grace_s: float, dashboard: str | None = None
) -> int:
    """Serve the applications of a configuration until a signal comes; returns the exit status."""
    names = [application.name for application in config.applications]
    instance = ServeInstance(config)
    status, has_ended = 1, True
    try:
        instance.deploy(config)
        status = wait_until_running(names, signals)
        if status:
            return status
        wait_until_routed(base_url(config), signals)
        if not signals.came:
            print(greeting(config, dashboard), flush=True)
        while not signals.wait(timeout_s=3600.0):
            pass
        has_ended = drain_ingresses(grace_s)
        return status
    finally:
        end_within(_END_S, status)
        instance.shut_down(_SHUTDOWN_S if has_ended else 0.0)


def end_within(seconds: float, status: int) -> None:
    """What Serve and Ray stop in order ends with this process after so long, as far as it was started by it."""
    watchdog = threading.Timer(seconds, os._exit, (status,))
    watchdog.daemon = True
    watchdog.start()


def wait_until_running(names: Sequence[str], signals: Signals) -> int:
    """Returns 0 when all applications run, or a signal has come, and 1 when one cannot be deployed."""
    while not signals.wait(_POLL_S):
        applications = serve.status().applications
        statuses = {name: applications[name].status for name in names if name in applications}
        for name, status in statuses.items():
            deployments: Any = applications[name].deployments
            messages = [applications[name].message, *(deployment.message for deployment in deployments.values())]
            # What our errors say is so another time, too: Serve need not try again.
            hopeless = [reason for message in messages for reason in _OUR_ERROR.findall(message)]
            if hopeless or status == ApplicationStatus.DEPLOY_FAILED:
                reason = hopeless[0] if hopeless else applications[name].message
                logger.error("%s cannot be deployed: %s", name, reason)
                return 1
        if len(statuses) == len(names) and set(statuses.values()) <= {ApplicationStatus.RUNNING}:
            return 0
    return 0


def wait_until_routed(url: str, signals: Signals) -> None:
    """Returns when HAProxy, or Serve's proxy, here knows of the applications; or a signal has come; or it has long not
    said so, as when this machine has none."""
    ends_at = time.monotonic() + _ROUTED_S
    while not signals.came and time.monotonic() < ends_at:
        try:
            with urllib.request.urlopen(f"{url}/-/healthz", timeout=_ANSWER_S):
                return
        except (OSError, HTTPException):
            signals.wait(_LOOK_S)


def base_url(config: ServeDeploySchema) -> str:
    """Where this machine reaches the server."""
    http = config.http_options
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(http.host, f"[{http.host}]" if ":" in http.host else http.host)
    return f"{'https' if http.ssl_certfile else 'http'}://{host}:{http.port}"


def greeting(config: ServeDeploySchema, dashboard: str | None) -> str:
    """What a terminal shows when the server is ready."""
    lines = [f"\n==> Folio is ready at {base_url(config)}. Try:"]
    for application in config.applications:
        if application.import_path == FOLIO:
            body = {
                "model": AppArgs.model_validate(application.args).served_name,
                "temperature": 0,
                "messages": [{"role": "user", "content": "What is Folio?"}],
            }
            url = f"{base_url(config)}{(application.route_prefix or '').rstrip('/')}/v1/chat/completions"
            lines.append(f"curl {url} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}")
    if dashboard and os.environ.get("RAY_AUTH_MODE") == "token":  # as Ray 2.60 has it for a cluster that starts
        lines.append(
            f"In other terminals Ray's commands need a variable: RAY_AUTH_MODE=token {_command('serve')} status\n"
            f"and its dashboard, http://{dashboard}, asks for what `{_command('ray')} get-auth-token` prints."
        )
    return "\n\n".join(lines) + "\n"


def _command(name: str) -> str:
    """One that is installed beside this Python, as a terminal here finds it."""
    path = Path(sys.executable).parent / name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def drain_ingresses(grace_s: float) -> bool:
    """Have all ingresses refuse what is new; returns whether all that was under way has ended in the grace period."""
    logger.info("draining: new requests are refused, those under way have %g s; another signal ends them", grace_s)
    ends_at = time.monotonic() + grace_s
    # Again and again: an ingress that starts meanwhile has to be told, too.
    while num_under_way := sum(map(_drain_ingress, folio_applications())):
        if time.monotonic() >= ends_at:
            logger.warning("%d requests are broken off", num_under_way)
            return False
        time.sleep(_POLL_S)
    time.sleep(_LAST_BYTES_S)
    return True


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
        return sum(handle.broadcast("drain").results(timeout_s=_ANSWER_S))
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("an ingress of %s does not answer: %s", name, error)
        return 1  # it is asked again, until the grace period ends


_ASK_S = 1.0


def reserve_address(host: str, port: int) -> socket.socket | None:
    """A socket to be kept for as long as the address is wanted; none where there are no such sockets (not Linux).

    Raises:
        ConfigError: the address is in use, or cannot be had.
    """
    name = f"{host}:{port}"
    if not 0 < port < 1 << 16:
        raise ConfigError(f"http_options: {name} cannot be; choose another port, between 1 and {(1 << 16) - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what lingers of earlier connections is fine
            probe.bind(address)
            probe.listen()
    except (OSError, OverflowError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = f"is in use{_who_answers(host, port)}; stop that, or choose" if in_use else f"({error}); choose"
        raise ConfigError(f"http_options: {name} {reason} another port, with --port or in the file") from None
    if not sys.platform.startswith("linux"):
        return None
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claimed.bind(f"\0folio:{name}")
    except OSError:
        claimed.close()
        raise ConfigError(
            f"http_options: {name} is taken by another Folio that is starting; stop that, or choose another port, with "
            "--port or in the file"
        ) from None
    return claimed


def _who_answers(host: str, port: int) -> str:
    """As far as it is soon found out."""
    where = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{where}]' if ':' in where else where}:{port}/v1/models"
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as answer:
            model = json.load(answer)["data"][0]
        return f" by a Folio that serves {model['id']}" if model["owned_by"] == "folio" else " by another LLM server"
    except urllib.error.HTTPError:
        return " by an HTTP server"
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
