"""Scaling policy: the number of replicas that the load reports call for. No Ray: Serve and the simulator both drive it.

The demand, in replicas, is the greatest of

    KV memory   tokens in use and waiting           / tokens in `kv_share` of a replica's cache
    TTFT        seconds of queued prefill           / `ttft_s`
    TPOT        running decodes                     / decodes that fit into a step of `tpot_s`
    slots       sequences, waiting ones too         / sequences that a replica runs together
    work        seconds of work arriving per second / `busy_share`
    models      bytes for the models with requests  / bytes of a replica's device, where models share it; weights of a
                model count once, because its requests at several replicas can go to one

and never more than the number of requests: one replica computes a request, and two finish a long prompt no sooner.

Up: when the demand has exceeded the target for `up_after_s`, to its least value in that time, at most `up_factor`
times the running replicas. Queues grow while replicas start, even if these will be enough; so the target stays until
they have reported or `start_s` has passed. A queue that shrinks raises no demand: its requests stay at their replica,
and a new one would not help them. Arriving work does raise it.

Down: by one, when for `down_after_s` the other replicas would have been enough with `hysteresis` to spare, and all
report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from folio.app.errors import ConfigError

if TYPE_CHECKING:  # folio.app.engine imports torch, which configuration checks and Serve's controller do not need
    from folio.app.engine.report import ReplicaReport
    from folio.app.shelf.status import DeviceStatus

_PREFIX = "folio_"
# Begins the names of the metrics of weights' shares; the model's name follows.
WEIGHTS_PREFIX = _PREFIX + "weights_share:"
# Tolerance for sums of floats when a demand is rounded up.
_EPSILON = 1e-6
# Time constant of a replica's `busy_share` (folio.app.engine.schedule.load_report).
_BUSY_S = 10.0


@dataclass(frozen=True, slots=True)
class AutoscalingLoad:
    """The numbers of a `ReplicaReport` that the policy reads, `fixed_s` and `token_s` from its `step`.

    A separate record, because Serve passes on flat metrics, and its controller, which has no torch, reads them.

    Attributes:
        device_share: memory that a shelf's models with requests need together, as a share of what weights and KV caches
            can take; above 1 they take turns. 0 for a single model.
        weights_shares: the part of it that is weights and pinned prefixes, by model.
    """

    made_at: float
    free_tokens: float
    total_tokens: float
    queued_tokens: float
    queued_s: float
    num_running: float
    num_waiting: float
    num_decodes: float
    max_num_seqs: float
    fixed_s: float
    token_s: float
    decode_s: float
    busy_share: float
    device_share: float = 0.0
    weights_shares: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_report(cls, report: ReplicaReport, device: DeviceStatus | None = None) -> AutoscalingLoad:
        """
        Args:
            device: of a shelf; `None`: models do not share memory.
        """
        steps = ("fixed_s", "token_s")
        names = [name for name in LOAD_FIELDS if name != "device_share"]
        load = cls(**{name: getattr(report.step if name in steps else report, name) for name in names})
        if device is None or not device.needed_bytes:
            return load
        usable_bytes = max(device.usable_bytes, 1)
        needed_bytes = device.needed_bytes - (device.capacity_bytes - device.usable_bytes)
        shares = {name: num_bytes / usable_bytes for name, num_bytes in device.needed_weights.items()}
        return replace(load, device_share=needed_bytes / usable_bytes, weights_shares=shares)

    def as_metrics(self) -> dict[str, float]:
        """Flat metrics, with shares of weights only for the models with requests."""
        metrics = {_PREFIX + name: float(getattr(self, name)) for name in LOAD_FIELDS}
        return metrics | {WEIGHTS_PREFIX + name: share for name, share in self.weights_shares.items()}

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float]) -> AutoscalingLoad | None:
        """The inverse of `as_metrics`, which ignores other metrics; `None` if one of `LOAD_METRICS` is missing."""
        found = {name: metrics[_PREFIX + name] for name in LOAD_FIELDS if _PREFIX + name in metrics}
        shares = {
            name.removeprefix(WEIGHTS_PREFIX): value
            for name, value in metrics.items()
            if name.startswith(WEIGHTS_PREFIX)
        }
        return cls(**found, weights_shares=shares) if len(found) == len(LOAD_FIELDS) else None

    @property
    def num_requests(self) -> float:
        return self.num_running + self.num_waiting

    @property
    def used_tokens(self) -> float:
        return max(self.total_tokens - self.free_tokens, 0.0)

    def work_share(self, tpot_s: float) -> float:
        """Share of the time needed for tokens: steps that compute prompts, and decodes at one step in `tpot_s`. A
        replica that is always in steps of a few decodes has room for many more."""
        return min(self.busy_share + self.decode_s / tpot_s, 1.0)

    def decodes_within(self, tpot_s: float) -> float | None:
        """Decodes that fit into a step of `tpot_s`. `None` while unknown, and when every step takes longer, which more
        replicas would not change."""
        each_s = self.decode_s / self.num_decodes if self.num_decodes and self.decode_s else self.token_s
        if not each_s or self.fixed_s >= tpot_s:
            return None
        return min(max((tpot_s - self.fixed_s) / each_s, 1.0), self.max_num_seqs)


LOAD_FIELDS = tuple(field.name for field in fields(AutoscalingLoad) if field.name != "weights_shares")
LOAD_METRICS = tuple(_PREFIX + name for name in LOAD_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """Settings of the policy.

    Attributes:
        ttft_s: target for the time in which queued prompts are computed.
        tpot_s: target for a step with all decodes.
        kv_share: largest share of the KV cache in use. `None`: KV memory starts no replicas, because all replicas share
            one device's memory.
        busy_share: largest share of the time spent on tokens.
        hysteresis: share of the remaining capacity that must be spare before a replica is stopped.
        up_after_s: time for which more replicas must be needed before some are started.
        down_after_s: time for which one replica less must be enough before one is stopped. Bursts of real traffic are
            minutes apart: below about 3 minutes replicas are stopped that the next burst needs again.
        to_zero_after_s: time without a request after which the last replica is stopped; `None`: never. `min_replicas`
            of the deployment must be 0 as well.
        up_factor: most growth in one decision, as a multiple of the running replicas; at least one replica.
        start_s: longest wait for ordered replicas before more are ordered.
        smooth_s: time constant of the averages of work, in addition to the replicas' own averaging.
        stale_after_s: age at which a load is ignored.

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
        faults = [fault for field in fields(self) if (fault := _fault(field.name, getattr(self, field.name)))]
        if faults:
            raise ConfigError("\n".join(faults))


