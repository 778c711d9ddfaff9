"""Runs of the simulator, described by values, so that several processes can share them."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from benchmarks.simulator import single_cache, traffic
from benchmarks.simulator.cluster import REPORT_PERIOD_S, Cluster, MakePolicy, Scaling
from benchmarks.simulator.device import Device
from benchmarks.simulator.kv_aware import KvAware, KvIndex
from benchmarks.simulator.ray_affinity import RayAffinity, prefix_tree
from benchmarks.simulator.replica import SimulatedReplica
from folio.app.fleet.autoscaling import ScalingPolicy, ScalingTargets
from folio.app.fleet.cost import CostWeights
from folio.app.fleet.fleet import Fleet
from folio.app.fleet.policies import Policy, PrefixAware, make_policy

T = TypeVar("T")

RAY_POLICIES = {"ray_affinity": float("inf"), "ray_affinity_10": 10.0}  # their imbalance thresholds
KV_AWARE = "kv_aware"
# Policies that know the replicas' true state and need no reports.
OMNISCIENT = (*RAY_POLICIES, KV_AWARE, "round_robin")


@dataclass(frozen=True, slots=True)
class Source:
    """Source of requests: the "chat" and "code" traces, or synthetic requests without their files; "agents" are always
    synthetic.

    Attributes:
        count: number of requests; `None`: all of the trace.
        factor: of the rate.
        bursts: a period in seconds, and the share of it in which its requests arrive.
        as_stamped: see `traffic.mooncake`.
    """

    kind: Literal["chat", "code", "agents"]
    path: Path | None = None
    count: int | None = None
    factor: float = 1.0
    bursts: tuple[float, float] | None = None
    as_stamped: bool = False

    @property
    def is_trace(self) -> bool:
        return self.path is not None and self.path.is_file()

    def arrivals(self) -> list[traffic.Arrival]:
        if self.kind == "agents":
            return traffic.agents(self.count or 12_000, self.factor, seed=0)
        path = self.path if self.is_trace else None
        arrivals = traffic.faster(_read(self.kind, path, self.count, self.as_stamped), self.factor)
        return list(traffic.in_bursts(arrivals, *self.bursts) if self.bursts is not None else arrivals)


@functools.lru_cache(maxsize=4)
def _read(
    kind: Literal["chat", "code"], path: Path | None, count: int | None, as_stamped: bool
) -> list[traffic.Arrival]:
    if kind == "chat" and path is not None:
        return traffic.mooncake(path, count, as_stamped=as_stamped)
    if kind == "chat":
        return traffic.conversations(count or 12_000, seed=0)
    return traffic.azure(path)[:count] if path is not None else traffic.completions(count or 8_800, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a `Cluster`.

    Attributes:
        policy: of `make_policy`, or of `RAY_POLICIES`.
        weights: in place of the defaults of "prefix_aware".
        ttft_target_s: for the share of late requests.
        targets: of the autoscaling policy; `None`: the number of replicas is fixed.
    """

    policy: str
    num_replicas: int
    device: Device
    source: Source
    num_routers: int = 2
    report_period_s: float | None = REPORT_PERIOD_S
    weights: CostWeights | None = None
    ttft_target_s: float = 1.0
    targets: ScalingTargets | None = None
    start_s: float = 20.0
    most_replicas: int = 64


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a `Job`: see `Outcome`.

    `speed`: simulated seconds per second; `replica_speed`: that times replicas. `late_share`: share of requests with a
    TTFT above the target.
    """

    policy: str
    num_replicas: int
    hit_share: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    late_share: float
    busy_share: float
    busy_max_over_mean: float
    prefill_max_over_mean: float
    missed_tokens: float
    num_resyncs: int
    num_steps: int
    simulated_s: float
    replica_s: float
    wall_s: float
    fleet_sizes: list[tuple[float, int, int]]

    @property
    def speed(self) -> float:
        return self.simulated_s / self.wall_s

    @property
    def replica_speed(self) -> float:
        return self.replica_s / self.wall_s

    @property
    def load_max_over_mean(self) -> float:
        """The worse of both ratios. Seconds in steps hide the excess of a replica that is always busy; tokens of
        prompts ignore the time of decodes."""
        return max(self.busy_max_over_mean, self.prefill_max_over_mean)


def simulate(job: Job) -> Summary:
    arrivals = job.source.arrivals()
    scaling = None
    if job.targets is not None:
        policy = ScalingPolicy(job.targets)
        scaling = Scaling(policy=policy, start_s=job.start_s, most_replicas=job.most_replicas)
    cluster = Cluster(
        job.device,
        job.num_replicas,
        policy_maker(job.policy, job.device, job.weights),
        num_routers=job.num_routers,
        report_period_s=None if job.policy in OMNISCIENT else job.report_period_s,
        scaling=scaling,
    )
    start = time.perf_counter()
    outcome = cluster.run(arrivals)
    wall_s = time.perf_counter() - start
    ttft_s = outcome.ttft_s
    return Summary(
        policy=job.policy,
        num_replicas=job.num_replicas,
        hit_share=outcome.hit_share,
        ttft_mean_s=sum(ttft_s) / len(ttft_s),
        ttft_p50_s=outcome.ttft_percentile_s(50),
        ttft_p90_s=outcome.ttft_percentile_s(90),
        ttft_p99_s=outcome.ttft_percentile_s(99),
        late_share=sum(seconds > job.ttft_target_s for seconds in ttft_s) / len(ttft_s),
        busy_share=sum(life.busy_s for life in outcome.lifetimes) / outcome.replica_s,
        busy_max_over_mean=outcome.busy_max_over_mean,
        prefill_max_over_mean=outcome.prefill_max_over_mean,
        missed_tokens=outcome.missed_tokens / len(arrivals),
        num_resyncs=outcome.num_resyncs,
        num_steps=outcome.num_steps,
        simulated_s=outcome.ended_at,
        replica_s=outcome.replica_s,
        wall_s=wall_s,
        fleet_sizes=outcome.fleet_sizes,
    )


def single_hit_share(source: Source, device: Device, num_replicas: int) -> float:
    """Hit share of one cache as large as those of this many replicas."""
    return single_cache.hit_share(source.arrivals(), device, num_replicas * device.cache_tokens)


def policy_maker(name: str, device: Device, weights: CostWeights | None = None) -> MakePolicy:
    rng = random.Random(0)
    if name in RAY_POLICIES:
        tree = prefix_tree()

        def ray_affinity(fleet: Fleet, replica: Callable[[str], SimulatedReplica]) -> Policy:
            def queue_len(of: str) -> int:
                return replica(of).num_unfinished

            return RayAffinity(tree, queue_len, rng, imbalanced_threshold=RAY_POLICIES[name])

        return ray_affinity
    if name == KV_AWARE:
        index = KvIndex()
        return lambda fleet, replica: KvAware(index, replica, rng, unit_tokens=device.unit_tokens)
    seeds = itertools.count()
    if weights is not None:
        return lambda fleet, _: PrefixAware(fleet, weights, seed=next(seeds))
    return lambda fleet, _: make_policy(name, fleet, seed=next(seeds))


def run_all(tasks: Sequence[Callable[[], T]]) -> Iterator[T]:
    """The tasks' results in order, from one process per CPU. Tasks must be picklable."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.imap(_call, tasks)


def _call(task: Callable[[], T]) -> T:
    return task()
