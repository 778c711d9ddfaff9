"""The command `python -m app.serve [serve_config.yaml]`: serve until a signal, then drain.

Like `serve run` with a file, the command starts Ray, or connects to the cluster of RAY_ADDRESS, and deploys the
applications. Faults of the file and an address in use are printed before anything starts, a line each, and the exit
status is 2; `--check` does nothing else. The status is 1 if an application cannot be deployed. On SIGTERM or SIGINT:

1. `/ready` and new requests are answered 503 with Retry-After;
2. requests in flight are finished within `--grace-s`;
3. Serve is shut down within 5 s, and the status is 0.

A second signal ends the process at once.

The server's address is reserved before anything starts. Serve's proxies listen with SO_REUSEPORT: another server may
listen at the same address, and each then gets some of the connections without an error. The command therefore first
binds without that option, which fails if there is any listener. Seconds pass until the proxy listens, in which another
Folio may start: the command also binds a Unix socket named after the address until its end. (Two commands that start in
the same seconds, one with an address and one with all addresses, are not detected.)
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

# Variables for the processes of a cluster that is started here, unless they are set.
ENVIRONMENT = {
    # Messages between proxies and ingresses go by value, at two thirds of the cost, so they need room for the largest
    # bodies.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
    # Of gRPC clients: Serve's default is 2 GiB. Bodies have their own bound.
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(16 << 20),
    # Our methods never block the event loop, so they share Serve's: otherwise each item changes threads twice.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # By default Serve's controller checks its replicas and the cluster's resources ten times a second; at four times,
    # Ray's idle processes take a seventh less.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    # On a busy machine a proxy starts slowly; it would be killed, and the start would fail.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # A dead proxy is replaced after three checks; Serve's default is a check every 10 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Waiting threads of a step soon yield their core: by default they spin for milliseconds, and with another replica
    # on the same cores a step takes ten times as long. libgomp reads the count (up to 60 us of spinning; without any, a
    # step takes a tenth longer), other OpenMP libraries the policy.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "1000",
    # By default Ray's workers run at a lower priority than everything else on the machine.
    "RAY_worker_niceness": "0",
}
HOST = "127.0.0.1"  # unless the file names another; Serve's default is every address of the machine

_POLL_S, _LOOK_S = 0.5, 0.1
# For the last bytes to pass through HAProxy, or Serve's proxy, after the last request has ended.
_FLUSH_GRACE_S = 1.0
# Timeouts of an ingress's answer, of Serve's shutdown, and of the whole end, Ray's processes included.
_ANSWER_S, _SHUTDOWN_S, _END_S = 3.0, 3.0, 5.0
_ROUTED_S = 10.0
_ASK_S = 1.0  # of another server at the address
# Last line of our exceptions in a traceback, as Serve's messages contain them.
_OUR_ERROR = re.compile(r"app\.errors\.(?:ConfigError|ModelError)(?:\(\w+\))?: (.*)")


class Signals:
    """Note the first SIGTERM or SIGINT in `came`; end the process at the second. Construct in the main thread, after
    Ray has set its handlers."""

    def __init__(self) -> None:
        self.came = False  # no Event: a handler interrupts the main thread, which may hold its lock
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m app.serve", description="Serve until SIGTERM or SIGINT.")
    parser.add_argument(
        "config", nargs="?", default="serve_config.yaml", type=Path, help="a configuration file of `serve run`"
    )
    parser.add_argument("--check", action="store_true", help="print the file's faults, and start nothing")
    parser.add_argument("--port", type=int, help="in place of http_options.port")
    parser.add_argument("--grace-s", type=float, default=60.0, help="time for requests in flight after the signal")
    parser.add_argument(
        "--environment",
        action="store_true",
        help="print variables to export before `ray start` on this node, and start nothing",
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
        # In a cluster that runs already, the port is its own.
        reserved = reserve_address(http.host, http.port) if is_local else None
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
            if reserved is not None:
                reserved.close()


@contextmanager
def prepared_environment(*, has_tls: bool = False) -> Iterator[None]:
    """Set variables for the processes of a cluster that is started within this context, unless they are set."""
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
    """Variables for a node's processes that are not set yet. HAProxy serves HTTP where it can; otherwise Serve's slower
    proxy does. `directory`: of HAProxy's files."""
    values = dict(ENVIRONMENT)
    if os.environ.get(haproxy.SWITCH, "1") == "1":
        try:
            haproxy.check_haproxy(has_tls=has_tls)
            values |= haproxy.environment(directory)
        except haproxy.NoHAProxyError as error:
            logger.warning("Serve's proxy takes HTTP requests, which is slower than HAProxy: %s", error)
            values[haproxy.SWITCH] = "0"
    overridden = {haproxy.SWITCH, "FORWARDED_ALLOW_IPS"}  # with values that follow from the given ones
    return {name: value for name, value in values.items() if name not in os.environ or name in overridden}


