"""How many replicas a fleet needs, from what its replicas say. Pure: the Serve policy and the simulator both drive it.

The demand, in replicas, is the greatest of

    KV memory   tokens in use and waiting           / what `kv_share` of a replica's cache holds
    TTFT        seconds of queued prefill           / `ttft_s`
    TPOT        running decodes                     / decodes that fit into a step of `tpot_s`
    slots       sequences, waiting ones too         / sequences that a replica runs at once
    work        seconds of work that come a second  / `busy_share`

and never more than there are requests: each is computed on one replica, and a long prompt is no sooner there with two.

Up: when the demand exceeds the target for `up_after_s`, to the least it was in that time, at most `up_factor` times
what runs. Queues keep growing while replicas start, whether or not these will be enough, so that nothing more is
ordered until they have reported, or `start_s` has passed. A queue that shrinks is no reason for more: what waits at a
replica stays there, and would not be sooner on a new one. What comes, work, is.

Down: by one, when for `down_after_s` the others would have been enough with `hysteresis` to spare, and all report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

from app.errors import ConfigError

if TYPE_CHECKING:  # it imports torch, and a configuration is checked without
    from app.engine.report import ReplicaReport

_PREFIX = "folio_"
# Above this a demand is the next whole number of replicas; sums of floats come out slightly over.
_EPSILON = 1e-6
# What a replica's `busy_share` is averaged over (app.engine.load_report).
_BUSY_S = 10.0


@dataclass(frozen=True, slots=True)
class AutoscalingLoad:
    """What the policy needs of a `ReplicaReport`, all numbers, as Serve's metrics are.

    Attributes:
        made_at: seconds of the replica's monotonic clock.
        used_tokens: of the KV cache, owned by sequences.
        queued_tokens, queued_s: of prompts, not computed yet, and the expected time for them.
        total_tokens: that the cache holds within its budget.
        num_running, num_waiting, num_decodes, max_num_seqs, step_tokens, decode_s, busy_share: as in `ReplicaReport`.
        fixed_s, token_s: of a step, and of each token in it.
    """

    made_at: float
    used_tokens: float
    queued_tokens: float
    queued_s: float
    total_tokens: float
    num_running: float
    num_waiting: float
    num_decodes: float
    max_num_seqs: float
    step_tokens: float
    fixed_s: float
    token_s: float
    decode_s: float
    busy_share: float

    @classmethod
    def from_report(cls, report: ReplicaReport) -> AutoscalingLoad:
        return cls(
            made_at=report.made_at,
            used_tokens=max(report.total_tokens - report.free_tokens, 0),
            queued_tokens=report.queued_tokens,
            queued_s=report.queued_s,
            total_tokens=report.total_tokens,
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_decodes=report.num_decodes,
            max_num_seqs=report.max_num_seqs,
            step_tokens=report.step_tokens,
            fixed_s=report.step.fixed_s,
            token_s=report.step.token_s,
            decode_s=report.decode_s,
            busy_share=report.busy_share,
        )

    def as_metrics(self) -> dict[str, float]:
        """What `record_autoscaling_stats` returns."""
        return {_PREFIX + name: float(value) for name, value in asdict(self).items()}

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float]) -> AutoscalingLoad | None:
        """Back from `as_metrics`, among other metrics; None if some are missing."""
        found = {name: metrics[_PREFIX + name] for name in LOAD_FIELDS if _PREFIX + name in metrics}
        return cls(**found) if len(found) == len(LOAD_FIELDS) else None

    @property
    def num_requests(self) -> float:
        return self.num_running + self.num_waiting

    def work_share(self, tpot_s: float) -> float:
        """Share of the time that has to be spent on tokens: steps that compute prompts, and decodes at one step in
        `tpot_s`. A replica that is always in steps of a few decodes could take many more."""
        return min(self.busy_share + self.decode_s / tpot_s, 1.0)

    def decodes_within(self, tpot_s: float) -> float | None:
        """Decodes that a step of `tpot_s` has room for; None while unknown, and when no step is as short as that, which
        more replicas would not change."""
        each_s = self.decode_s / self.num_decodes if self.num_decodes and self.decode_s else self.token_s
        if not each_s or self.fixed_s >= tpot_s:
            return None
        return min(max((tpot_s - self.fixed_s) / each_s, 1.0), self.max_num_seqs)


LOAD_FIELDS = tuple(field.name for field in fields(AutoscalingLoad))
LOAD_METRICS = tuple(_PREFIX + name for name in LOAD_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """Settings of the policy.

    Attributes:
        ttft_s: queued prompts shall be computed within this time.
        tpot_s: a step with all decodes shall take no longer.
        kv_share: of the KV cache, to be in use at most. None: KV memory starts no replicas, for those that all share
            one device's memory, to which another one would add nothing.
        busy_share: of the time, to be spent on tokens at most.
        hysteresis: share of what would be left without a replica that must be spare before one is stopped.
        up_after_s: so long must more be needed before replicas are started.
        down_after_s: so long must one less be enough before one is stopped. Real traffic comes in bursts with minutes
            between them: below about 3 minutes replicas are stopped that the next burst needs again.
        to_zero_after_s: the last replica is stopped after so long without a request; None: never. `min_replicas` of the
            deployment must be 0 as well.
        up_factor: replicas grow to so many times those running at once, and at least by one.
        start_s: so long are replicas waited for that have been ordered before more are.
        smooth_s: over which work, and what comes, are averaged, beyond what replicas have averaged.
        stale_after_s: a load older than this is not known any more.

    Raises:
        ConfigError: a value is out of bounds.
    """

    ttft_s: float = 1.0
    tpot_s: float = 0.1
    kv_share: float | None = 0.8
    busy_share: float = 0.85
    hysteresis: float = 0.25
    up_after_s: float = 1.5
    down_after_s: float = 300.0
    to_zero_after_s: float | None = None
    up_factor: float = 2.0
    start_s: float = 120.0
    smooth_s: float = 5.0
    stale_after_s: float = 10.0

    def __post_init__(self) -> None:
        if problems := list(self._wrong_types()) or list(self._problems()):
            raise ConfigError("\n".join(problems))

    def _wrong_types(self) -> Iterator[str]:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in ("kv_share", "to_zero_after_s"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                yield f"{field.name} of the scaling policy is {value!r}; it must be a number"

    def _problems(self) -> Iterator[str]:
        for name in ("ttft_s", "tpot_s", "smooth_s", "stale_after_s"):
            if not 0 < getattr(self, name) < math.inf:
                yield f"{name} of the scaling policy is {getattr(self, name)}; it must be above 0"
        for name in ("up_after_s", "down_after_s", "to_zero_after_s", "start_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                yield f"{name} of the scaling policy is {value}; it must not be negative"
        for name in ("kv_share", "busy_share"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                yield f"{name} of the scaling policy is {value}; it must be above 0 and at most 1"
        if not 0 <= self.hysteresis < 1:
            yield (
                f"hysteresis of the scaling policy is {self.hysteresis}; it must be at least 0 and below 1, at which "
                "nothing would ever be stopped"
            )
        if not 1 < self.up_factor < math.inf:
            yield f"up_factor of the scaling policy is {self.up_factor}; it must be above 1"


@dataclass(frozen=True, slots=True)
class ReplicaDemand:
    """Replicas needed, by reason; fractions of one, too."""

    kv: float = 0.0
    ttft: float = 0.0
    tpot: float = 0.0
    slots: float = 0.0
    work: float = 0.0

    @property
    def most(self) -> float:
        return max(self.kv, self.ttft, self.tpot, self.slots, self.work)


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What the policy remembers; times are those of the callers' clock.

    Attributes:
        seen_at: of the last call.
        target, ordered_at: of the last call, and when it became that.
        work, queued_s: of all replicas, averaged over `smooth_s`.
        earlier_queued_s: that, averaged once more, as `busy_share` is, to tell by how much queues have grown.
        recent_queued_s: averaged over half of `up_after_s`, to tell whether they shrink.
        above_since, least_above: since when more than the target has been needed, and the least needed since then.
        below_since: since when one less would have been enough.
    """

    seen_at: float | None = None
    target: int | None = None
    ordered_at: float = -math.inf
    work: float = 0.0
    queued_s: float = 0.0
    earlier_queued_s: float = 0.0
    recent_queued_s: float = 0.0
    above_since: float | None = None
    least_above: float = 0.0
    below_since: float | None = None


