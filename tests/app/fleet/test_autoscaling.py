"""The scaling policy over simulated fleets, and as Serve calls it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import pytest
from ray.serve.config import AutoscalingContext

from folio.app.errors import ConfigError
from folio.app.fleet.autoscaling import (
    LOAD_FIELDS,
    LOAD_METRICS,
    AutoscalingLoad,
    ScalingPolicy,
    ScalingState,
    ScalingTargets,
)
from folio.app.serving.autoscaling import KVAwareScaling
from folio.app.shelf.status import DeviceStatus
from tests.app.compat.ray_types import DeploymentID, TimeSeries, TimeStampedValue
from tests.app.fleet.reports import report

TICK_S = 0.1  # as Serve's controller
Loads = Callable[[float, int], Sequence[AutoscalingLoad]]
IDLE = AutoscalingLoad(
    made_at=0.0,
    free_tokens=10_000.0,
    queued_tokens=0.0,
    queued_s=0.0,
    total_tokens=10_000.0,
    num_running=0.0,
    num_waiting=0.0,
    num_decodes=0.0,
    max_num_seqs=32.0,
    fixed_s=0.02,
    token_s=0.001,
    decode_s=0.0,
    busy_share=0.0,
)


def decoding(num_decodes: float, **changes: float) -> AutoscalingLoad:
    """A replica whose decodes cost 2 ms each beside 20 ms: 40 of them fit into 100 ms, but it has 32 slots."""
    load = replace(IDLE, num_running=num_decodes, num_decodes=num_decodes, decode_s=0.002 * num_decodes)
    return replace(load, **changes)


def prefilling(queued_s: float, num_waiting: float = 8.0) -> AutoscalingLoad:
    return replace(
        IDLE, queued_s=queued_s, queued_tokens=queued_s / 0.001, num_waiting=num_waiting, busy_share=min(queued_s, 1.0)
    )


def shared(weights: dict[str, float], kv: float, num_running: float = 1.0, **changes: float) -> AutoscalingLoad:
    """A replica with requests for several models."""
    load = replace(IDLE, num_running=num_running, device_share=sum(weights.values()) + kv, weights_shares=weights)
    return replace(load, **changes)


@dataclass
class Fleet:
    """Replicas that start `start_s` after they are ordered, under a policy."""

    policy: ScalingPolicy
    num_running: int = 1
    start_s: float = 0.0
    now: float = 1000.0
    target: int = 0
    most: int = 16
    room: int = 100

    def __post_init__(self) -> None:
        self.target = self.num_running
        self.history = [self.target]
        self._ready_at = 0.0

    def run(self, seconds: float, load: Loads, requests: float = 0.0) -> None:
        """`load`: of all running replicas, from seconds since the beginning and how many they are."""
        start = self.now
        while self.now < start + seconds:
            loads = load(self.now - start, self.num_running) if self.num_running else []
            wanted = min(self.policy.desired(loads, self.target, self.now, requests, self.num_running), self.most)
            if wanted != self.target:
                self._ready_at = self.now + (self.start_s if wanted > self.target else 0.0)
                self.target = wanted
                self.history.append(wanted)
            if self.now >= self._ready_at:
                self.num_running = min(self.target, self.room)
            self.now += TICK_S


def fleet(num_running: int = 1, start_s: float = 0.0, **targets: Any) -> Fleet:
    return Fleet(ScalingPolicy(ScalingTargets(**targets)), num_running, start_s)


class Queues:
    """Replicas that compute a second of queued prefill per second; work goes to the shortest queue."""

    def __init__(self, coming: Callable[[float], float]) -> None:
        self._coming = coming
        self._queued_s: list[float] = []
        self._busy = [0.0] * 100
        self.longest_s = 0.0

    def __call__(self, t: float, num_running: int) -> list[AutoscalingLoad]:
        moved = self._queued_s[num_running:]  # a stopped replica would finish its own; here they move
        self._queued_s = self._queued_s[:num_running] + [0.0] * (num_running - len(self._queued_s))
        for amount in (*[self._coming(t) * TICK_S / 4] * 4, *moved):
            self._queued_s[self._queued_s.index(min(self._queued_s))] += amount
        for i, queued_s in enumerate(self._queued_s):  # averaged over 10 s
            self._busy[i] += (min(queued_s / TICK_S, 1.0) - self._busy[i]) * TICK_S / 10.0
        loads = [replace(prefilling(q), busy_share=busy) for q, busy in zip(self._queued_s, self._busy, strict=False)]
        self.longest_s = max(self._queued_s)
        self._queued_s = [max(queued_s - TICK_S, 0.0) for queued_s in self._queued_s]
        return loads


# ---- demand ----


@pytest.mark.parametrize(
    ("loads", "reason", "replicas"),
    [
        ([replace(IDLE, free_tokens=4000.0, queued_tokens=2000.0)] * 3, "kv", 3.0),
        ([replace(IDLE, free_tokens=2000.0), replace(IDLE, total_tokens=30_000.0, free_tokens=30_000.0)], "kv", 0.5),
        ([replace(IDLE, queued_s=1.5), replace(IDLE, queued_s=0.25)], "ttft", 1.75),
        ([decoding(48.0), decoding(16.0)], "tpot", 2.0),
        ([replace(decoding(40.0), max_num_seqs=100.0)] * 2, "tpot", 2.0),
        ([replace(decoding(4.0), fixed_s=0.2)], "tpot", 0.0),  # no number of replicas makes a step shorter
        ([replace(IDLE, num_running=32.0, num_waiting=16.0)], "slots", 1.5),
        ([replace(IDLE, device_share=1.5), replace(IDLE, device_share=0.25)], "models", 1.75),
        ([shared({"a": 0.5}, kv=0.2), shared({"a": 0.5, "b": 0.25}, kv=0.1)], "models", 1.05),
    ],
)
def test_the_demand(loads: list[AutoscalingLoad], reason: str, replicas: float) -> None:
    assert getattr(ScalingPolicy(ScalingTargets()).demand(loads), reason) == pytest.approx(replicas)


def test_the_demand_of_work() -> None:
    """A replica that is always in steps of a few decodes could take many more."""
    assert decoding(1.0).work_share(tpot_s=0.1) == pytest.approx(0.02)
    assert decoding(40.0).work_share(tpot_s=0.1) == pytest.approx(0.8)
    assert decoding(90.0).work_share(tpot_s=0.1) == 1.0
    assert prefilling(10.0).work_share(tpot_s=0.1) == 1.0
    assert replace(decoding(10.0), busy_share=0.5).work_share(tpot_s=0.1) == pytest.approx(0.5 + 0.2)
    assert replace(IDLE, busy_share=0.5).work_share(tpot_s=0.1) == 0.5


# ---- decisions ----


class Phase(NamedTuple):
    """`load`: of one of `n` replicas from seconds since the phase began, or the same for all. `history`: after it."""

    seconds: float
    load: AutoscalingLoad | Callable[[float, int], AutoscalingLoad]
    history: list[int]
    requests: float = 0.0


def each(load: AutoscalingLoad | Callable[[float, int], AutoscalingLoad]) -> Loads:
    return lambda t, n: [load(t, n) if callable(load) else load] * n


SCENARIOS: dict[str, tuple[Fleet, list[Phase]]] = {
    "a ramp to what needs 6 replicas is followed, never far ahead": (
        fleet(up_after_s=1.0),
        [Phase(120.0, lambda t, n: decoding(32.0 * 6 * min(t / 100.0, 1.0) / n), [1, 2, 3, 4, 5, 6])],
    ),
    "a sustained need is answered within two seconds by several replicas": (
        fleet(2, up_after_s=1.5, up_factor=4.0),
        [Phase(2.0, prefilling(3.0), [2, 6])],
    ),
    "a short need orders nothing": (
        fleet(2, up_after_s=1.5),
        [Phase(20.0, prefilling(0.05), [2]), Phase(1.4, prefilling(3.0), [2]), Phase(20.0, prefilling(0.05), [2])],
    ),
    "a peak within up_after_s does not order for the peak": (
        fleet(1, up_after_s=1.5, up_factor=8.0),
        [Phase(1.0, prefilling(1.5), [1]), Phase(0.4, prefilling(7.0), [1]), Phase(0.4, prefilling(7.0), [1, 2])],
    ),
    "two models that take turns get another replica, though nothing but memory keeps them waiting": (
        fleet(up_after_s=1.0),
        [Phase(60.0, lambda _, n: replace(IDLE, num_waiting=2.0 / n, device_share=1.6 / n), [1, 2])],
    ),
    # Its weights counted at each of them, so that every replica that got requests called for further ones.
    "regression: a model with requests at both replicas orders no third": (
        fleet(up_after_s=1.0),
        [Phase(60.0, lambda _, n: shared({"a": 0.7, "b": 0.7}, 0.1 / n, num_running=4.0 / n), [1, 2])],
    ),
    "the wait for a replica that never starts is bounded, and one that runs does not grow to more than two": (
        fleet(start_s=1000.0),
        [Phase(119.0, prefilling(30.0), [1, 2]), Phase(200.0, prefilling(30.0, num_waiting=50.0), [1, 2])],
    ),
    "one request needs one replica: half a minute of prompt in a full cache is no sooner there with two": (
        fleet(),
        [Phase(60.0, replace(prefilling(30.0, num_waiting=0.0), num_running=1.0, free_tokens=100.0), [1])],
    ),
    "requests shorter than a report period, which no report shows, keep their replicas": (
        fleet(2, down_after_s=20.0),
        [Phase(200.0, replace(IDLE, busy_share=0.9), [2])],
    ),
    "a queue of 20 s to which hardly anything comes orders nothing": (
        fleet(2),
        [Phase(60.0, lambda t, _: prefilling(max(20.0 - t, 0.0)), [2])],
    ),
    "a fleet that barely keeps up, with hardly a queue, grows and stays": (
        fleet(2, down_after_s=20.0),
        [
            Phase(
                200.0,
                lambda _, n: replace(prefilling(0.1), queued_tokens=1000.0, busy_share=1.9 / n),
                [2, 3],
            )
        ],
    ),
    "down is one at a time and after a while": (
        fleet(5, down_after_s=60.0),
        [Phase(59.0, IDLE, [5]), Phase(60.0, IDLE, [5, 4]), Phase(1000.0, IDLE, [5, 4, 3, 2, 1])],
    ),
    "3 replicas' worth of slots keep 4 replicas, with room to spare": (
        fleet(4, down_after_s=10.0),
        [Phase(100.0, lambda _, n: decoding(32.0 * 3 / n), [4])],
    ),
    "3 replicas' worth of slots do not keep 5": (
        fleet(5, down_after_s=10.0),
        [Phase(100.0, lambda _, n: decoding(32.0 * 3 / n), [5, 4])],
    ),
    "regression: a model that any device holds, with a few requests at both replicas, does not keep both": (
        fleet(2, down_after_s=10.0),
        [Phase(60.0, lambda _, n: shared({"a": 0.6}, 0.05 / n, num_running=2.0 / n), [2, 1])],
    ),
    "models that the other replica could not hold with room to spare keep both": (
        fleet(2, down_after_s=10.0),
        [Phase(60.0, lambda _, n: shared({"a": 0.4, "b": 0.4}, 0.05 / n, num_running=2.0 / n), [2])],
    ),
    "regression: where the cluster has no room for what was ordered, it is given up, and replicas stop again": (
        replace(fleet(2, start_s=5.0, down_after_s=10.0), room=2),
        [Phase(60.0, lambda _, n: decoding(32.0 * 6 / n), [2, 4]), Phase(1000.0, IDLE, [2, 4, 3, 2, 1])],
    ),
    "bursts of 20 s with 40 s between them stop no replica for an hour": (
        fleet(1),
        [Phase(3600.0, lambda t, n: decoding(96.0 / n) if t % 60.0 < 20.0 else IDLE, [1, 2, 3])],
    ),
    "to zero and back": (
        fleet(1, start_s=20.0, to_zero_after_s=300.0),
        [
            Phase(299.0, IDLE, [1]),
            Phase(10.0, IDLE, [1, 0]),
            Phase(100.0, IDLE, [1, 0]),
            Phase(19.0, IDLE, [1, 0, 1], requests=1.0),
            Phase(100.0, decoding(1.0), [1, 0, 1]),
        ],
    ),
    "the last replica stops only if configured": (fleet(1), [Phase(5000.0, IDLE, [1])]),
    "the last replica does not stop while requests wait or run": (
        fleet(1, to_zero_after_s=1.0),
        [Phase(50.0, IDLE, [1], requests=1.0), Phase(50.0, decoding(1.0), [1])],
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_decisions(name: str) -> None:
    scenario, phases = SCENARIOS[name]
    for phase in phases:
        scenario.run(phase.seconds, each(phase.load), phase.requests)
        assert scenario.history == phase.history


def test_a_cold_start_orders_no_more() -> None:
    """1.6 s of work come a second. The first queue grows to 24 s while the second replica starts, and shrinks then."""
    cold, queues = fleet(start_s=40.0), Queues(lambda _: 1.6)
    cold.run(39.0, queues)
    assert queues.longest_s > 20.0
    cold.run(300.0, queues)
    assert cold.history == [1, 2]
    assert queues.longest_s < 1.0


def test_no_replica_is_spare_until_all_that_were_ordered_run() -> None:
    targets = ScalingTargets()
    policy = ScalingPolicy(targets, ScalingState(seen_at=1000.0, target=3, ordered_at=1000.0))
    for now, is_spare in ((1001.0, False), (1000.0 + targets.start_s, True)):
        policy.desired([IDLE], 3, now)
        assert (policy.state.below_since is not None) == is_spare


def test_no_number_of_decodes_fits_where_a_step_without_them_takes_as_long_as_it_may() -> None:
    assert replace(IDLE, fixed_s=0.1).decodes_within(0.1) is None


def test_a_flood_takes_few_orders() -> None:
    """From nothing to 7 s of work a second, with replicas that take 10 s to start."""
    flood, queues = fleet(start_s=10.0), Queues(lambda _: 7.0)
    flood.run(60.0, queues)
    assert flood.history in ([1, 2, 4, 8, 9], [1, 2, 4, 8, 9, 10], [1, 2, 4, 8])
    flood.run(300.0, queues)
    assert flood.target <= 11
    assert queues.longest_s < 1.0


def test_a_silent_replica_stops_no_other() -> None:
    silent = fleet(3, down_after_s=5.0)
    silent.run(60.0, lambda _, n: [IDLE] * (n - 1))
    silent.run(60.0, lambda _, n: [])
    assert silent.history == [3]


@pytest.mark.parametrize("period_s", [0.2, 1.0, 5.0, 20.0, 45.0])
def test_a_load_around_a_threshold_moves_the_fleet_once_at_most(period_s: float) -> None:
    """Between 5 % less and 5 % more than what 2 replicas are for, for a quarter of an hour."""
    flapping = fleet(2)
    flapping.run(900.0, each(lambda t, n: decoding(64.0 * (1.05 if int(t / period_s) % 2 else 0.95) / n)))
    assert len(flapping.history) <= 2


def test_models_to_zero_and_back() -> None:
    """Two models on three replicas, then one, then none. Memory of idle models calls for no replica."""
    shelf = fleet(3, to_zero_after_s=30.0, down_after_s=10.0)
    shelf.run(100.0, each(lambda _, n: shared({"a": 0.7, "b": 0.7}, 0.1 / n)))
    assert shelf.history == [3, 2]
    shelf.run(100.0, lambda _, n: [shared({"a": 0.7}, 0.05)] + [IDLE] * (n - 1))
    assert shelf.history == [3, 2, 1]
    shelf.run(100.0, each(IDLE))
    assert shelf.history == [3, 2, 1, 0]
    shelf.run(1.0, each(IDLE), requests=1.0)
    assert shelf.target == 1


# ---- state, settings ----


def test_another_policy_continues_from_the_state() -> None:
    """Serve may make a new one at any time: nothing is remembered elsewhere."""
    loads = [[prefilling(3.0)] * 2, [IDLE] * 2, [decoding(31.0)] * 2]
    one, state = ScalingPolicy(ScalingTargets()), ScalingState()
    for step, load in enumerate(itertools.islice(itertools.cycle(loads * 7), 900)):
        other = ScalingPolicy(ScalingTargets(), ScalingState(**asdict(state)))
        assert other.desired(load, 2, step * TICK_S) == one.desired(load, 2, step * TICK_S)
        state = other.state
        assert state == one.state


def test_a_clock_set_back_resets_the_state() -> None:
    policy = ScalingPolicy(ScalingTargets())
    policy.desired([prefilling(3.0)], 1, 5000.0)
    assert policy.desired([prefilling(3.0)], 1, 10.0) == 1
    assert policy.desired([prefilling(3.0)], 1, 12.0) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ttft_s": 0.0}, "ttft_s of the scaling policy is 0.0; it must be above 0"),
        ({"tpot_s": float("nan")}, "tpot_s .* is nan"),
        ({"kv_share": 1.5}, "kv_share .* is 1.5; it must be above 0 and at most 1"),
        ({"hysteresis": 1.0}, "hysteresis .* is 1.0; it must be at least 0 and below 1"),
        ({"down_after_s": -1}, "down_after_s .* is -1; it must not be negative"),
        ({"up_factor": 1}, "up_factor .* is 1; it must be above 1"),
        ({"busy_share": "high"}, "busy_share .* is 'high'; it must be a number"),
        ({"start_s": None}, "start_s .* is None; it must be a number"),
        ({"ttft": 1.0}, r"no settings \['ttft'\]; it has ttft_s, tpot_s"),
    ],
)
def test_settings_out_of_bounds(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVAwareScaling(**settings)


def test_settings_that_may_be_none() -> None:
    policy = ScalingPolicy(ScalingTargets(kv_share=None, to_zero_after_s=None))
    assert policy.demand([replace(IDLE, free_tokens=1.0)]).kv == 0.0


def test_loads_as_metrics_and_back() -> None:
    used = {"free_tokens": 900, "total_tokens": 1000, "queued_tokens": 100, "queued_s": 0.4}
    busy = {"num_running": 3, "num_waiting": 2, "num_decodes": 2, "decode_s": 0.006, "busy_share": 0.75}
    sizes = {"capacity_bytes": 120, "used_bytes": 0, "idle_bytes": 0, "charged_bytes": 0, "workspace_bytes": 15}
    device = DeviceStatus(**sizes, usable_bytes=100, needed_bytes=20 + 50, needed_weights={"a": 10, "b: c": 30})
    load = AutoscalingLoad.from_report(report(5.0, **used, **busy), device)
    assert (load.used_tokens, load.num_requests, load.fixed_s, load.device_share) == (100, 5, 0.01, 0.5)
    assert load.weights_shares == {"a": 0.1, "b: c": 0.3}
    idle = AutoscalingLoad.from_report(report(5.0), replace(device, needed_bytes=0, needed_weights={}))
    assert (idle.device_share, idle.weights_shares) == (0.0, {})
    metrics = load.as_metrics()
    assert metrics.keys() > set(LOAD_METRICS)
    assert all(type(value) is float for value in metrics.values())
    assert AutoscalingLoad.of_metrics(metrics | {"other": 1.0}) == load
    assert AutoscalingLoad.of_metrics(dict.fromkeys(LOAD_METRICS[1:], 1.0)) is None
    assert len(LOAD_FIELDS) == len(LOAD_METRICS)


# ---- as Serve calls it ----


def context(
    metrics: dict[str, dict[str, TimeSeries]] | None,
    state: dict[str, Any],
    *,
    target: int = 2,
    running: Sequence[str] = ("a", "b"),
    num_requests: float = 0.0,
    now: float = 1000.0,
) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=DeploymentID("EngineReplica"),
        deployment_name="EngineReplica",
        app_name="folio",
        current_num_replicas=len(running),
        target_num_replicas=target,
        running_replicas=list(running),
        total_num_requests=num_requests,
        total_queued_requests=0.0,
        aggregated_metrics=None,
        raw_metrics=metrics,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=8,
        policy_state=state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=None,
    )


def series(loads: dict[str, list[AutoscalingLoad]]) -> dict[str, dict[str, TimeSeries]]:
    found: dict[str, dict[str, TimeSeries]] = {name: {replica: [] for replica in loads} for name in LOAD_METRICS}
    for replica, history in loads.items():
        for load in history:
            for name, value in load.as_metrics().items():
                found.setdefault(name, {}).setdefault(replica, []).append(TimeStampedValue(load.made_at, value))
    return found


def test_serve_gets_what_the_policy_says() -> None:
    """The last values count; the state goes through Serve."""
    state: dict[str, Any] = {"another policy's": 1}
    wanted = []
    for tick in range(20):
        now = 1000.0 + tick * TICK_S
        busy, idle = replace(prefilling(3.0), made_at=now), replace(IDLE, made_at=now - 0.5)
        decision, state = KVAwareScaling()(
            context(series({"a": [idle, busy], "b": [idle, busy], "gone": [busy]}), state, now=now)
        )
        wanted.append(decision)
    assert (wanted[0], wanted[-1]) == (2, 4)


def test_serve_gets_models_that_count_once() -> None:
    """Reports of two replicas on which the same two models are busy, and, later, one of them, which one device holds.
    Serve keeps the points of the model that has no request any more."""
    policy, state, history = KVAwareScaling(up_after_s=0.0, down_after_s=10.0, start_s=1.0), dict[str, Any](), []
    wanted = []
    for tick in range(300):
        now = 1000.0 + tick * TICK_S
        weights = {"a": 0.6, "b": 0.6} if tick < 100 else {"a": 0.6}
        history = [*history[-20:], shared(weights, 0.02, num_running=3.0, made_at=now)]
        decision, state = policy(context(series({"a": history, "b": history}), state, now=now))
        wanted.append(decision)
    assert set(wanted[:190]) == {2}
    assert wanted[-1] == 1


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        {},
        {LOAD_METRICS[0]: {"a": [TimeStampedValue(999.0, 999.0)]}},
        series({"a": [], "b": []}),
    ],
)
def test_missing_metrics_change_nothing(metrics: dict[str, dict[str, TimeSeries]] | None) -> None:
    policy, state = KVAwareScaling(down_after_s=0.0, up_after_s=0.0), dict[str, Any]()
    for tick in range(50):
        decision, state = policy(context(metrics, state, now=1000.0 + tick))
        assert decision == 2


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_clocks_of_replicas_do_not_matter(ahead_s: float) -> None:
    """Regression: loads were dated by their replica's clock: an hour behind, they never counted; an hour ahead, they
    counted for an hour after the last report."""
    policy = KVAwareScaling(stale_after_s=5.0, up_after_s=0.0, start_s=1.0)
    state: dict[str, Any] = {}
    wanted = []
    for tick in range(120):
        now = 1000.0 + tick * TICK_S
        history = [replace(prefilling(3.0), made_at=min(now, 1001.0) + ahead_s)]  # the last one is made at 1001
        decision, state = policy(context(series({"a": history, "b": history}), state, now=now))
        wanted.append(decision)
    assert wanted[0] == 4
    assert wanted[-1] == 2


def test_serve_comes_back_from_zero() -> None:
    policy = KVAwareScaling(to_zero_after_s=1.0)
    assert policy(context(None, {}, target=0, running=()))[0] == 0
    assert policy(context(None, {}, target=0, running=(), num_requests=0.3))[0] == 1


def test_two_observations_at_one_time_keep_the_state() -> None:
    """They do not reset it, as a clock that goes back does."""
    policy = ScalingPolicy(ScalingTargets())
    loads = [replace(IDLE, queued_tokens=20_000.0, num_running=32.0)] * 2
    wanted = [policy.desired(loads, 2, 1000.0 + i // 2, 64.0, 2) for i in range(200)]
    assert wanted[-1] > 2
