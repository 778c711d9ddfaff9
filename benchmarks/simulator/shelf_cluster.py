"""Routers in front of simulated shelves of the same models: the real policies, costs and state of routers."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.simulator.cluster import REPORT_LAG_S, REPORT_PERIOD_S
from benchmarks.simulator.shelf import ShelfOutcome, ShelfSimulation
from benchmarks.simulator.shelf_model import ShelfRequest
from folio.app.engine.report import ReplicaReport
from folio.app.fleet.fleet import Fleet, RoutedRequest, SentRequest
from folio.app.fleet.policies import Policy, make_policy

# Each model has one replica, as if the operator had distributed the models.
FIXED = "fixed"


@dataclass(slots=True)
class ClusterOutcome:
    """Attributes:
    shelves: of each replica.
    num_cold: requests that were sent to a replica where the model was asleep.
    copies: number of replicas where a model is awake → how often that was so, of all models, once a second.
    """

    requests: list[ShelfRequest]
    shelves: list[ShelfOutcome] = field(default_factory=list)
    num_cold: int = 0
    copies: Counter[int] = field(default_factory=Counter)

    @property
    def mean_copies(self) -> float:
        """Replicas where a model is awake, of models that are awake anywhere."""
        return sum(n * count for n, count in self.copies.items()) / sum(n for k, n in self.copies.items() if k)


class ShelfCluster:
    """Simulates shelves behind routers. Deterministic; for one run.

    Args:
        shelves: replicas, with the same models.
        policy: a routing policy, or `FIXED`.
        num_routers: ingresses; each request arrives at any of them.
    """

    def __init__(
        self, shelves: Sequence[ShelfSimulation], models: Sequence[str], policy: str, *, num_routers: int = 2
    ) -> None:
        self._shelves = {f"replica-{i}": shelf for i, shelf in enumerate(shelves)}
        self._names = list(self._shelves)
        self._rng = random.Random(0)
        self._routers: list[dict[str, tuple[Fleet, Policy]]] = []
        self._fixed = (
            {model: self._names[i % len(shelves)] for i, model in enumerate(models)} if policy == FIXED else {}
        )
        for router in range(num_routers):
            routes = {}
            for i, model in enumerate(models):
                fleet = Fleet()
                fleet.update(self._names)
                name = "round_robin" if policy == FIXED else policy
                routes[model] = fleet, make_policy(name, fleet, seed=router * len(models) + i)
            self._routers.append(routes)
        self._sent: dict[ShelfRequest, tuple[Fleet, SentRequest | None]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0

    def run(self, requests: Sequence[ShelfRequest], until_s: float) -> ClusterOutcome:
        """Serve requests, which are in order of arrival; those that have not ended at `until_s` stay unfinished."""
        self._outcome = ClusterOutcome(list(requests))
        placed: dict[str, list[ShelfRequest]] = {name: [] for name in self._names}
        for request in requests:
            self._at(request.at, partial(self._arrive, request, placed))
        for i, name in enumerate(self._names):  # not all at the same moment
            self._at(i / len(self._names) * REPORT_PERIOD_S, partial(self._report, name))
        while self._events and self._events[0][0] < until_s:
            self._now, _, happen = heapq.heappop(self._events)
            self._advance(self._now)
            happen()
        self._advance(until_s)
        self._outcome.shelves = [shelf.end(placed[name]) for name, shelf in self._shelves.items()]
        return self._outcome

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), happen))

    def _advance(self, now: float) -> None:
        for shelf in self._shelves.values():
            shelf.advance(now)
        for request in [request for request in self._sent if request.ended_at is not None or request.refused]:
            fleet, sent = self._sent.pop(request)
            if sent is not None:
                fleet.note_ended(sent, now)

    def _arrive(self, request: ShelfRequest, placed: dict[str, list[ShelfRequest]]) -> None:
        fleet, policy = self._rng.choice(self._routers)[request.model]
        routed = RoutedRequest(str(next(self._numbers)), request.num_tokens)
        name = self._fixed.get(request.model) or policy.rank_replicas(routed, self._names, self._now)[0]
        self._sent[request] = fleet, fleet.note_sent(routed, name, 0, self._now)
        placed[name].append(request)
        self._outcome.num_cold += request.model not in self._shelves[name].awake
        self._shelves[name].submit(request)

    def _report(self, name: str) -> None:
        self._at(self._now + REPORT_LAG_S, partial(self._hear, name, self._shelves[name].reports()))
        self._at(self._now + REPORT_PERIOD_S, partial(self._report, name))
        if name == self._names[0]:
            awake = Counter(model for shelf in self._shelves.values() for model in shelf.awake)
            self._outcome.copies.update(awake.values())

    def _hear(self, name: str, reports: dict[str, ReplicaReport]) -> None:
        for routes in self._routers:
            for model, report in reports.items():
                routes[model][0].apply_report(name, report, self._now)
