"""Which replica gets a request: Folio's policies behind Serve's router interface.

One of these lives in every process with a handle to the replicas, so several know nothing of each other's requests but
what replicas report. Serve's controller asks each replica for its report (`record_routing_stats`) and passes it on.

Serve tries the replicas in the order that `choose_replicas` gives, and passes those by whose queue is full; when all
are, it waits a little longer each time and asks again. That happens only to calls that have no queue of the engine's:
its bound is far above what engines take.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray.serve import metrics
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.engine.prefix_keys import compiled_hashing, prompt_keys
from app.errors import DeadlineError, NoReplicaError, OverloadedError
from app.fleet.fleet import Fleet, RoutedRequest, SentRequest
from app.fleet.messages import ExpectedPrefix, ForkCall, GenerateRequest, SharedStreamCall, report_from_stats
from app.fleet.policies import make_policy

logger = logging.getLogger(__name__)

# Requests that wait for a replica while there is none at all; more are refused at once.
_MOST_WAITING = 1000
_LEAST_LEFT_S = 0.001

_DECISION_US: list[float] = [50, 100, 200, 500, 1000, 2000, 5000, 10_000]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that Serve has not placed yet.

    Attributes:
        timeout_s: what the request had left when it came here.
        first_choice: the replica that it counts as sent to meanwhile, with the entry in the books.
        ended: it was over before its placing has been noted.
    """

    request: RoutedRequest
    timeout_s: float | None = None
    first_choice: str | None = None
    sent: SentRequest | None = None
    ended: bool = False

    def left_s(self, waited_s: float) -> float | None:
        """What the request has left now. A little in any case: when it has nothing, waiting for a replica ends."""
        return None if self.timeout_s is None else max(self.timeout_s - max(waited_s, 0.0), _LEAST_LEFT_S)


