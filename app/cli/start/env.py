"""`folio env`, and the variables for the processes of a cluster that `folio serve` starts."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from folio.app.config.machine import binding_variables
from folio.app.http import haproxy

logger = logging.getLogger(__name__)

EXAMPLES = """
eval "$(folio env)" && ray start --head
"""

# Values of variables that are not set.
ENVIRONMENT = {
    # Messages between proxies and ingresses go by value, at two thirds of the cost, so they need room for the largest
    # bodies.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
    # The largest message of gRPC clients: Serve's default is 2 GiB. Bodies have their own bound.
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(16 << 20),
    # Our methods never block the event loop, so they share Serve's: otherwise each item changes threads twice.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # By default Serve's controller checks its replicas and the cluster's resources ten times a second; with four times,
    # Ray's idle processes take a seventh less CPU time.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    # On a busy machine a proxy starts slowly; it would be killed, and the start would fail.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "150",
    # A dead proxy is replaced after three checks; Serve's default is a check every 10 s. One that answers late is not
    # dead, unless its machine starves for three times 5 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
    # Waiting threads of a step soon yield their core: by default they spin for milliseconds, and with another replica
    # on the same cores a step takes ten times as long. libgomp reads the count (up to 60 us of spinning; without any, a
    # step takes a tenth longer), other OpenMP libraries the policy.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "1000",
    # By default Ray's workers run at a lower priority than everything else on the machine.
    "RAY_worker_niceness": "0",
}


def stay_on_this_machine() -> None:
    """Have the processes of a cluster that this process will start listen at 127.0.0.1 only, as far as Ray lets them.
    Without effect after Ray has been imported."""
    # This means a cluster of one node. The variable's name tells of the systems on which that is Ray's default.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def env() -> None:
    """Print variables to export before `ray start` on this node, and start nothing."""
    for variable in binding_variables():
        print(f"unset {variable.partition('=')[0]}")
    for name, value in environment(_haproxy_directory()).items():
        print(f"export {name}={shlex.quote(value)}")


@contextmanager
def prepared_environment(*, has_tls: bool = False) -> Iterator[None]:
    """Set variables for the processes of a cluster that is started within this context, unless they are set. Those that
    would bind the engine's threads to cores are removed meanwhile."""
    directory, before = _haproxy_directory(), dict(os.environ)
    values = environment(directory, has_tls=has_tls)
    if binding := binding_variables():
        logger.warning(
            "%s would bind all threads of an engine to one core: its processes do not get it; unset it",
            ", ".join(binding),
        )
    unset = [variable.partition("=")[0] for variable in binding]
    for name in unset:
        del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        for name in (*values, *unset):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        shutil.rmtree(directory, ignore_errors=True)


def environment(directory: Path, *, has_tls: bool = False) -> dict[str, str]:
    """Variables for a node's processes that are not set yet. HAProxy serves HTTP where it can; otherwise Serve's slower
    proxy does. `directory`: for HAProxy's files."""
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
