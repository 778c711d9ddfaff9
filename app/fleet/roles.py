"""Roles: prompts are computed at some replicas and decoded at others (`routing.prefill_share`).

Every engine can do both, so roles concern only where requests go: a new prompt to a prefill replica, and after its
first token to a decode replica, which gets most of its blocks while they are computed. A replica of the other role is
the last resort: no request is lost when all replicas of a role are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from folio.app.errors import UnavailableError
from folio.app.fleet.fleet import Fleet, RoutedRequest
from folio.app.fleet.messages import Piece
from folio.app.fleet.policies import LeastLoaded, Policy


class Prefilling(str):
    """The name of the replica that computes a call's prompt, and does not decode it. It comes at once, so that a decode
    replica gets the blocks meanwhile."""


class Prefilled(list[Piece]):
    """The first pieces of a call, which leaves its replica now."""


class PrefilledError(UnavailableError):
    """The call's prompt is computed, and it continues at a decode replica."""


class Roles:
    """The replicas that compute prompts. They follow from the replicas' names, so that all routers agree.

    Args:
        prefill_share: of the replicas, rounded, at least one; one replica at least decodes. 0: all do both.

    Attributes:
        prefill: names of the prefill replicas; empty if all do both, as a single replica does.
    """

    def __init__(self, prefill_share: float) -> None:
        self._share = prefill_share
        self.prefill: frozenset[str] = frozenset()

    def update(self, replicas: Collection[str]) -> None:
        """Take the replicas that get requests."""
        count = min(max(round(self._share * len(replicas)), 1), len(replicas) - 1) if self._share else 0
        self.prefill = frozenset(sorted(replicas)[: max(count, 0)])

    def of(self, name: str) -> str:
        """The role of a replica; empty if all do both."""
        return ("prefill" if name in self.prefill else "decode") if self.prefill else ""

    def split(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """The prefill replicas among these, and the others."""
        prefill, others = list[str](), list[str]()
        for name in names:
            (prefill if name in self.prefill else others).append(name)
        return prefill, others


class ByRole:
    """Ranks the replicas of the request's role first.

    New prompts go by `policy`. Calls with output, whose blocks follow them, go to the decode replica with the fewest
    requests. A call that cannot move is computed and decoded at a decode replica.

    Args:
        least_tokens: a new prompt of which a decode replica has cached all but fewer tokens is computed there, too.
    """

    def __init__(self, policy: Policy, fleet: Fleet, roles: Roles, least_tokens: int) -> None:
        self._policy, self._fleet, self._roles, self._least_tokens = policy, fleet, roles, least_tokens
        self._least_loaded = LeastLoaded(fleet)

    def rank_replicas(self, request: RoutedRequest, replica_ids: Sequence[str], now: float) -> list[str]:
        prefill, decode = self._roles.split(replica_ids)
        if not prefill or not decode:
            return self._policy.rank_replicas(request, replica_ids, now)
        if request.is_begun:
            ranked = self._least_loaded.rank_replicas(request, decode, now)
            return ranked + self._policy.rank_replicas(request, prefill, now)
        new_tokens = request.num_tokens - int(self._fleet.cached_tokens(request, decode).max())
        if request.stays or new_tokens < self._least_tokens:
            return self._policy.rank_replicas(request, decode, now) + self._least_loaded.rank_replicas(
                request, prefill, now
            )
        ranked = self._policy.rank_replicas(request, prefill, now)
        return ranked + self._least_loaded.rank_replicas(request, decode, now)
