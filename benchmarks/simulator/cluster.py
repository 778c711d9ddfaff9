"""Routers in front of replicas, in simulated time: arrivals, reports, scaling, one event after the other."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.simulator.device import Device
from benchmarks.simulator.outcome import Lifetime, Outcome
from benchmarks.simulator.replica import Served, SimulatedReplica
from benchmarks.simulator.traffic import Arrival
from benchmarks.simulator.transfers import Link, Transfers
from folio.app.engine.report import ReplicaReport
from folio.app.fleet.autoscaling import AutoscalingLoad, ScalingPolicy
from folio.app.fleet.fleet import Fleet, RoutedRequest, SentRequest
from folio.app.fleet.policies import Policy
from folio.app.fleet.roles import ByRole, Roles
from folio.vmem import key_of

# Of a router's state, and of the replicas by name in their present state, which rivals know beyond reports.
MakePolicy = Callable[[Fleet, Callable[[str], SimulatedReplica]], Policy]

# Serve's period of reports, and their delay until routers have them (measured).
REPORT_PERIOD_S, REPORT_LAG_S = 1.0, 0.1
_SCALING_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Autoscaling of the fleet.

    Attributes:
        start_s: from the order until a replica takes requests.
    """

    policy: ScalingPolicy
    start_s: float
    most_replicas: int


@dataclass(slots=True, eq=False)
class _Member:
    """A replica, from its order on.

    Attributes:
        replica: `None` while it starts.
        drains: it gets no more requests.
        heard: its last report to the autoscaling policy.
    """

    name: str
    index: int
    ordered_at: float
    replica: SimulatedReplica | None = None
    drains: bool = False
    heard: ReplicaReport | None = None


@dataclass(slots=True, eq=False)
class _Router:
    """One ingress: its own state, its own policy."""

    fleet: Fleet
    policy: Policy


@dataclass(frozen=True, slots=True)
class _Destined:
    """The decode replica to which a prompt's blocks go, and the router's record of the request there."""

    name: str
    sent: SentRequest | None


