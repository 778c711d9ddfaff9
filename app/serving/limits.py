"""The books of callers' limits as a Ray actor, and an ingress's side of it.

The actor has a name, and whichever ingress finds none creates and owns it: it ends with that ingress, and so with the
application, and the others make a new one, which learns from their reports what has been used. An ingress that cannot
reach it grants its share of each limit (`app/edge/limits.py`). Where there is one ingress there is no actor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from app.edge.limit_ledger import LimitLedger
from app.edge.limits import EARLY_REPORT_S, REPORT_PERIOD_S, IngressLimits, LimitAnswer, LimitUsage
from app.fleet.overload import LoadShedder
from app.serving.ledger import NAMESPACE

logger = logging.getLogger(__name__)

# With nothing to report an ingress only says that it lives.
IDLE_BEAT_S = 1.0
# An answer that takes longer is not waited for.
ANSWER_TIMEOUT_S = 1.0
# An actor takes some seconds to start, of which nothing need be said.
_STARTS_S = 15.0


class LimitsActor:
    """`Books` of one application."""

    def __init__(self) -> None:
        self._books = LimitLedger()

    def exchange(self, ingress: str, uses: Mapping[str, LimitUsage], num_arrived: int) -> LimitAnswer:
        """See `Books.exchange`."""
        return self._books.settle_usage(ingress, uses, num_arrived)


def num_ingresses() -> int:
    """As this ingress can tell: its deployment's setting, and its own number among them."""
    context = serve.get_replica_context()
    return max(context.world_size or 1, context.rank.rank + 1)


class LimitReporter:
    """Reports for one ingress, as a task of its event loop. No request waits for it.

    Args:
        refusals: the door of the ingress, which has to know its share.
        app_name: ingresses of the same one share.
        ingress: its name, unlike any other's.
        num_replicas: how many ingresses there should be, as Serve says at the moment; it may know of one only.
    """

    def __init__(
        self, shares: IngressLimits, refusals: LoadShedder, app_name: str, ingress: str, num_replicas: Callable[[], int]
    ) -> None:
        self._shares = shares
        self._refusals = refusals
        self._name = f"folio-limits:{app_name}"
        self._ingress = ingress
        self._num_replicas = num_replicas
        self._actor: Any = None
        self._uses: dict[str, LimitUsage] = {}  # reported by the exchange under way
        self._exchange: asyncio.Future[LimitAnswer] | None = None
        self._problem: str | None = None
        self._says_from = time.monotonic() + _STARTS_S
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._shares.num_ingresses = num_replicas()
        self._refusals.arrival_share = 1 / num_replicas()

    def start(self) -> None:
        """Begin; within the event loop of the requests."""
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._shares.on_early_report = lambda: (
                self._hurried.is_set() or loop.call_soon_threadsafe(self._hurried.set)
            )
            self._task = loop.create_task(self._run(), name="folio-limits")

    async def _run(self) -> None:
        while True:
            try:
                await self._beat()
            except Exception:  # limits go on as shares; the next beat may do better
                logger.exception("the limits of callers could not be exchanged")
            await asyncio.sleep(EARLY_REPORT_S)
            try:
                is_busy = self._shares.has_reports or self._refusals.is_shedding(time.monotonic())
                async with asyncio.timeout(REPORT_PERIOD_S if is_busy and self._actor is not None else IDLE_BEAT_S):
                    await self._hurried.wait()
            except TimeoutError:
                pass
            self._hurried.clear()

    async def _beat(self) -> None:
        num_replicas = self._num_replicas()
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._find, num_replicas > 1)
            if self._actor is None:
                self._shares.num_ingresses, self._refusals.arrival_share = 1, 1.0
                return
            is_late = self._exchange is not None
            if self._exchange is None:
                self._uses = self._shares.take_reports()
                exchange = self._actor.exchange.remote(self._ingress, self._uses, self._refusals.num_arrived)
                self._exchange = asyncio.wrap_future(exchange.future())
            done, _ = await asyncio.wait([self._exchange], timeout=ANSWER_TIMEOUT_S)
            if not done:  # the books may have entered it, or will: another report waits until that is known
                self._shares.note_disconnected({}, max(num_replicas, self._shares.num_ingresses))
                self._say("no answer")
                return
            ended, self._exchange = self._exchange, None
            answer = ended.result()
        except (RayError, ValueError) as error:  # it has died, or has just been found dead
            self._actor = None
            uses, self._uses = self._uses, {}
            self._shares.note_disconnected(uses, max(num_replicas, self._shares.num_ingresses))
            self._say(type(error).__name__)
            return
        self._uses = {}
        self._shares.apply_answer(answer.without_leases() if is_late else answer)
        self._refusals.arrival_share = answer.arrival_share
        self._say(None)

    def _say(self, problem: str | None) -> None:
        """Once, and once again when it is over."""
        if problem is not None and time.monotonic() < self._says_from:
            return
        self._says_from = 0.0
        if problem is not None and self._problem is None:
            logger.warning(
                "limits of callers are not shared (%s): this ingress grants 1/%d of each",
                problem,
                self._shares.num_ingresses,
            )
        elif problem is None and self._problem is not None:
            logger.info("limits of callers are shared again, by %d ingresses", self._shares.num_ingresses)
        self._problem = problem

    def _find(self, makes: bool) -> Any:
        """The actor. `makes`: if there is none; else it is `None`."""
        if not makes:
            try:
                return ray.get_actor(self._name, NAMESPACE)
            except ValueError:
                return None
        options: Any = {
            "name": self._name,
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": 0,  # ingresses make a new one, also when its owner has gone
        }
        return ray.remote(LimitsActor).options(**options).remote()
