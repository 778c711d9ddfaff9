"""The ledger of callers' limits as a Ray actor, and an ingress's side of it.

The first ingress that finds no actor of this name creates and owns it. The actor ends with that ingress, at the latest
with the application; the other ingresses create a new one, which learns past usage from their reports. An ingress that
cannot reach the actor grants its share of each limit (`app/edge/limits.py`). A single ingress needs no actor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from folio.app.edge.limit_ledger import LimitLedger
from folio.app.edge.limits import EARLY_REPORT_S, REPORT_PERIOD_S, IngressLimits, LimitAnswer, LimitUsage
from folio.app.fleet.overload import LoadShedder
from folio.app.serving.ledger import NAMESPACE, find_actor

logger = logging.getLogger(__name__)

# Interval of heartbeats without usage to report.
IDLE_BEAT_S = 1.0
ANSWER_TIMEOUT_S = 1.0
# Time in which missing answers are not logged: an actor takes some seconds to start.
_STARTS_S = 15.0


def num_ingresses() -> int:
    """The number of ingresses, as far as this one knows: the deployment's setting, and its own rank."""
    context = serve.get_replica_context()
    return max(context.world_size or 1, context.rank.rank + 1)


class LimitReporter:
    """Settles one ingress's usage with the ledger, in a task of its event loop. No request waits for it.

    Args:
        shedder: the ingress's load shedder, which needs the ingress's share of arrivals.
        app_name: the application whose ingresses share the limits.
        ingress: unique name of this ingress.
        num_replicas: returns Serve's present number of ingresses, which may be too low.
    """

    def __init__(
        self, limits: IngressLimits, shedder: LoadShedder, app_name: str, ingress: str, num_replicas: Callable[[], int]
    ) -> None:
        self._limits = limits
        self._shedder = shedder
        self._name = f"folio-limits:{app_name}"
        self._ingress = ingress
        self._num_replicas = num_replicas
        self._actor: Any = None
        self._uses: dict[str, LimitUsage] = {}  # of the call in flight
        self._call: asyncio.Future[LimitAnswer] | None = None
        self._problem: str | None = None
        self._logs_from = time.monotonic() + _STARTS_S
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._limits.num_ingresses = num_replicas()
        self._shedder.arrival_share = 1 / num_replicas()

    def start(self) -> None:
        """Start the task, in the event loop of the requests."""
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._limits.on_early_report = lambda: (
                self._hurried.is_set() or loop.call_soon_threadsafe(self._hurried.set)
            )
            self._task = loop.create_task(self._run(), name="folio-limits")

    async def _run(self) -> None:
        while True:
            try:
                await self.settle()
            except Exception:  # the ingress goes on with its share; the next attempt may succeed
                logger.exception("the usage of limits could not be settled")
            await asyncio.sleep(EARLY_REPORT_S)
            try:
                is_busy = self._limits.has_reports or self._shedder.is_shedding(time.monotonic())
                async with asyncio.timeout(REPORT_PERIOD_S if is_busy and self._actor is not None else IDLE_BEAT_S):
                    await self._hurried.wait()
            except TimeoutError:
                pass
            self._hurried.clear()

    async def settle(self) -> None:
        """Report usage to the ledger and apply its answer; without an answer, fall back to this ingress's share."""
        num_replicas = self._num_replicas()
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._find, num_replicas > 1)
            if self._actor is None:
                self._limits.num_ingresses, self._shedder.arrival_share = 1, 1.0
                return
            is_late = self._call is not None
            if self._call is None:
                self._uses = self._limits.take_reports()
                reference = self._actor.settle_usage.remote(self._ingress, self._uses, self._shedder.num_arrived)
                self._call = asyncio.wrap_future(reference.future())
            done, _ = await asyncio.wait([self._call], timeout=ANSWER_TIMEOUT_S)
            if not done:  # the ledger may still record this usage: no other report until the call has ended
                self._limits.note_disconnected({}, max(num_replicas, self._limits.num_ingresses))
                self._log("no answer")
                return
            ended, self._call = self._call, None
            answer = ended.result()
        except (RayError, ValueError) as error:  # the actor has died, or was found dead
            self._actor = None
            uses, self._uses = self._uses, {}
            self._limits.note_disconnected(uses, max(num_replicas, self._limits.num_ingresses))
            self._log(type(error).__name__)
            return
        self._uses = {}
        self._limits.apply_answer(answer.without_leases() if is_late else answer)
        self._shedder.arrival_share = answer.arrival_share
        self._log(None)

    def _log(self, problem: str | None) -> None:
        """Log a problem once, and its end."""
        if problem is not None and time.monotonic() < self._logs_from:
            return
        self._logs_from = 0.0
        if problem is not None and self._problem is None:
            number = self._limits.num_ingresses
            logger.warning("limits of callers are not shared (%s): this ingress grants 1/%d of each", problem, number)
        elif problem is None and self._problem is not None:
            logger.info("limits of callers are shared again, by %d ingresses", self._limits.num_ingresses)
        self._problem = problem

    def _find(self, creates: bool) -> Any:
        """The actor. Without one, `creates` it or returns `None`."""
        if not creates:
            try:
                return ray.get_actor(self._name, NAMESPACE)
            except ValueError:
                return None
        return find_actor(LimitLedger, self._name)
