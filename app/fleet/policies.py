"""Routing policies: prefix-aware, least loaded, round robin, consistent hashing."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, get_args

import numpy as np

from folio.app.errors import ConfigError
from folio.app.fleet.cost import CostWeights, request_cost
from folio.app.fleet.fleet import Fleet, RoutedRequest

PolicyName = Literal["prefix_aware", "least_loaded", "round_robin", "consistent_hash"]

# Points of each replica on the hash ring. More points spread requests more evenly and take longer to build.
_POINTS = 64
# Consistent hashing skips replicas with more than this multiple of the mean load (Mirrokni et al., SODA 2018).
_MOST_OF_MEAN = 1.25
# Random increase of harm, at most this share: routers do not see each other's last requests, and would all send theirs
# to the same one of equal replicas. The expected time to first token gets no noise.
_HARM_NOISE = 0.1
# A session returns to its last replica while that costs at most this multiple of the least cost.
_SESSION_SLACK = 1.25
_SESSIONS_REMEMBERED = 10_000


class Policy(Protocol):
    """Ranks replicas of a `Fleet`."""

    def rank_replicas(self, request: RoutedRequest, replica_ids: Sequence[str], now: float) -> list[str]:
        """All of these replicas, the best first."""
        ...


class RoundRobin:
    """Replicas in turn."""

    def __init__(self, fleet: Fleet) -> None:
        self._counter = itertools.count()

    def rank_replicas(self, request: RoutedRequest, replica_ids: Sequence[str], now: float) -> list[str]:
        if not replica_ids:
            return []
        ordered = sorted(replica_ids)
        first = next(self._counter) % len(ordered)
        return ordered[first:] + ordered[:first]


class LeastLoaded:
    """Fewest unfinished requests first; ties by round robin."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._round_robin = RoundRobin(fleet)

    def rank_replicas(self, request: RoutedRequest, replica_ids: Sequence[str], now: float) -> list[str]:
        ordered = self._round_robin.rank_replicas(request, replica_ids, now)
        counts = dict(zip(ordered, self._fleet.num_requests(ordered, now), strict=True))
        return sorted(ordered, key=counts.__getitem__)


class ConsistentHash:
    """Consistent hashing with bounded loads: a session, or else a prefix of `num_units`, has one replica, and the next
    ones on the ring while that replica has a quarter more requests than the mean."""

    def __init__(self, fleet: Fleet, *, num_units: int = 8) -> None:
        self._fleet = fleet
        self._num_units = num_units
        self._replicas: frozenset[str] = frozenset()
        self._ring: list[tuple[bytes, str]] = []

    def rank_replicas(self, request: RoutedRequest, replica_ids: Sequence[str], now: float) -> list[str]:
        if not replica_ids:
            return []
        if self._replicas != frozenset(replica_ids):
            self._replicas = frozenset(replica_ids)
            points = ((_hash(f"{r} {i}".encode()), r) for r in replica_ids for i in range(_POINTS))
            self._ring = sorted(points)
        if request.session is not None:
            key = request.session.encode()
        elif request.keys:
            key = request.keys[min(self._num_units, len(request.keys)) - 1]
        else:
            key = request.request_id.encode()
        start = bisect.bisect(self._ring, (_hash(key), ""))
        order = dict.fromkeys(replica_id for _, replica_id in self._ring[start:] + self._ring[:start])
        counts = dict(zip(replica_ids, self._fleet.num_requests(replica_ids, now), strict=True))
        bound = _MOST_OF_MEAN * (sum(counts.values()) + 1) / len(counts)
        return sorted(order, key=lambda replica_id: counts[replica_id] + 1 > max(bound, 1))


class PrefixAware:
    """Least cost first (`request_cost`). Replicas without a fresh report come last, ranked by `LeastLoaded`.

    Args:
        seed: a different one for each router.
    """

    def __init__(self, fleet: Fleet, weights: CostWeights | None = None, seed: int = 0) -> None:
        self._fleet = fleet
        self._weights = weights or CostWeights()
        self._random = np.random.default_rng(seed)
        self._least_loaded = LeastLoaded(fleet)
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def rank_replicas(self, request: RoutedRequest, replica_ids: Sequence[str], now: float) -> list[str]:
        known = self._fleet.fresh(replica_ids, now)
        if not known:
            return self._least_loaded.rank_replicas(request, replica_ids, now)
        loads = self._fleet.loads(known, now)
        cached = self._fleet.cached_tokens(request, known)
        ttft_s, harm_s = request_cost(loads, request.num_tokens, cached, self._weights)
        noise = self._random.uniform(1, 1 + _HARM_NOISE, len(known))
        cost = ttft_s + harm_s * noise
        # Requests without a prompt cost nothing; they go to the replica with the least assigned work.
        order = np.lexsort((loads.assigned_share, cost))
        ranked = [known[i] for i in order.tolist()]
        if request.session is not None:
            self._prefer_session(request.session, known, cost.tolist(), ranked)
        if len(known) < len(replica_ids):
            unknown = [r for r in replica_ids if r not in set(known)]
            ranked += self._least_loaded.rank_replicas(request, unknown, now)
        return ranked

    def _prefer_session(self, session: str, known: list[str], cost: list[float], ranked: list[str]) -> None:
        last = self._sessions.pop(session, None)
        if last in known and cost[known.index(last)] <= _SESSION_SLACK * min(cost):
            ranked.remove(last)
            ranked.insert(0, last)
        self._sessions[session] = ranked[0]
        if len(self._sessions) > _SESSIONS_REMEMBERED:
            self._sessions.popitem(last=False)


def make_policy(name: str, fleet: Fleet, seed: int = 0) -> Policy:
    """The policy of this name. Raises `ConfigError` if there is none."""
    policies: dict[str, Callable[[Fleet], Policy]] = {
        "prefix_aware": lambda fleet: PrefixAware(fleet, seed=seed),
        "least_loaded": LeastLoaded,
        "round_robin": RoundRobin,
        "consistent_hash": ConsistentHash,
    }
    if name not in policies:
        raise ConfigError(f"the routing policy is {name!r}; choose one of {', '.join(get_args(PolicyName))}")
    return policies[name](fleet)


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()
