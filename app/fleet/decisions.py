"""Decisions of this process's routers, recorded while the dashboard is watched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from folio.app.fleet.cost import CostWeights, request_cost
from folio.app.fleet.fleet import Fleet, RoutedRequest

# Decisions that are kept, and replicas whose scores are kept of each.
_MOST_DECISIONS, _MOST_SCORES = 64, 4
# Time for which calls that went on at another replica are counted, and most of them.
_COUNTED_S, _MOST_COUNTED = 60.0, 4096
# Reason of a call that has begun, or waited, at another replica.
CONTINUED = "continued"


@dataclass(frozen=True, slots=True)
class Score:
    """A replica as the policy saw it for one request, see `folio.app.fleet.cost`."""

    replica: str
    cached_tokens: int
    queued_s: float
    ttft_s: float
    harm_s: float


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """Why a request goes to a replica. `at`: `time.monotonic`. `scores`: of the best ones, if the policy has any."""

    at: float
    request_id: str
    num_tokens: int
    chosen: str
    reason: str
    scores: Sequence[Score] = ()


def scores_of(fleet: Fleet, request: RoutedRequest, ranked: Sequence[str], now: float) -> list[Score]:
    """The scores of the first replicas of a ranking that have a fresh report, before the request is sent."""
    known = fleet.fresh(ranked, now)
    if not known:
        return []
    loads, cached = fleet.loads(known, now), fleet.cached_tokens(request, known)
    ttft_s, harm_s = request_cost(loads, request.num_tokens, cached, CostWeights())
    return [
        Score(name, int(cached[i]), float(loads.queued_s[i]), float(ttft_s[i]), float(harm_s[i]))
        for i, name in enumerate(known[:_MOST_SCORES])
    ]


class DecisionLog:
    """The latest decisions. From any thread.

    Attributes:
        is_on: whether decisions are to be noted.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._decisions: deque[RoutingDecision] = deque(maxlen=_MOST_DECISIONS)
        self._continued_at: deque[float] = deque(maxlen=_MOST_COUNTED)

    def note(self, decision: RoutingDecision) -> None:
        if self.is_on:
            self._decisions.append(decision)
            if decision.reason == CONTINUED:
                self._continued_at.append(decision.at)

    def latest(self) -> list[RoutingDecision]:
        """The newest first."""
        return list(self._decisions.copy())[::-1]

    def num_continued(self, now: float) -> int:
        """Calls of the last minute that went on at another replica."""
        return sum(at > now - _COUNTED_S for at in self._continued_at.copy())

    def clear(self) -> None:
        self._decisions.clear()
        self._continued_at.clear()

    def __reduce__(self) -> tuple[Callable[[], DecisionLog], tuple[()]]:
        # Serve pickles the router's module by value: without this the router would write into a copy.
        return _of_this_process, ()


def _of_this_process() -> DecisionLog:
    return DECISIONS


# Serve constructs a process's routers with values of the YAML only, so an ingress reaches its router through this.
DECISIONS = DecisionLog()