def _fault(name: str, value: object) -> str | None:
    if value is None and name in ("kv_share", "to_zero_after_s"):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        is_right, bound = False, "be a number"
    elif name in ("kv_share", "busy_share"):
        is_right, bound = 0 < value <= 1, "be above 0 and at most 1"
    elif name == "hysteresis":
        is_right, bound = 0 <= value < 1, "be at least 0 and below 1, at which no replica would ever be stopped"
    elif name == "up_factor":
        is_right, bound = 1 < value < math.inf, "be above 1"
    elif name in ("up_after_s", "down_after_s", "to_zero_after_s", "start_s"):
        is_right, bound = 0 <= value < math.inf, "not be negative"
    else:
        is_right, bound = 0 < value < math.inf, "be above 0"
    return None if is_right else f"{name} of the scaling policy is {value!r}; it must {bound}"


@dataclass(frozen=True, slots=True)
class ReplicaDemand:
    """Replicas needed, by reason; fractions included."""

    kv: float = 0.0
    ttft: float = 0.0
    tpot: float = 0.0
    slots: float = 0.0
    work: float = 0.0
    models: float = 0.0

    @property
    def most(self) -> float:
        return max(self.kv, self.ttft, self.tpot, self.slots, self.work, self.models)


@dataclass(frozen=True, slots=True)
class ScalingState:
    """The policy's state between calls; times are seconds of the caller's clock.

    Attributes:
        seen_at: time of the last call.
        target, ordered_at: target of the last call, and the time of its last change.
        work, queued_s: sums over all replicas, averaged over `smooth_s`.
        earlier_queued_s: `queued_s` averaged once more, as `busy_share` is: the difference is the queues' growth.
        recent_queued_s: queued seconds averaged over half of `up_after_s`, to detect shrinking queues.
        above_since, least_above: time since when more than the target has been needed, and the least need since then.
        below_since: time since when one replica less would have been enough.
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
    """Decides the number of replicas, call by call. Another policy object may continue from `state`."""

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
            loads: known loads of the running replicas.
            target: replicas ordered so far, including those that start, are silent, or cannot start.
            now: seconds, always of the same clock.
            num_requests: requests that have not reached a replica; read only while no replica is busy.
            num_running: running replicas; by default the number of `loads`.

        Returns:
            the number of replicas needed, without an upper bound; the same until `target` has changed, because Serve
            may delay its decision.
        """
        self.state = self._observed(loads, target, now)
        if not target:
            return 1 if num_requests > 0 else 0
        if not loads:  # all are starting or silent
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
        """The demand of a fleet with these loads, given the state after the last `desired`."""
        targets, state = self.targets, self.state
        queued_s, queued_tokens = sum(load.queued_s for load in loads), sum(load.queued_tokens for load in loads)
        used_tokens, cache_tokens = sum(load.used_tokens for load in loads), sum(load.total_tokens for load in loads)
        used = waiting = 0.0
        if targets.kv_share is not None and cache_tokens:
            used, waiting = (
                tokens * len(loads) / cache_tokens / targets.kv_share for tokens in (used_tokens, queued_tokens)
            )
        kv, ttft = used + waiting, queued_s / targets.ttft_s
        if queued_s < state.recent_queued_s - _EPSILON:  # a shrinking queue calls for neither more nor fewer
            kv, ttft = max(used, min(kv, len(loads))), min(ttft, len(loads))
        # Arrived work is work done plus the growth of the queues. The average of a derivative over a time is the
        # distance from the average, divided by that time.
        arriving = state.work + (state.queued_s - state.earlier_queued_s) / _BUSY_S
        return ReplicaDemand(
            kv=kv,
            ttft=ttft,
            tpot=_per_replica(
                sum(load.num_decodes for load in loads), [load.decodes_within(targets.tpot_s) for load in loads]
            ),
            slots=_per_replica(sum(load.num_requests for load in loads), [load.max_num_seqs for load in loads]),
            work=arriving / targets.busy_share,
            models=_devices_for_models(loads),
        )

    def _observed(self, loads: Sequence[AutoscalingLoad], target: int, now: float) -> ScalingState:
        """The state with the averages and the target of this call."""
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
        """The state with the times since when the demand has been above or below the target."""
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
            # Ordered replicas for which the cluster has no room count as running here, and are stopped as well.
            all_known = silent <= 0 and not starting
            spare = all_known and demand <= (target - 1) * (1 - targets.hysteresis) + _EPSILON
        else:
            spare = not num_requests > 0 and not any(load.num_requests for load in loads)
        if spare:
            below_since = state.below_since if state.below_since is not None else now
        return replace(state, above_since=above_since, least_above=least_above, below_since=below_since)


def _devices_for_models(loads: Sequence[AutoscalingLoad]) -> float:
    """Devices that hold the models with requests, each model's weights once, and the KV memory of all requests."""
    once: dict[str, float] = {}
    for load in loads:
        for name, share in load.weights_shares.items():
            once[name] = max(share, once.get(name, 0.0))
    kv = sum(load.device_share - sum(load.weights_shares.values()) for load in loads)
    return kv + sum(once.values())


def _per_replica(needed: float, capacities: Sequence[float | None]) -> float:
    """Replicas of the average capacity for `needed`; 0 while no capacity is known."""
    known = [capacity for capacity in capacities if capacity]
    return needed * len(known) / sum(known) if known else 0.0


def _smoothed(average: float, value: float, elapsed_s: float, time_s: float) -> float:
    """An exponential moving average with time constant `time_s`, `elapsed_s` later."""
    return value + (average - value) * math.exp(-elapsed_s / time_s) if time_s else value
