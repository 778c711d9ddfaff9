"""The autoscaling policy as Ray Serve calls it: about every 0.1 s, in its controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from ray.serve.config import AutoscalingContext

from app.errors import ConfigError
from app.fleet.autoscaling import LOAD_METRICS, ReplicaLoad, ScalingPolicy, ScalingState, ScalingTargets

_STATE_KEY = "folio"


class KVAwareScaling:
    """`policy_function` of the deployment EngineReplica. Its state is Serve's to keep, because Serve makes a new one
    whenever the deployment's configuration changes.

    Args:
        kwargs: `policy_kwargs`, the fields of `ScalingTargets`.

    Raises:
        ConfigError: one of them is unknown or out of bounds.
    """

    def __init__(self, **kwargs: Any) -> None:
        known = [field.name for field in fields(ScalingTargets)]
        if unknown := kwargs.keys() - set(known):
            raise ConfigError(f"{sorted(unknown)} are no settings of the scaling policy; it has {', '.join(known)}")
        self._targets = ScalingTargets(**kwargs)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        state = context.policy_state.get(_STATE_KEY)
        policy = ScalingPolicy(self._targets, ScalingState(**state) if state else None)
        now = context.current_time or 0.0
        loads = latest_loads(context.raw_metrics or {}, context.running_replicas, now - self._targets.stale_after_s)
        wanted = policy.desired(
            loads, context.target_num_replicas, now, context.total_num_requests, len(context.running_replicas)
        )
        return wanted, {_STATE_KEY: asdict(policy.state)}


def latest_loads(
    metrics: Mapping[str, Mapping[Any, Sequence[Any]]], replicas: Sequence[Any], not_before: float
) -> list[ReplicaLoad]:
    """The last load of each replica that has reported one.

    Args:
        metrics: name → replica → (timestamp, value) in order, as `AutoscalingContext.raw_metrics`. Its aggregates are
            averages over `look_back_period_s`, which would be too slow.
        not_before: older ones are left out.
    """
    loads = []
    for replica in replicas:
        series = {name: metrics.get(name, {}).get(replica) for name in LOAD_METRICS}
        load = ReplicaLoad.of_metrics({name: points[-1].value for name, points in series.items() if points})
        if load is not None and load.made_at >= not_before:
            loads.append(load)
    return loads
