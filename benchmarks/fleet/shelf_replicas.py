"""Several simulated H100s with the same sixty models: where routers send requests.

Models, traffic and targets are those of `benchmarks.shelf_simulated`; each replica has a shelf of all models. There are
two routers, each with its own state; replicas report every second, and routers learn of it a tenth of a second later.

- prefix_aware, Folio's policy: with the wake, and with what a request meets of the other models on a device
- least_loaded, round_robin: each model's requests to the replica with fewest of them, and in turn
- fixed: each model has one replica, so that none is awake twice; no load is moved to other replicas

    wakes     per request
    cold      share of requests that came to a replica where their model slept
    copies    replicas where a model is awake, of the models that are awake anywhere, once a second
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks import harness
from benchmarks.fleet.shelf_models import TracedRequest
from benchmarks.fleet.shelf_simulated import (
    CAPACITY_BYTES,
    make_models,
    make_requests,
    parse,
    percentiles_of,
    read_trace,
    slo_share_of,
)
from benchmarks.simulator.shelf import ShelfSimulation
from benchmarks.simulator.shelf_cluster import FIXED, ShelfCluster
from folio.app.shelf.arbiter import Arbiter

OURS = "prefix_aware"
POLICIES = (OURS, "least_loaded", "round_robin", FIXED)
SIZES, QUICK_SIZES = (2, 4), (2,)
# Requests a second for each replica, and seconds of a run.
LOADS, QUICK_LOADS, SECONDS, QUICK_SECONDS = (0.5, 1.0), (1.0,), 200.0, 40.0


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `ttft_s`: 50th and 99th percentile; `busy_share` and `num_preempted` of each replica."""

    num_replicas: int
    policy: str
    rate: float
    num_requests: int
    slo_share: float
    ttft_s: tuple[float, float]
    wakes: float
    cold_share: float
    copies: float
    busy_share: list[float]
    num_preempted: list[int]


def simulate(num_replicas: int, policy: str, rate: float, traced: Sequence[TracedRequest], seconds: float) -> Result:
    models, requests = make_models(), make_requests(traced, rate, seconds)
    shelves = [ShelfSimulation(models, Arbiter(CAPACITY_BYTES)) for _ in range(num_replicas)]
    outcome = ShelfCluster(shelves, [model.name for model in models], policy).run(requests, seconds + 60)
    return Result(
        num_replicas=num_replicas,
        policy=policy,
        rate=rate,
        num_requests=len(requests),
        slo_share=slo_share_of(requests),
        ttft_s=percentiles_of(requests),
        wakes=sum(shelf.num_wakes for shelf in outcome.shelves) / len(requests),
        cold_share=outcome.num_cold / len(requests),
        copies=outcome.mean_copies,
        busy_share=[shelf.busy_s / shelf.ended_at for shelf in outcome.shelves],
        num_preempted=[shelf.num_preempted for shelf in outcome.shelves],
    )


def main() -> None:
    args = parse(__doc__)
    traced, source = read_trace(args.trace)
    print(f"{source}\n{'':36s}requests    SLO   TTFT p50, p99   wakes   cold copies  busy")
    results: list[Result] = []
    figures: dict[str, float] = {}
    for num_replicas in QUICK_SIZES if args.quick else SIZES:
        for load in QUICK_LOADS if args.quick else LOADS:
            for policy in POLICIES:
                run = simulate(
                    num_replicas, policy, load * num_replicas, traced, QUICK_SECONDS if args.quick else SECONDS
                )
                results.append(run)
                busy = " ".join(f"{share:.0%}" for share in run.busy_share)
                print(
                    f"{num_replicas} replicas {run.rate:3g}/s {policy:20s}{run.num_requests:6d}  {run.slo_share:6.1%} "
                    f"{run.ttft_s[0]:7.2f} {run.ttft_s[1]:7.1f}  {run.wakes:5.2f}  {run.cold_share:5.1%} "
                    f"{run.copies:6.2f}  {busy}",
                    flush=True,
                )
                figures |= {
                    f"{name}_{num_replicas}_at_{load:g}_{policy}": float(getattr(run, name))
                    for name in ("slo_share", "wakes", "cold_share", "copies")
                }
    harness.finish("shelf_replicas", args, figures, {"runs": [asdict(result) for result in results]})


if __name__ == "__main__":
    main()