class ScalingPolicy:
    """Decides the number of replicas, call by call. What it remembers is in `state`; another one may go on from it."""

    def __init__(self, targets: ScalingTargets, state: ScalingState | None = None) -> None:
        self.targets = targets
        self.state = state or ScalingState()

    def desired(
        self,
        loads: Sequence[AutoscalingLoad],
        target: int,
        now: float,
        num_requests: float = 0.0,
        num_running: int | None = None,
    ) -> int:
        """
        Args:
            loads: of the running replicas whose load is known.
            target: replicas ordered so far: the others are starting, or silent, or cannot start.
            now: seconds; not to be mixed with those of another clock.
            num_requests: that have not reached a replica yet; asked for only where there is none, or none busy.
            num_running: replicas that run, by default those in `loads`: of those beyond, no load is known.

        Returns:
            replicas that there should be. Repeats itself until `target` has changed: Serve may want to hear it for a
            while. Not bounded from above.
        """
        self.state = self._observed(loads, target, now)
        if not target:
            return 1 if num_requests > 0 else 0
        if not loads:  # all are starting or silent: nothing is known
            self.state = replace(self.state, above_since=None, below_since=None)
            return target
        silent = (len(loads) if num_running is None else num_running) - len(loads)
        self.state = state = self._timed(loads, target, now, num_requests, silent)
        if state.above_since is not None and now - state.above_since >= self.targets.up_after_s:
            return math.ceil(state.least_above - _EPSILON)
        down_after_s = self.targets.down_after_s if target > 1 else self.targets.to_zero_after_s
        if state.below_since is not None and down_after_s is not None and now - state.below_since >= down_after_s:
            return target - 1
        return target

    def demand(self, loads: Sequence[AutoscalingLoad]) -> ReplicaDemand:
        """Of a fleet with these loads, after what `desired` has seen of it."""
        targets, state = self.targets, self.state
        queued_s, queued_tokens = sum(load.queued_s for load in loads), sum(load.queued_tokens for load in loads)
        used_tokens, cache_tokens = sum(load.used_tokens for load in loads), sum(load.total_tokens for load in loads)
        used = waiting = 0.0
        if targets.kv_share is not None and cache_tokens:
            used, waiting = (
                tokens * len(loads) / cache_tokens / targets.kv_share for tokens in (used_tokens, queued_tokens)
            )
        kv, ttft = used + waiting, queued_s / targets.ttft_s
        if queued_s < state.recent_queued_s - _EPSILON:  # it shrinks: no reason for more, and none for less
            kv, ttft = max(used, min(kv, len(loads))), min(ttft, len(loads))
        # What came is what was done and what was added to the queues; the average of a derivative over a time is the
        # distance from the average, divided by the time.
        coming = state.work + (state.queued_s - state.earlier_queued_s) / _BUSY_S
        return ReplicaDemand(
            kv=kv,
            ttft=ttft,
            tpot=_per_replica(
                sum(load.num_decodes for load in loads), [load.decodes_within(targets.tpot_s) for load in loads]
            ),
            slots=_per_replica(sum(load.num_requests for load in loads), [load.max_num_seqs for load in loads]),
            work=coming / targets.busy_share,
        )

    def _observed(self, loads: Sequence[AutoscalingLoad], target: int, now: float) -> ScalingState:
        """The state after one more look at the fleet."""
        state, targets = self.state, self.targets
        work, queued_s = sum(load.work_share(targets.tpot_s) for load in loads), sum(load.queued_s for load in loads)
        if state.seen_at is None or now < state.seen_at:  # the first call, or the clock was set
            state = ScalingState(now, target, queued_s=queued_s, earlier_queued_s=queued_s, recent_queued_s=queued_s)
        if state.target != target:
            state = replace(state, target=target, ordered_at=now, above_since=None, below_since=None)
        assert state.seen_at is not None
        elapsed_s = now - state.seen_at
        smoothed_s = _smoothed(state.queued_s, queued_s, elapsed_s, targets.smooth_s)
        return replace(
            state,
            seen_at=now,
            work=_smoothed(state.work, work, elapsed_s, targets.smooth_s),
            queued_s=smoothed_s,
            earlier_queued_s=_smoothed(state.earlier_queued_s, smoothed_s, elapsed_s, _BUSY_S),
            recent_queued_s=_smoothed(state.recent_queued_s, queued_s, elapsed_s, targets.up_after_s / 2),
        )

    def _timed(
        self, loads: Sequence[AutoscalingLoad], target: int, now: float, num_requests: float, silent: int
    ) -> ScalingState:
        """The state with the times for which the demand has been above what there is, or below."""
        state, targets, num_running = self.state, self.targets, len(loads)
        demand = min(self.demand(loads).most, max(sum(load.num_requests for load in loads), 1.0))
        starting = num_running < target and now - state.ordered_at < targets.start_s
        most = max(num_running + 1, math.floor(num_running * targets.up_factor))
        wanted = min(demand, most)
        above_since, least_above, below_since = None, 0.0, None
        if wanted > target + _EPSILON and not starting:
            least_above = min(state.least_above, wanted) if state.above_since is not None else wanted
            above_since = state.above_since if state.above_since is not None else now
        if target > 1:
            # Those that should run by now and do not, because there is no room for them, are stopped as well.
            all_known = silent <= 0 and not starting
            spare = all_known and demand <= (target - 1) * (1 - targets.hysteresis) + _EPSILON
        else:
            spare = not num_requests > 0 and not any(load.num_requests for load in loads)
        if spare:
            below_since = state.below_since if state.below_since is not None else now
        return replace(state, above_since=above_since, least_above=least_above, below_since=below_since)


def _per_replica(needed: float, capacities: Sequence[float | None]) -> float:
    """How many replicas of the average capacity hold that much; 0 while no capacity is known."""
    known = [capacity for capacity in capacities if capacity]
    return needed * len(known) / sum(known) if known else 0.0


def _smoothed(average: float, value: float, elapsed_s: float, time_s: float) -> float:
    """An average that forgets exponentially, `elapsed_s` later."""
    return value + (average - value) * math.exp(-elapsed_s / time_s) if time_s else value
