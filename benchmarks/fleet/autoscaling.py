"""Autoscaling policy under varying load, against fleets of fixed size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.simulator.device import roofline
from benchmarks.simulator.jobs import Job, Source, Summary, run_all, simulate
from folio.app.fleet.autoscaling import ScalingTargets

DEVICE = roofline(
    "Llama-2-13B on one A100",
    parameters=13e9,
    layers=40,
    heads=40,
    kv_heads=40,
    head_dim=128,
    flops=312e12,
    bandwidth=2.039e12,
    memory_bytes=80e9,
    unit_tokens=128,
)
# The trace's longest prompt alone takes 1.3 s.
TARGETS = ScalingTargets(ttft_s=2.0, tpot_s=0.1, start_s=30.0)
START_S = 20.0
# All requests of a minute arrive in its first half.
BURSTS = (60.0, 1 / 2)
MOST_REPLICAS = 16
FIXED = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
FLAP_S = 60.0


def measure(path: Path, *, quick: bool) -> tuple[dict[str, float], dict[str, Any]]:
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    fixed = (3, 8) if quick else FIXED
    sources = {
        suffix: Source("code", path, 300 if quick else None, bursts=bursts)
        for suffix, bursts in (("", None), ("_bursts", BURSTS))
    }
    results = run_all([partial(simulate, job) for source in sources.values() for job in _jobs(source, fixed)])
    for suffix, source in sources.items():
        scaled, *fleets = itertools.islice(results, 1 + len(fixed))
        figures |= {key + suffix: value for key, value in _compare(source, scaled, fleets).items()}
        raw[f"code{suffix}"] = {"autoscaled": asdict(scaled), "fixed": [asdict(fleet) for fleet in fleets]}
    return figures, raw


def _jobs(source: Source, fixed: Sequence[int]) -> list[Job]:
    job = partial(Job, policy="prefix_aware", device=DEVICE, source=source, ttft_target_s=TARGETS.ttft_s)
    scaled = job(num_replicas=1, targets=TARGETS, start_s=START_S, most_replicas=MOST_REPLICAS)
    return [scaled, *(job(num_replicas=n) for n in fixed)]


def _compare(source: Source, scaled: Summary, fleets: list[Summary]) -> dict[str, float]:
    """Compare the autoscaled fleet with fixed fleets, the smallest first."""
    enough = next((fleet for fleet in fleets if fleet.late_share <= scaled.late_share), fleets[-1])
    events = scale_events(scaled)
    ordered = [size for _, size, _ in scaled.fleet_sizes]
    figures = {
        "scale_events": float(len(events)),
        "scale_flaps": float(num_flaps(events)),
        "autoscaled_replica_share": scaled.replica_s / enough.replica_s,
        "late_share": scaled.late_share,
    }
    print(
        f"\nautoscaling: {'Azure code trace' if source.is_trace else 'synthetic, there is no trace'}, "
        f"{'in bursts' if source.bursts else 'at its own times'}; {DEVICE.name}, by its data sheet; TTFT target "
        f"{TARGETS.ttft_s:g} s, replicas start in {START_S:g} s\n"
        f"  autoscaled: {sum(up for _, up in events)} up, {sum(not up for _, up in events)} down, "
        f"{figures['scale_flaps']:.0f} changes of direction within {FLAP_S:g} s; 1 to {max(ordered)} replicas, "
        f"{scaled.replica_s / scaled.simulated_s:.2f} on average; {scaled.late_share:.2%} late, TTFT mean "
        f"{scaled.ttft_mean_s:.2f} s, p99 {scaled.ttft_p99_s:.2f} s\n"
        f"  fixed: "
        + ", ".join(f"{f.num_replicas}: {f.late_share:.2%} late" for f in fleets)
        + f"\n  replica-hours over those of the smallest fixed fleet with no more late ({enough.num_replicas}): "
        f"{figures['autoscaled_replica_share']:.2f}"
        + ("" if enough.late_share <= scaled.late_share else "; none has as few")
    )
    return figures


def scale_events(summary: Summary) -> list[tuple[float, bool]]:
    """(time, up or down) of each change of the ordered number of replicas."""
    sizes: dict[float, int] = {at: ordered for at, ordered, _ in summary.fleet_sizes}
    changes = list(sizes.items())
    return [(at, size > before) for (_, before), (at, size) in itertools.pairwise(changes) if size != before]


def num_flaps(events: list[tuple[float, bool]]) -> int:
    """Changes of direction within a minute."""
    return sum(up != was_up and at - was_at < FLAP_S for (was_at, was_up), (at, up) in itertools.pairwise(events))
