"""What a replica that starts hears from those that run already."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from app.fleet.messages import HotPrefixes
from vmem import CachedPrefix

logger = logging.getLogger(__name__)

# Peers answer beside their work; a start does not wait for them longer.
ANSWER_TIMEOUT_S = 10.0
_ASK_AGAIN_S = 0.1


class PeerReplicas:
    """The other replicas of a deployment, as one that does not run yet reaches them: calls go to running ones only.

    Call it from a thread without an event loop. Whatever goes wrong with peers is logged, and prevents nothing.
    """

    def __init__(self, deployment: str, app_name: str) -> None:
        self._deployment = deployment
        self._app_name = app_name

    def prefixes(self, fingerprint: str) -> list[Sequence[CachedPrefix]]:
        """What each of them that has this fingerprint tells of its prefix cache (`EngineReplica.hot_prefixes`)."""
        try:
            if not self._num_running():
                return []
            answers = self._ask("hot_prefixes")
        except Exception as error:  # whatever it is (the deployment may just have gone), a replica starts without them
            name = type(error).__name__
            logger.warning("other replicas cannot be asked for their prefixes: %s: %s", name, error, exc_info=True)
            return []
        told: list[Sequence[CachedPrefix]] = []
        num_others = 0
        for answer in answers:
            if isinstance(answer, Exception):  # it has ended, hangs, or is of a version that tells nothing
                logger.warning("a replica does not tell its prefixes: %s", answer)
            elif isinstance(answer, HotPrefixes) and answer.fingerprint == fingerprint:
                told.append(answer.prefixes)
            else:  # its token ids are other words here
                num_others += 1
        if num_others:
            logger.info("%d replicas have another model or version; their prefixes are not restored", num_others)
        return told

    def _num_running(self) -> int:
        """Without this a first replica would wait for others until it gives up."""
        application = serve.status().applications.get(self._app_name)
        if application is None or self._deployment not in application.deployments:
            return 0
        states: Any = application.deployments[self._deployment].replica_states
        return int(states.get("RUNNING", 0))

    def _ask(self, method: str) -> list[Any]:
        """The answers of all, or the exceptions that they were."""
        # Serve would keep a handle of its own making, and with it a router that reads all reports for ever.
        handle: DeploymentHandle[Any] = DeploymentHandle(self._deployment, self._app_name)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            while True:
                try:
                    left_s = max(deadline - time.monotonic(), 0.0)
                    answers: list[Any] = handle.broadcast(method).results(timeout_s=left_s, return_exceptions=True)
                    return answers
                except DeploymentUnavailableError:  # a new handle has not heard of any replica yet
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_ASK_AGAIN_S)
        finally:
            handle.shutdown()
