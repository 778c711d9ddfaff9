"""The scaling policy as a policy of Ray Serve, which calls it in its controller about every 0.1 s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from ray.serve.config import AutoscalingContext

from folio.app.errors import ConfigError
from folio.app.fleet.autoscaling import (
    LOAD_METRICS,
    WEIGHTS_PREFIX,
    AutoscalingLoad,
    ScalingPolicy,
    ScalingState,
    ScalingTargets,
)

_STATE_KEY = "folio"


class KVAwareScaling:
    """The `policy_function` of the deployment EngineReplica. Serve keeps its state, because Serve makes a new policy
    object whenever the deployment's configuration changes.

    Args:
        kwargs: `policy_kwargs`, the fields of `ScalingTargets`.

    Raises:
        ConfigError: a field is unknown or out of bounds.
    """

    def __init__(self, **kwargs: Any) -> None:
        known = [field.name for field in fields(ScalingTargets)]
        if unknown := kwargs.keys() - set(known):
            raise ConfigError(f"the scaling policy has no settings {sorted(unknown)}; it has {', '.join(known)}")
        self._targets = ScalingTargets(**kwargs)
        self._arrivals: dict[Any, tuple[float, float]] = {}  # replica → `made_at` of its last load, time of arrival

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        state = context.policy_state.get(_STATE_KEY)
        policy = ScalingPolicy(self._targets, ScalingState(**state) if state else None)
        now = context.current_time or 0.0
        loads = self._fresh(latest_loads(context.raw_metrics or {}, context.running_replicas), now)
        num_running = len(context.running_replicas)
        desired = policy.desired(loads, context.target_num_replicas, now, context.total_num_requests, num_running)
        return desired, {_STATE_KEY: asdict(policy.state)}

    def _fresh(self, loads: Mapping[Any, AutoscalingLoad], now: float) -> list[AutoscalingLoad]:
        """The loads that arrived lately by the controller's clock, because replicas have other clocks."""
        before = self._arrivals
        self._arrivals = {
            replica: before[replica] if before.get(replica, (None,))[0] == load.made_at else (load.made_at, now)
            for replica, load in loads.items()
        }
        return [load for r, load in loads.items() if now - self._arrivals[r][1] <= self._targets.stale_after_s]


def latest_loads(
    metrics: Mapping[str, Mapping[Any, Sequence[Any]]], replicas: Sequence[Any]
) -> dict[Any, AutoscalingLoad]:
    """The last load of each replica that has reported one.

    Args:
        metrics: `AutoscalingContext.raw_metrics`: name → replica → (timestamp, value) in order. The context's
            aggregates are averages over `look_back_period_s`, too slow here.
    """
    loads = {}
    names = [*LOAD_METRICS, *(name for name in metrics if name.startswith(WEIGHTS_PREFIX))]
    for replica in replicas:
        found = {name: points[-1] for name in names if (points := metrics.get(name, {}).get(replica))}
        # Serve keeps the points of models that have no request any more: they are not in the last report.
        last = max((point.timestamp for point in found.values()), default=0.0)
        load = AutoscalingLoad.of_metrics({name: p.value for name, p in found.items() if p.timestamp == last})
        if load is not None:
            loads[replica] = load
    return loads
