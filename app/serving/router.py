"""Which replica gets a request: Folio's policies behind Serve's router interface.

One of these lives in every process with a handle to the replicas, so several know nothing of each other's requests but
what replicas report. Serve's controller asks each replica for its report (`record_routing_stats`) and passes it on.

Serve tries the replicas in the order that `choose_replicas` gives, and passes those by whose queue is full; when all
are, it waits a little longer each time and asks again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from ray.serve import metrics
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.fleet.fleet import Fleet, RoutedRequest
from app.fleet.keys import prompt_keys
from app.fleet.policies import make_policy
from app.serving.messages import GenerateRequest, report_from_stats

logger = logging.getLogger(__name__)

_DECISION_US: list[float] = [50, 100, 200, 500, 1000, 2000, 5000, 10_000]


class FolioRouter(RequestRouter):
    """Serve makes one for each handle, and calls it on the handle's router loop."""

    def initialize_state(self, policy: str = "prefix_aware", stale_after_s: float = 5.0) -> None:  # type: ignore[override]
        """`request_router_kwargs` of the YAML.

        Args:
            policy: see `app.fleet.policies`.
            stale_after_s: a report this old is none.

        Raises:
            ConfigError: there is no such policy.
        """
        self._fleet = Fleet(stale_after_s=stale_after_s)
        self._policy = make_policy(policy, self._fleet)
        self._by_name: dict[str, RunningReplica] = {}
        self._decision_us = metrics.Histogram(
            "folio_routing_decision_us",
            "Time to choose a replica, hashing the prompt included.",
            boundaries=_DECISION_US,
        )
        tag_keys: Any = ("to",)
        self._routed = metrics.Counter("folio_routed_requests", "Requests sent to a replica.", tag_keys=tag_keys)
        self._known_prefixes = metrics.Gauge(
            "folio_router_known_prefixes", "Prefixes that this router knows to be cached."
        )
        self._resyncs = metrics.Counter(
            "folio_router_resyncs",
            "How often a replica's cache was too far from what this router expected, which then forgot its "
            "expectations.",
        )
        self._num_resyncs = 0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called when replicas come or go, and when there are new reports."""
        super().update_replicas(replicas)
        self._know(replicas)
        for replica in replicas:
            if replica.routing_stats:
                self._fleet.report(replica.replica_id.unique_id, report_from_stats(replica.routing_stats))
        self._known_prefixes.set(self._fleet.num_known_prefixes)
        if self._fleet.num_resyncs > self._num_resyncs:
            self._resyncs.inc(self._fleet.num_resyncs - self._num_resyncs)
        self._num_resyncs = self._fleet.num_resyncs

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._know([r for r in self._by_name.values() if r.replica_id != replica_id])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, each a rank of its own, the best first."""
        # Without this Serve would ask again at once, and for ever, while all replicas are full.
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        names = [name for r in candidate_replicas if (name := r.replica_id.unique_id) in self._by_name]
        start, now = time.perf_counter(), time.time()
        try:
            request = self._as_routed(pending_request)
            ranked = self._policy.rank(request, names, now)
            if pending_request is not None and ranked:
                self._expect(pending_request, request, ranked[0], now)
        except Exception:  # Serve would only log it, and the request would wait for ever
            logger.exception("the routing policy failed; the request goes to any replica")
            ranked = names
        self._decision_us.observe((time.perf_counter() - start) * 1e6)
        return [[self._by_name[name]] for name in ranked]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called once for every request that was sent, whatever became of it."""
        super().on_request_completed(replica_id, internal_request_id)
        self._fleet.ended(internal_request_id, time.time(), replica_id=replica_id.unique_id)

    # ---- inside ----

    def _know(self, replicas: list[RunningReplica]) -> None:
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self._fleet.update(self._by_name)

    def _as_routed(self, pending: PendingRequest | None) -> RoutedRequest:
        """The request as policies see it. Calls that are no generation, such as `report`, have no tokens."""
        call = pending.args[0] if pending is not None and pending.args else None
        request_id = pending.metadata.internal_request_id if pending is not None else ""
        if not isinstance(call, GenerateRequest):
            return RoutedRequest(request_id, 0)
        keys: list[bytes] = []
        if self._fleet.unit_tokens is not None:
            keys = prompt_keys(call.prompt_token_ids, self._fleet.unit_tokens, call.cache_salt)
        session = call.session or (pending.metadata.session_id if pending is not None else None)
        return RoutedRequest(request_id, len(call.prompt_token_ids), keys, session or None)

    def _expect(self, pending: PendingRequest, request: RoutedRequest, name: str, now: float) -> None:
        """Count the request as sent to its first choice. Where it goes in the end, Serve says through its future."""
        cached = int(self._fleet.cached_tokens(request, [name])[0])
        if isinstance(pending.args[0] if pending.args else None, GenerateRequest):
            # The replica compares this with what it finds, see `ReplicaReport.missed_tokens`. A request that another
            # has sent before may have been answered by now.
            pending.args[0] = replace(pending.args[0], expected_cached_tokens=cached)
        self._fleet.sent(request, name, cached, now)

        def decided(future: asyncio.Future[RunningReplica]) -> None:
            if future.cancelled() or future.exception() is not None:
                self._fleet.ended(request.request_id, time.time(), taken=False)
                return
            chosen = future.result().replica_id.unique_id
            self._routed.inc(tags={"to": chosen})
            if chosen != name:
                self._fleet.sent(request, chosen, cached, time.time())

        pending.future.add_done_callback(decided)