class Cluster:
    """Simulates replicas behind routers. Deterministic; for one run.

    Args:
        num_replicas: at the beginning.
        policy: of each router.
        num_routers: ingresses; each request arrives at any of them.
        report_period_s: `None`: replicas never report.
        scaling: `None`: the number of replicas is fixed.
        leaps: see `SimulatedReplica`.
        roles: `None`: all replicas do both.
        link: between replicas with roles.
        least_tokens: see `ByRole`.
    """

    def __init__(
        self,
        device: Device,
        num_replicas: int,
        policy: MakePolicy,
        *,
        num_routers: int = 2,
        report_period_s: float | None = REPORT_PERIOD_S,
        scaling: Scaling | None = None,
        seed: int = 0,
        leaps: bool = True,
        roles: Roles | None = None,
        link: Link | None = None,
        least_tokens: int = 0,
    ) -> None:
        self._device = device
        self._roles = roles
        self._transfers = Transfers(link, device.step_tokens) if link is not None else None
        self._destined: dict[str, _Destined] = {}
        self._report_period_s = report_period_s
        self._scaling = scaling
        self._leaps = leaps
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._members: dict[str, _Member] = {}
        self._indices = itertools.count()
        self._routers: list[_Router] = []
        self._sent: dict[str, tuple[_Router, SentRequest | None]] = {}
        self._names: list[str] = []  # of the replicas that take requests
        self._followers: dict[int, Arrival] = {}  # by the number of the request before
        self._left = 0
        self._outcome = Outcome([], [], 0.0, 0, 0, 0, [])
        for _ in range(num_replicas):
            self._start(self._order(0.0), 0.0)
        for _ in range(num_routers):
            fleet = Fleet()
            fleet.update(self._names)
            made = policy(fleet, self._replica)
            by_role = ByRole(made, fleet, roles, least_tokens) if roles is not None else made
            self._routers.append(_Router(fleet, by_role))
        for i, member in enumerate(self._members.values()):  # not all at the same moment
            self._report_at(i / num_replicas * (report_period_s or 0.0), member)

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        self._left = len(arrivals)
        for arrival in arrivals:
            if arrival.follows is None:
                self._at(arrival.at, partial(self._arrive, arrival))
            else:
                self._followers[arrival.follows] = arrival
        if self._scaling is not None:
            self._at(_SCALING_PERIOD_S, self._scale)
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        outcome = self._outcome
        outcome.ended_at = max(served.ended_at or 0.0 for served in outcome.served)
        for member in list(self._members.values()):
            self._close(member, outcome.ended_at)
        outcome.num_resyncs = sum(router.fleet.num_resyncs for router in self._routers)
        return outcome

    def _at(self, time_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), happen))

    def _replica(self, name: str) -> SimulatedReplica:
        replica = self._members[name].replica
        assert replica is not None, f"{name} does not run"
        return replica

    # ---- requests ----

    def _arrive(self, arrival: Arrival, now: float) -> None:
        router = self._rng.choice(self._routers)
        name, expected, sent = self._choose(router, arrival, now)
        self._sent[arrival.request_id] = router, sent
        only_prompt = name in self._prefills and arrival.num_output_tokens > 1
        served = self._replica(name).submit(arrival, expected, now, only_prompt=only_prompt)
        self._outcome.served.append(served)
        if only_prompt and self._transfers is not None and self._transfers.overlap:
            self._destine(router, arrival, now)
        self._wake_later(self._members[name])

    def _choose(
        self, router: _Router, arrival: Arrival, now: float, *, is_begun: bool = False
    ) -> tuple[str, int, SentRequest | None]:
        """The replica for a request, its expected cached tokens, and the router's record."""
        keys = [key_of(digest) for digest in arrival.digests]
        request = RoutedRequest(arrival.request_id, arrival.num_tokens, keys, arrival.session, is_begun)
        name = router.policy.rank_replicas(request, self._names, now)[0]
        expected = int(router.fleet.cached_tokens(request, [name])[0])
        if is_begun:  # nothing is computed there
            expected = arrival.num_tokens
        return name, expected, router.fleet.note_sent(request, name, expected, now)

    @property
    def _prefills(self) -> frozenset[str]:
        return self._roles.prefill if self._roles is not None else frozenset()

    def _destine(self, router: _Router, arrival: Arrival, now: float) -> None:
        name, _, sent = self._choose(router, arrival, now, is_begun=True)
        self._destined[arrival.request_id] = _Destined(name, sent)

    def _move(self, served: Served, giver: str, router: _Router, now: float) -> None:
        """Send the blocks of a prompt that has been computed to a decode replica."""
        assert self._transfers is not None
        if served.arrival.request_id not in self._destined:
            self._destine(router, served.arrival, now)
        destined = self._destined.pop(served.arrival.request_id)
        self._sent[served.arrival.request_id] = router, destined.sent
        replica = self._replica(destined.name)
        at = self._transfers.end(served, giver, destined.name, replica.cached_tokens(served.arrival))
        self._at(at, partial(self._receive, destined.name, served))

    def _receive(self, name: str, served: Served, now: float) -> None:
        self._replica(name).receive(served, now)
        self._wake_later(self._members[name])

    def _wake_later(self, member: _Member) -> None:
        if member.replica is not None and member.replica.wakes_at is not None:
            self._at(member.replica.wakes_at, partial(self._wake, member))

    def _wake(self, member: _Member, now: float) -> None:
        if member.replica is None or member.replica.wakes_at != now:
            return  # interrupted meanwhile: the replica wakes at another time
        for ended in member.replica.advance(now):
            self._end(ended, member.name, now)
        if member.drains and not member.replica.num_unfinished:
            self._close(member, now)
        self._wake_later(member)

    def _end(self, served: Served, name: str, now: float) -> None:
        router, sent = self._sent.pop(served.arrival.request_id)
        if sent is not None:
            router.fleet.note_ended(sent, now)
        if name in self._prefills and served.arrival.num_output_tokens > 1:
            self._move(served, name, router, now)
            return
        self._left -= 1
        follower = self._followers.pop(served.arrival.number, None)
        if follower is not None:
            at = now + follower.pause_s
            self._at(at, partial(self._arrive, replace(follower, at=at)))

    # ---- reports ----

    def _report_at(self, time_s: float, member: _Member) -> None:
        if self._report_period_s is not None:
            self._at(time_s, partial(self._report, member))

    def _report(self, member: _Member, now: float) -> None:
        if member.replica is None or not self._left:
            return
        report = member.replica.report(now)
        self._at(now + REPORT_LAG_S, partial(self._hear, member, report))
        self._report_at(now + (self._report_period_s or 0.0), member)

    def _hear(self, member: _Member, report: ReplicaReport, now: float) -> None:
        member.heard = report
        for router in self._routers:
            router.fleet.apply_report(member.name, report, now)

    # ---- replicas ----

    def _scale(self, now: float) -> None:
        assert self._scaling is not None
        if not self._left:
            return
        self._at(now + _SCALING_PERIOD_S, self._scale)
        staying = [member for member in self._members.values() if not member.drains]
        stale_at = now - self._scaling.policy.targets.stale_after_s
        heard = [m.heard for m in staying if m.heard is not None and m.heard.made_at >= stale_at]
        loads = [AutoscalingLoad.from_report(report) for report in heard]
        wanted = self._scaling.policy.desired(loads, len(staying), now)
        wanted = min(max(wanted, 1), self._scaling.most_replicas)
        for _ in range(wanted - len(staying)):
            member = self._order(now)
            self._at(now + self._scaling.start_s, partial(self._join, member))
        # The last ordered first; replicas that do not run yet are the last.
        for member in staying[wanted:][::-1]:
            self._stop(member, now)

    def _order(self, now: float) -> _Member:
        index = next(self._indices)
        member = _Member(f"replica-{index:03d}", index, now)
        self._members[member.name] = member
        self._note_size(now)
        return member

    def _join(self, member: _Member, now: float) -> None:
        if not member.drains:  # it may have been stopped before it ran
            self._start(member, now)
            self._report_at(now, member)

    def _start(self, member: _Member, now: float) -> None:
        receives = self._roles is not None
        member.replica = SimulatedReplica(member.index, self._device, now, leaps=self._leaps, receives=receives)
        self._change(now)

    def _stop(self, member: _Member, now: float) -> None:
        member.drains = True
        self._change(now)
        if member.replica is None or not member.replica.num_unfinished:
            self._close(member, now)

    def _change(self, now: float) -> None:
        """Note a change of the replicas that take requests."""
        self._names = [m.name for m in self._members.values() if m.replica is not None and not m.drains]
        if self._roles is not None:
            self._roles.update(self._names)
        for router in self._routers:
            router.fleet.update(self._names)
        self._note_size(now)

    def _close(self, member: _Member, now: float) -> None:
        """Remove an ended replica."""
        del self._members[member.name]
        busy_s, prefill_tokens = 0.0, 0
        if (replica := member.replica) is not None:
            busy_s, prefill_tokens = replica.busy_s, replica.prefill_tokens
            self._outcome.num_steps += replica.num_steps
            self._outcome.missed_tokens += replica.meter.missed_tokens
            replica.close()
            member.replica = None
        self._outcome.lifetimes.append(Lifetime(member.name, member.ordered_at, now, busy_s, prefill_tokens))

    def _note_size(self, now: float) -> None:
        ordered = sum(not member.drains for member in self._members.values())
        self._outcome.fleet_sizes.append((now, ordered, len(self._names)))