def _haproxy_directory() -> Path:
    """A new private directory with a short path."""
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
    """End this process after so many seconds, and with it the processes of Serve and Ray that it started, even if their
    orderly end hangs."""
    watchdog = threading.Timer(seconds, os._exit, (status,))
    watchdog.daemon = True
    watchdog.start()


def wait_until_running(names: Sequence[str], signals: Signals) -> int:
    """Wait until all applications run, or a signal comes. Returns 1 when an application cannot be deployed, else 0."""
    while not signals.wait(_POLL_S):
        applications = serve.status().applications
        statuses = {name: applications[name].status for name in names if name in applications}
        for name, status in statuses.items():
            deployments: Any = applications[name].deployments
            messages = [applications[name].message, *(deployment.message for deployment in deployments.values())]
            # Our errors are permanent: do not wait for Serve's retries.
            permanent = [reason for message in messages for reason in _OUR_ERROR.findall(message)]
            if permanent or status == ApplicationStatus.DEPLOY_FAILED:
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


def base_url(config: ServeDeploySchema) -> str:
    """The server's URL from this machine."""
    http = config.http_options
    return f"{'https' if http.ssl_certfile else 'http'}://{_from_here(http.host)}:{http.port}"


def _from_here(host: str) -> str:
    """The host in a URL from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def greeting(config: ServeDeploySchema, dashboard: str | None) -> str:
    """The text for a terminal when the server is ready."""
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
    if dashboard and os.environ.get("RAY_AUTH_MODE") == "token":  # set by Ray 2.60 for a cluster that it starts
        lines.append(
            f"In other terminals Ray's commands need a variable: RAY_AUTH_MODE=token {_command('serve')} status\n"
            f"Its dashboard, http://{dashboard}, asks for the token that `{_command('ray')} get-auth-token` prints."
        )
    return "\n\n".join(lines) + "\n"


def _command(name: str) -> str:
    """The path of a command installed beside this Python, relative to the working directory if inside it."""
    path = Path(sys.executable).parent / name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def drain_ingresses(grace_s: float) -> bool:
    """Drain all ingresses. Returns whether all requests in flight have ended within the grace period."""
    logger.info("draining: new requests are refused, requests in flight have %g s; another signal ends them", grace_s)
    ends_at = time.monotonic() + grace_s
    # Repeated, because ingresses may start meanwhile.
    while num_in_flight := sum(map(_drain_ingress, folio_applications())):
        if time.monotonic() >= ends_at:
            logger.warning("the grace period is over: %d requests are cut off", num_in_flight)
            return False
        time.sleep(_POLL_S)
    time.sleep(_FLUSH_GRACE_S)
    return True


def folio_applications() -> list[str]:
    """Names of Folio's applications with a running ingress; others cannot drain."""
    names = []
    for name, application in serve.status().applications.items():
        deployments: Any = application.deployments
        if {"Ingress", "EngineReplica"} <= deployments.keys() and deployments["Ingress"].replica_states.get("RUNNING"):
            names.append(name)
    return names


def _drain_ingress(name: str) -> int:
    """Start draining an application's ingresses; returns their requests in flight."""
    try:
        handle = serve.get_deployment_handle("Ingress", name)
        return sum(handle.broadcast("drain").results(timeout_s=_ANSWER_S))
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("an ingress of %s does not answer: %s", name, error)
        return 1  # it is asked again, until the grace period ends


def reserve_address(host: str, port: int) -> socket.socket | None:
    """Reserve an address. Returns a socket to keep open until the end; on Linux only, elsewhere `None`.

    Raises:
        ConfigError: the address is in use or invalid.
    """
    name = f"{host}:{port}"
    if not 0 < port < 1 << 16:
        raise ConfigError(f"http_options: {name} is invalid; choose another port, between 1 and {(1 << 16) - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # earlier connections may linger
            probe.bind(address)
            probe.listen()
    except (OSError, OverflowError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = (
            f"is in use{_describe_server(host, port)}; stop that server, or choose" if in_use else f"({error}); choose"
        )
        raise ConfigError(f"http_options: {name} {reason} another port, with --port or in the file") from None
    if not sys.platform.startswith("linux"):
        return None
    reserved = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        reserved.bind(f"\0folio:{name}")
    except OSError:
        reserved.close()
        raise ConfigError(
            f"http_options: {name} is reserved by another Folio that is starting; stop that, or choose another port, "
            "with --port or in the file"
        ) from None
    return reserved


def _describe_server(host: str, port: int) -> str:
    """The kind of server at an address, if it answers soon."""
    try:
        with urllib.request.urlopen(f"http://{_from_here(host)}:{port}/v1/models", timeout=_ASK_S) as answer:
            model = json.load(answer)["data"][0]
        return f" by a Folio that serves {model['id']}" if model["owned_by"] == "folio" else " by another LLM server"
    except urllib.error.HTTPError:
        return " by an HTTP server"
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
