"""Request router: Folio's routing policies behind Serve's router interface.

Every process with a handle to the replicas has a router. Routers share nothing but the replicas' load reports, which
Serve's controller collects (`record_routing_stats`) and passes on.

Serve tries replicas in the order of `choose_replicas` and skips full ones. When all are full it pauses, longer each
time, and asks again; this concerns only calls that bypass the engine's queue, because Serve's bound is far above the
engine's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from ray.serve import metrics
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from folio.app.compat.ray import BoundedWaitRouter, back_off
from folio.app.engine.request.prefix_keys import compiled_hashing, prompt_keys
from folio.app.errors import DeadlineError, NoReplicaError, OverloadedError
from folio.app.fleet.decisions import CONTINUED, DECISIONS, RoutingDecision, scores_of
from folio.app.fleet.departures import DEPARTURES
from folio.app.fleet.fleet import Fleet, RoutedRequest, SentRequest
from folio.app.fleet.messages import ExpectedPrefix, ForkCall, GenerateRequest, SharedStreamCall, reports_from_stats
from folio.app.fleet.policies import Policy, make_policy
from folio.app.fleet.rebalancing import calls_to_move
from folio.app.fleet.roles import ByRole, Roles

logger = logging.getLogger(__name__)

# Bound of the requests that wait while there is no replica.
_MOST_WAITING = 1000
# Serve notices that a replica has gone, and its replacement is ready, within this time and twice the longest start.
_NOTICED_S = 10.0
# Least time left of a call that is sent: a call without any fails at the wait for a replica.
_LEAST_LEFT_S = 0.001
_DECISION_S: list[float] = [5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05]


@dataclass(frozen=True, slots=True)
class Route:
    """The replicas as hosts of one model. Cached prefixes of different models never match, and their steps take
    different times: so each model has a fleet of its own."""

    fleet: Fleet
    policy: Policy


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that Serve has not placed yet.

    Attributes:
        route: of its model.
        timeout_s: time left of the request when it reached the router.
        first_choice, sent: the replica that the request counts as sent to until then, and the fleet's record of that.
        decision: for the dashboard, while it is watched.
        ended: the request ended before its placement was noted.
    """

    request: RoutedRequest
    route: Route
    timeout_s: float | None = None
    first_choice: str | None = None
    sent: SentRequest | None = None
    decision: RoutingDecision | None = None
    ended: bool = False

    def left_s(self, waited_s: float) -> float | None:
        return None if self.timeout_s is None else max(self.timeout_s - max(waited_s, 0.0), _LEAST_LEFT_S)


