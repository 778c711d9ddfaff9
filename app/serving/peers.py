"""Hot prefixes of peer replicas, which warm the cache of a replica that starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from folio.app.fleet.messages import HotPrefixes
from folio.vmem import CachedPrefix

logger = logging.getLogger(__name__)

# Timeouts of calls to peer replicas: at the start of a replica, and at the load of a model for which requests wait.
STARTING_TIMEOUT_S, LOADING_TIMEOUT_S = 10.0, 1.0
_RETRY_S = 0.1  # between two attempts


def peer_prefixes(deployment: str, app_name: str, timeout_s: float, fingerprint: str) -> list[Sequence[CachedPrefix]]:
    """The hot prefixes (`EngineReplica.hot_prefixes`) of each running replica of a deployment that has this
    fingerprint, for a replica that starts or loads a model. Errors are logged and never prevent the start. Called in
    threads without an event loop."""
    try:
        if not _num_running(deployment, app_name):  # the first replica would wait for peers until the timeout
            return []
        answers = _broadcast(deployment, app_name, timeout_s, "hot_prefixes", fingerprint)
    except Exception as error:  # any: the deployment may have been deleted just now; the start continues
        unexpected = not isinstance(error, TimeoutError)
        name = type(error).__name__
        logger.warning("peer replicas cannot be asked for hot prefixes: %s: %s", name, error, exc_info=unexpected)
        return []
    found: list[Sequence[CachedPrefix]] = []
    num_others = 0
    for answer in answers:
        if isinstance(answer, Exception):
            logger.warning("no hot prefixes from a peer replica: %s", answer)
        elif isinstance(answer, HotPrefixes) and answer.fingerprint == fingerprint:
            found.append(answer.prefixes)
        else:  # token ids may have other meanings there
            num_others += 1
    if num_others:
        logger.info("%d peer replicas have another model or version; their prefixes are not restored", num_others)
    return found


def _num_running(deployment: str, app_name: str) -> int:
    application = serve.status().applications.get(app_name)
    if application is None or deployment not in application.deployments:
        return 0
    states: Any = application.deployments[deployment].replica_states
    return int(states.get("RUNNING", 0))


def _broadcast(deployment: str, app_name: str, timeout_s: float, method: str, *args: Any) -> list[Any]:
    """Every running replica's answer or exception."""
    # `serve.get_deployment_handle` would keep the handle, and its router would read all load reports for ever.
    handle: DeploymentHandle[Any] = DeploymentHandle(deployment, app_name)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                left_s = max(deadline - time.monotonic(), 0.0)
                return list(handle.broadcast(method, *args).results(timeout_s=left_s, return_exceptions=True))
            except DeploymentUnavailableError:  # a new handle does not know any replica yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
    finally:
        handle.shutdown()