class FolioRouter(FIFOMixin, RequestRouter):
    """Serve makes one for each handle, and calls it on the handle's router loop.

    `FIFOMixin`: calls that belong to one request of a client have one id, and Serve finds only one of them by it; the
    others get their replica in the order in which they came.
    """

    def initialize_state(  # type: ignore[override]
        self,
        policy: str = "prefix_aware",
        stale_after_s: float = 5.0,
        wait_for_replica_s: float = 10.0,
        isolate_tenants: bool = True,
    ) -> None:
        """`request_router_kwargs` of the YAML.

        Args:
            policy: see `app.fleet.policies`.
            stale_after_s: a report this old is none.
            wait_for_replica_s: that a request waits for a replica at most.
            isolate_tenants: the engines' setting; otherwise cached prefixes would not be found.

        Raises:
            ConfigError: there is no such policy.
        """
        self._fleet = Fleet(stale_after_s=stale_after_s)
        self._isolate_tenants = isolate_tenants
        compiled_hashing()  # now, and not when a request waits for it
        self._policy = make_policy(policy, self._fleet, seed=random.getrandbits(64))
        self._wait_for_replica_s = wait_for_replica_s
        self._by_name: dict[str, RunningReplica] = {}
        self._waiting: dict[asyncio.Future[RunningReplica], _Waiting] = {}
        # (replica, internal request id) → entries in the books, one for each attempt, the oldest first
        self._placed: defaultdict[tuple[str, str], deque[SentRequest]] = defaultdict(deque)
        self._heard: dict[str, float] = {}  # of each replica, when it made its last report
        self._unreadable: set[str] = set()  # replicas whose reports are of another version
        self._decision_us = metrics.Histogram(
            "folio_routing_decision_us",
            "Time to choose a replica, hashing the prompt included.",
            boundaries=_DECISION_US,
        )
        self._routed = metrics.Counter(
            "folio_routed_requests",
            "Requests sent to a replica.",
            tag_keys=("to",),
        )
        self._known_prefixes = metrics.Gauge(
            "folio_router_known_prefixes", "Prefixes that this router knows to be cached."
        )
        self._silent = metrics.Gauge(
            "folio_router_silent_replicas", "Replicas that this router has no fresh report of."
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
        now = time.monotonic()
        for name, replica in self._by_name.items():
            self._take_report(name, replica, now)
        self._known_prefixes.set(self._fleet.num_known_prefixes)
        self._silent.set(len(self._by_name) - len(self._fleet.fresh(self._by_name, now)))
        if self._fleet.num_resyncs > self._num_resyncs:
            self._resyncs.inc(self._fleet.num_resyncs - self._num_resyncs)
        self._num_resyncs = self._fleet.num_resyncs

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._know([r for r in self._by_name.values() if r.replica_id != replica_id])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best candidate, then the second, then all others, of which the one with the shortest queue gets it."""
        names = [name for r in candidate_replicas if (name := r.replica_id.unique_id) in self._by_name]
        if pending_request is None:
            return [[self._by_name[name] for name in names]]
        # Without this Serve would ask again at once, and for ever, while all replicas are full.
        pending_request.routing_context.should_backoff = True
        start = time.perf_counter()
        try:
            ranked = self._rank(pending_request, names)
        except Exception:  # Serve would only log it, and the request would wait for ever
            logger.exception("the routing policy failed; the request goes to any replica")
            ranked = names
        self._decision_us.observe((time.perf_counter() - start) * 1e6)
        ranks = [ranked[:1], ranked[1:2], ranked[2:]]
        return [[self._by_name[name] for name in rank] for rank in ranks if rank]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called once for every attempt to send a request, whatever became of it."""
        super().on_request_completed(replica_id, internal_request_id)
        key = (replica_id.unique_id, internal_request_id)
        if placed := self._placed.get(key):
            self._fleet.note_ended(placed.popleft(), time.monotonic())
            if not placed:
                del self._placed[key]
            return
        for future, waiting in self._waiting.items():  # it failed while it was sent
            if waiting.request.request_id == internal_request_id and future.done() and not waiting.ended:
                waiting.ended = True
                return

    # ---- inside ----

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Serve's own waits for ever.

        Raises:
            NoReplicaError: there is none, or none that it may go to.
            OverloadedError: all replicas have refused it.
            DeadlineError: the request's own time has passed.
        """
        if not self._by_name and self.num_pending_requests >= _MOST_WAITING:
            raise NoReplicaError(
                f"there is no engine replica, and {_MOST_WAITING} requests wait for one; send the request again",
                self._wait_for_replica_s,
            )
        call = pending_request.args[0] if pending_request.args else None
        timeout_s = call.timeout_s if isinstance(call, GenerateRequest) else None
        if isinstance(call, GenerateRequest) and call.refused_by:
            others = self._by_name.keys() - {*call.refused_by, *call.stopped}
            if self._by_name and not others:
                raise OverloadedError("all engine replicas have as many requests waiting as may; try again later")
        try:
            async with asyncio.timeout(min(timeout_s or math.inf, self._wait_for_replica_s)):
                return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except TimeoutError:
            if timeout_s is not None and timeout_s <= self._wait_for_replica_s:
                raise DeadlineError(
                    f"no engine replica within the {timeout_s:.3g} s that were left of the request's timeout_s"
                ) from None
            raise NoReplicaError(
                f"no engine replica within {self._wait_for_replica_s:g} s; send the request again",
                self._wait_for_replica_s,
            ) from None

    def _know(self, replicas: Sequence[RunningReplica]) -> None:
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self._fleet.update(self._by_name)
        self._unreadable &= self._by_name.keys()
        self._heard = {name: made_at for name, made_at in self._heard.items() if name in self._by_name}
        for key in [key for key in self._placed if key[0] not in self._by_name]:
            del self._placed[key]

    def _take_report(self, name: str, replica: RunningReplica, now: float) -> None:
        stats = replica.routing_stats
        if name in self._heard and self._heard[name] == stats.get("made_at"):
            return  # Serve tells the reports of all replicas whenever one of them is new
        report = report_from_stats(stats) if stats else None
        if report is not None:
            self._heard[name] = report.made_at
            self._fleet.apply_report(name, report, now)
        elif stats and name not in self._unreadable:
            self._unreadable.add(name)
            logger.warning("the report of %s is of another version; it is routed to without", name)

    def _rank(self, pending: PendingRequest, names: list[str]) -> list[str]:
        """The replicas that may get it, the best first, to which it counts as sent until Serve has placed it."""
        now = time.monotonic()
        waiting = self._waiting.get(pending.future)
        if waiting is None:
            call = pending.args[0] if pending.args else None
            timeout_s = call.timeout_s if isinstance(call, GenerateRequest) else None
            waiting = self._waiting[pending.future] = _Waiting(self._as_routed(pending), timeout_s)
            pending.future.add_done_callback(self._note_placed)
        elif waiting.sent is not None:  # Serve asks once more: all were full
            self._fleet.withdraw(waiting.sent, now)
            waiting.sent = None
        request = waiting.request
        call = pending.args[0] if pending.args else None
        if isinstance(call, GenerateRequest):
            names = [name for name in names if name not in call.stopped and name not in call.refused_by]
        if isinstance(call, ForkCall | SharedStreamCall) and call.replica in names:
            ranked = [call.replica]  # no other could do it; without this one any may say so
        else:
            ranked = self._policy.rank_replicas(request, names, now)
            if isinstance(call, GenerateRequest) and call.crowded:
                ranked.sort(key=call.crowded.__contains__)
        if not ranked:
            return []
        cached = int(self._fleet.cached_tokens(request, ranked[:1])[0])
        waiting.first_choice, waiting.sent = ranked[0], self._fleet.note_sent(request, ranked[0], cached, now)
        if isinstance(call, GenerateRequest):
            # For the replica to compare with what it finds, see `ReplicaReport.missed_tokens`.
            expected = ExpectedPrefix(ranked[0], cached)
            pending.args[0] = replace(
                call, expected=expected, timeout_s=waiting.left_s(time.time() - pending.created_at)
            )
        return ranked

    def _as_routed(self, pending: PendingRequest) -> RoutedRequest:
        """The request as policies see it. Calls without a prompt, such as `report` or `fork`, have no tokens."""
        call, request_id = pending.args[0] if pending.args else None, pending.metadata.internal_request_id
        if not isinstance(call, GenerateRequest):
            return RoutedRequest(request_id, 0)
        keys: list[bytes] = []
        if self._fleet.unit_tokens is not None:
            tenant = call.tenant if self._isolate_tenants else None
            keys = prompt_keys(call.prompt_token_ids, self._fleet.unit_tokens, call.cache_salt, call.adapter, tenant)
        session = call.session or pending.metadata.session_id or None
        return RoutedRequest(request_id, len(call.prompt_token_ids), keys, session)

    def _note_placed(self, future: asyncio.Future[RunningReplica]) -> None:
        """Serve has placed a request, or its caller has given it up."""
        waiting, now = self._waiting.pop(future), time.monotonic()
        sent = waiting.sent
        if future.cancelled() or future.exception() is not None:
            if sent is not None:
                self._fleet.withdraw(sent, now)
            return
        chosen = future.result().replica_id.unique_id
        if chosen != waiting.first_choice and chosen in self._by_name:
            if sent is not None:
                self._fleet.withdraw(sent, now)
            cached = int(self._fleet.cached_tokens(waiting.request, [chosen])[0])
            sent = self._fleet.note_sent(waiting.request, chosen, cached, now)
        if waiting.request.num_tokens:
            self._routed.inc(tags={"to": chosen})
        if sent is None or chosen not in self._by_name:
            return
        if waiting.ended:
            self._fleet.note_ended(sent, now)
        else:
            self._placed[chosen, waiting.request.request_id].append(sent)