class FolioRouter(BoundedWaitRouter):
    """Serve makes one for each handle, and calls it on the handle's router loop."""

    def initialize_state(  # type: ignore[override]
        self,
        policy: str = "prefix_aware",
        stale_after_s: float = 5.0,
        wait_for_replica_s: float = 10.0,
        isolate_tenants: bool = True,
        first_model: str = "",
        prefill_share: float = 0.0,
        prefill_from_tokens: int = 0,
    ) -> None:
        """Take the `request_router_kwargs` of the YAML.

        Args:
            policy: see `folio.app.fleet.policies`.
            stale_after_s: age at which a load report is ignored.
            wait_for_replica_s: longest wait of a request for a replica.
            isolate_tenants: the engines' setting, on which the keys of cached prefixes depend.
            first_model: the model of calls that name none.
            prefill_share, prefill_from_tokens: see `RoutingArgs`.

        Raises:
            ConfigError: the policy is unknown.
        """
        self._stale_after_s = stale_after_s
        self._isolate_tenants = isolate_tenants
        compiled_hashing()  # load the library before the first request
        self._policy_name = policy
        self._first_model = first_model
        self._roles, self._prefill_from_tokens = Roles(prefill_share), prefill_from_tokens
        self._routes: dict[str, Route] = {}
        self._by_name: dict[str, RunningReplica] = {}
        self.route()
        self._wait_for_replica_s = wait_for_replica_s
        self._draining: set[str] = set()
        self._staying: set[str] = set()  # neither draining nor stopped
        self._waiting: dict[asyncio.Future[RunningReplica], _Waiting] = {}
        # (replica, internal request id) → records with their fleets, one for each attempt, the oldest first
        self._placed: defaultdict[tuple[str, str], deque[tuple[Fleet, SentRequest]]] = defaultdict(deque)
        self._reported_at: dict[str, float] = {}  # `made_at` of each replica's last report
        self._models_at: dict[str, frozenset[str]] = {}  # of each replica's last report
        self._longest_start_s: float | None = None  # of all replicas so far
        self._unreadable: set[str] = set()  # replicas whose reports are of another version
        self._decision_s = metrics.Histogram(
            "folio_routing_decision_seconds",
            "Time to choose a replica, hashing the prompt included.",
            boundaries=_DECISION_S,
        )
        self._routed = metrics.Counter("folio_routed_requests", "Requests sent to a replica.", tag_keys=("to",))
        self._known_prefixes = metrics.Gauge(
            "folio_router_known_prefixes", "Prefixes that this router knows to be cached."
        )
        self._silent = metrics.Gauge("folio_router_silent_replicas", "Replicas without a fresh report at this router.")
        self._resyncs = metrics.Counter(
            "folio_router_resyncs",
            "How often a replica's cache differed too much from this router's expectations, which were then dropped.",
        )
        self._num_resyncs = 0

    def route(self, model: str = "") -> Route:
        """The route of a model's calls; of the first one by default."""
        name = model or self._first_model
        if (route := self._routes.get(name)) is None:
            fleet = Fleet(stale_after_s=self._stale_after_s)
            fleet.update(self._by_name)
            policy = make_policy(self._policy_name, fleet, seed=random.getrandbits(64))
            policy = ByRole(policy, fleet, self._roles, self._prefill_from_tokens)
            route = self._routes[name] = Route(fleet, policy)
        return route

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called when replicas come or go, and when there are new reports."""
        super().update_replicas(replicas)
        self._set_replicas(replicas)
        now = time.monotonic()
        heard = [name for name, replica in self._by_name.items() if self._apply_stats(name, replica, now)]
        self._note_departures()
        self._rebalance(heard, now)
        present = frozenset((self._first_model,)).union(*self._models_at.values())
        self._routes = {name: route for name, route in self._routes.items() if name in present}
        fleets = [route.fleet for route in self._routes.values()]
        self._known_prefixes.set(sum(fleet.num_known_prefixes for fleet in fleets))
        self._silent.set(len(self._by_name) - len(self.route().fleet.fresh(self._by_name, now)))
        num_resyncs = sum(fleet.num_resyncs for fleet in fleets)
        if num_resyncs > self._num_resyncs:  # Ray refuses an increase by 0
            self._resyncs.inc(num_resyncs - self._num_resyncs)
        self._num_resyncs = num_resyncs

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._set_replicas([r for r in self._by_name.values() if r.replica_id in self.curr_replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best candidate, then the second, then all others, of which Serve takes the one with the shortest
        queue."""
        names = [name for r in candidate_replicas if (name := r.replica_id.unique_id) in self._by_name]
        if pending_request is None:
            return [[self._by_name[name] for name in names]]
        back_off(pending_request)
        start = time.perf_counter()
        try:
            ranked = self._rank(pending_request, names)
        except Exception:  # Serve would log it, and the request would wait for ever
            logger.exception("the routing policy failed; the request goes to any replica")
            ranked = names
        self._decision_s.observe(time.perf_counter() - start)
        return [[self._by_name[name] for name in rank] for rank in (ranked[:1], ranked[1:2], ranked[2:]) if rank]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called once for every attempt to send a request, whether it succeeded or not."""
        super().on_request_completed(replica_id, internal_request_id)
        key = (replica_id.unique_id, internal_request_id)
        if placed := self._placed.get(key):
            fleet, sent = placed.popleft()
            fleet.note_ended(sent, time.monotonic())
            if not placed:
                del self._placed[key]
            return
        for future, waiting in self._waiting.items():  # the attempt failed before its placement was noted
            if waiting.request.request_id == internal_request_id and future.done() and not waiting.ended:
                waiting.ended = True
                return

    @asynccontextmanager
    async def bounded_wait(self, pending: PendingRequest) -> AsyncIterator[None]:
        """
        Raises:
            NoReplicaError: there is no replica, or none that may get the request.
            OverloadedError: all replicas have refused the request.
            DeadlineError: the request's own time has passed.
        """
        if not self._by_name and self.num_pending_requests >= _MOST_WAITING:
            raise NoReplicaError(
                f"there is no engine replica, and {_MOST_WAITING} requests wait for one; send the request again",
                self._wait_for_replica_s,
            )
        call, timeout_s = _call_of(pending), None
        if isinstance(call, GenerateRequest):
            timeout_s = call.timeout_s
            if call.refused_by and self._by_name and self._by_name.keys() <= {*call.refused_by, *call.stopped}:
                raise OverloadedError("the queues of all engine replicas are full; try again later")
        try:
            async with asyncio.timeout(min(timeout_s or math.inf, self._wait_for_replica_s)):
                yield
        except TimeoutError:
            if timeout_s is not None and timeout_s <= self._wait_for_replica_s:
                raise DeadlineError(
                    f"no engine replica within the {timeout_s:.3g} s left of the request's timeout_s"
                ) from None
            error = NoReplicaError(
                f"no engine replica within {self._wait_for_replica_s:g} s; send the request again",
                self._wait_for_replica_s,
            )
            if self._longest_start_s is not None:
                error.replaced_within_s = _NOTICED_S + 2 * self._longest_start_s
            raise error from None

    def _note_departures(self) -> None:
        """Have the calls leave the replicas that do. Those of one that has died break off, and count as failed."""
        staying = self._by_name.keys() - self._draining
        self._roles.update(staying)
        DEPARTURES.update(self._staying, staying)
        self._staying = staying

    def _rebalance(self, heard: Sequence[str], now: float) -> None:
        """Have calls leave replicas that have just reported a queue, where others of their role are free."""
        for model, route in self._routes.items():
            names = (model, "") if model == self._first_model else (model,)
            for crowded, others in zip(self._roles.split(heard), self._roles.split(self._staying), strict=True):
                for replica, num_calls in calls_to_move(route.fleet, model, crowded, others, now):
                    DEPARTURES.move(replica, names, num_calls)

    def _set_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        DEPARTURES.num_replicas = len(self._by_name)
        self._draining &= self._by_name.keys()
        self._roles.update(self._by_name.keys() - self._draining)
        for route in self._routes.values():
            route.fleet.update(self._by_name)
        self._models_at = {name: models for name, models in self._models_at.items() if name in self._by_name}
        self._unreadable &= self._by_name.keys()
        self._reported_at = {name: made_at for name, made_at in self._reported_at.items() if name in self._by_name}
        for key in [key for key in self._placed if key[0] not in self._by_name]:
            del self._placed[key]

    def _apply_stats(self, name: str, replica: RunningReplica, now: float) -> bool:
        """Whether there is a new report. Serve passes on those of all replicas whenever one of them is new."""
        stats = replica.routing_stats
        if name in self._reported_at and self._reported_at[name] == stats.get("made_at"):
            return False
        reports = reports_from_stats(stats) if stats else None
        if reports is not None:
            self._reported_at[name] = stats["made_at"]
            DEPARTURES.note_outputs(name, stats["outputs"])
            if stats["is_draining"]:
                self._draining.add(name)
            else:
                self._draining.discard(name)
            self._longest_start_s = max(self._longest_start_s or 0.0, stats["start_s"])
            self._models_at[name] = frozenset(reports)
            for model, report in reports.items():
                self.route(model).fleet.apply_report(name, report, now)
        elif stats and name not in self._unreadable:
            self._unreadable.add(name)
            logger.warning("ignoring the load report of %s: it has another version than this router's Folio", name)
        return reports is not None

    def _waiting_of(self, pending: PendingRequest, call: Any, now: float) -> _Waiting:
        waiting = self._waiting.get(pending.future)
        if waiting is None:
            timeout_s = call.timeout_s if isinstance(call, GenerateRequest) else None
            route = self.route(_model_of(call))
            request = self._routed_request(pending, route.fleet)
            waiting = self._waiting[pending.future] = _Waiting(request, route, timeout_s)
            pending.future.add_done_callback(self._note_placed)
        elif waiting.sent is not None:  # Serve asks again: all replicas were full
            waiting.route.fleet.withdraw(waiting.sent, now)
            waiting.sent = None
        return waiting

    def _rank(self, pending: PendingRequest, names: list[str]) -> list[str]:
        """The replicas that may get the request, best first. Until Serve places the request, it counts as sent to the
        first."""
        now, call = time.monotonic(), _call_of(pending)
        generates = isinstance(call, GenerateRequest)
        waiting = self._waiting_of(pending, call, now)
        request, fleet = waiting.request, waiting.route.fleet
        if generates:
            names = [name for name in names if _may_get(call, name)]
            names = [name for name in names if name not in self._draining] or names
        if isinstance(call, ForkCall | SharedStreamCall) and call.replica in names:
            ranked = [call.replica]  # the only one that can; without it any replica answers with the error
        else:
            ranked = waiting.route.policy.rank_replicas(request, names, now)
            if generates:
                _move(call, ranked)
        if not ranked:
            return []
        if DECISIONS.is_on and isinstance(call, GenerateRequest | ForkCall):
            waiting.decision = self._decision(call, waiting, ranked, now)
        cached = int(fleet.cached_tokens(request, ranked[:1])[0])
        waiting.first_choice, waiting.sent = ranked[0], fleet.note_sent(request, ranked[0], cached, now)
        if generates:
            # The replica compares the expected with the found tokens: `ReplicaReport.missed_tokens`.
            expected = ExpectedPrefix(ranked[0], cached, self._leaves(call, request, ranked))
            left_s = waiting.left_s(time.time() - pending.created_at)
            pending.args[0] = replace(call, expected=expected, timeout_s=left_s)
        return ranked

    def _leaves(self, call: GenerateRequest, request: RoutedRequest, ranked: Sequence[str]) -> bool:
        """Whether a prompt is computed at the first replica and decoded at another one, which can get its blocks."""
        first, prefill = ranked[0], self._roles.prefill
        if first not in prefill or request.is_begun or request.stays or not DEPARTURES.held_at(first, call.model):
            return False
        return any(name not in prefill and DEPARTURES.may_continue(first, call.model, name) for name in ranked)

    def _decision(
        self, call: GenerateRequest | ForkCall, waiting: _Waiting, ranked: list[str], now: float
    ) -> RoutingDecision:
        """The choice, with the scores on which it rests."""
        request = waiting.request
        scores = scores_of(waiting.route.fleet, request, ranked, now)
        if isinstance(call, ForkCall):
            reason, scores = "fork", []
        elif call.begun or call.held_at:
            reason = "fetch" if call.fetches else CONTINUED
        elif call.crowded or call.refused_by or call.stopped:
            reason = "retry"
        elif role := self._roles.of(ranked[0]):
            reason = role
        elif self._policy_name != "prefix_aware":
            reason = self._policy_name
        elif not scores:
            reason = "no report"
        else:
            least = min(scores, key=lambda score: score.ttft_s + score.harm_s).replica
            reason = "session" if request.session is not None and least != ranked[0] else "cost"
        return RoutingDecision(now, call.request_id, request.num_tokens, ranked[0], reason, scores)

    def _routed_request(self, pending: PendingRequest, fleet: Fleet) -> RoutedRequest:
        """The request as policies see it. Calls without a prompt, such as `max_model_len` or forks, have no tokens."""
        call, request_id = _call_of(pending), pending.metadata.internal_request_id
        if not isinstance(call, GenerateRequest):
            return RoutedRequest(request_id, 0)
        keys: list[bytes] = []
        if fleet.unit_tokens is not None:
            tenant = call.tenant if self._isolate_tenants else None
            adapter = call.adapter_key or call.adapter
            keys = prompt_keys(call.prompt_token_ids, fleet.unit_tokens, call.cache_salt, adapter, tenant)
        session = call.session or pending.metadata.session_id or None
        num_begun = sum(len(output.token_ids) for output in call.begun)
        # Blocks of an adapter's prompts are not handed over, and these read the whole prompt again.
        stays = call.adapter is not None or call.pooling is not None or call.params.prompt_logprobs is not None
        return RoutedRequest(
            request_id,
            call.num_prompt_tokens + num_begun,
            keys,
            session,
            is_begun=bool(num_begun or call.begun_by),
            stays=stays,
        )

    def _note_placed(self, future: asyncio.Future[RunningReplica]) -> None:
        """Serve has placed a request, or its caller has given up."""
        waiting, now = self._waiting.pop(future), time.monotonic()
        sent, fleet = waiting.sent, waiting.route.fleet
        if future.cancelled() or future.exception() is not None:
            if sent is not None:
                fleet.withdraw(sent, now)
            return
        chosen = future.result().replica_id.unique_id
        if (decision := waiting.decision) is not None:
            is_first = chosen == decision.chosen
            DECISIONS.note(decision if is_first else replace(decision, chosen=chosen, reason="first was full"))
        if chosen != waiting.first_choice and chosen in self._by_name:
            if sent is not None:
                fleet.withdraw(sent, now)
            cached = int(fleet.cached_tokens(waiting.request, [chosen])[0])
            sent = fleet.note_sent(waiting.request, chosen, cached, now)
        if waiting.request.num_tokens:
            self._routed.inc(tags={"to": chosen})
        if sent is None or chosen not in self._by_name:
            return
        if waiting.ended:
            fleet.note_ended(sent, now)
        else:
            self._placed[chosen, waiting.request.request_id].append((fleet, sent))


def _call_of(pending: PendingRequest) -> Any:
    return pending.args[0] if pending.args else None


def _move(call: GenerateRequest, ranked: list[str]) -> None:
    """Rank the replica that has fetched a call's blocks first, and crowded ones last."""
    if call.crowded or call.fetched_by:
        ranked.sort(key=lambda name: (name != call.fetched_by, name in call.crowded))


def _may_get(call: GenerateRequest, replica: str) -> bool:
    """Whether a replica may get a call: one that has begun not, for example, the new version of an update."""
    if replica in call.stopped or replica in call.refused_by:
        return False
    return not call.begun_by or DEPARTURES.may_continue(call.begun_by, call.model, replica)


def _model_of(call: Any) -> str:
    """The model that a call is for. Calls about a model, such as `max_model_len`, have only its name."""
    if isinstance(call, GenerateRequest | ForkCall):
        return call.model
    return call if isinstance(call, str) else ""
