"""An ingress's side of the callers' limits: reports to their ledger, a `SharedTable`.

An ingress that gets no answer grants its share of each limit (`app/edge/limits.py`). A single ingress needs no ledger.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ray import serve

from folio.app.edge.limit_ledger import LimitLedger
from folio.app.edge.limits import EARLY_REPORT_S, REPORT_PERIOD_S, IngressLimits, LimitUsage
from folio.app.errors import UnavailableError
from folio.app.fleet.overload import LoadShedder
from folio.app.serving.shared_table import SharedTable

logger = logging.getLogger(__name__)

# Interval of heartbeats without usage to report.
IDLE_BEAT_S = 1.0
ANSWER_TIMEOUT_S = 1.0


def num_ingresses() -> int:
    """The number of ingresses that this one knows of, from the deployment's setting and its own rank."""
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
        name, without = f"folio-limits:{app_name}", "each ingress grants its share of them"
        self._ledger = SharedTable(LimitLedger, name, "limits of callers", without, ANSWER_TIMEOUT_S)
        self._ingress = ingress
        self._num_replicas = num_replicas
        self._number, self._uses = 0, dict[str, LimitUsage]()  # the report that awaits its answer
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
                logger.exception("cannot settle the usage of callers' limits with the ledger; trying again")
            await asyncio.sleep(EARLY_REPORT_S)
            try:
                is_busy = self._limits.has_reports or self._shedder.is_shedding(time.monotonic())
                async with asyncio.timeout(REPORT_PERIOD_S if is_busy and self._limits.connected else IDLE_BEAT_S):
                    await self._hurried.wait()
            except TimeoutError:
                pass
            self._hurried.clear()

    async def settle(self) -> None:
        """Report usage to the ledger and apply its answer; without an answer, fall back to this ingress's share. The
        same report is sent again until it is answered, and counts once."""
        num_replicas = self._num_replicas()
        if num_replicas == 1 and not await self._ledger.exists(creates=False):
            self._limits.num_ingresses, self._shedder.arrival_share = 1, 1.0
            return
        if not self._uses:
            self._number, self._uses = self._number + 1, self._limits.take_reports()
        try:
            answer = await self._ledger.call(
                "settle_usage", self._ingress, self._number, self._uses, self._shedder.num_arrived
            )
        except UnavailableError:
            self._limits.note_disconnected(max(num_replicas, self._limits.num_ingresses))
            return
        self._uses = {}
        self._limits.apply_answer(answer)
        self._shedder.arrival_share = answer.arrival_share
