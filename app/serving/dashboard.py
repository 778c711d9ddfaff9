"""The dashboard's source: the engine replicas of this application, and Serve's count of those that start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError

from folio.app.dashboard.views import ReplicaView, WatchCall
from folio.app.edge.admission import AdmissionControl
from folio.app.errors import FolioError
from folio.app.serving.calls import ReplicaClient

_TIMEOUT_S = 2.0
# Greatest age of the controller's answer.
_STATUS_AGE_S = 3.0


class WatchedReplicas:
    """See `folio.app.dashboard.collector.Source`.

    Args:
        count_starting: returns the number of replicas that start; may block.
    """

    def __init__(
        self, replicas: ReplicaClient, admission: AdmissionControl, count_starting: Callable[[], int | None]
    ) -> None:
        self._replicas = replicas
        self._admission = admission
        self._count_starting = count_starting
        self._num_replicas = 0
        self._num_starting = 0
        self._asked_at = -_STATUS_AGE_S
        self._asking: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._admission.is_open

    async def look(self, call: WatchCall) -> tuple[Sequence[ReplicaView], int]:
        try:
            answers = await self._replicas.call_each("look", call, timeout_s=_TIMEOUT_S)
        except FolioError:  # the controller is away, or no replica can be called: all are silent
            return [], self._num_replicas
        self._num_replicas = len(answers)
        views = [answer for answer in answers if isinstance(answer, ReplicaView)]
        return views, len(answers) - len(views)

    async def num_starting(self) -> int:
        """The latest number; a controller that hangs is not waited for."""
        if self._asking is None or self._asking.done():
            if time.monotonic() - self._asked_at < _STATUS_AGE_S:
                return self._num_starting
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait([self._asking], timeout=_TIMEOUT_S)
        return self._num_starting

    async def _ask(self) -> None:
        number = await asyncio.to_thread(self._count_starting)
        self._num_starting = self._num_starting if number is None else number
        self._asked_at = time.monotonic()


def count_starting(deployment: str, app_name: str) -> int | None:
    """Replicas of a deployment that Serve is starting; `None` while its controller is away."""
    try:
        application = serve.status().applications.get(app_name)
    except RayError:
        return None
    if application is None or deployment not in application.deployments:
        return 0
    states: Any = application.deployments[deployment].replica_states
    return int(states.get("STARTING", 0))
