"""Routing policies on traces in simulated time, and the cost of a decision.

Only the engines' steps are simulated: their time follows from a device's data sheet (`simulator/device.py`). Scheduler,
KV memory, prefix cache, reports, routers and the autoscaling policy are the real ones. A report is sent every second
and arrives a tenth of a second later. There are two routers, each with its own state.

**Routing.** 4, 16, 64 and 256 replicas, and two kinds of requests.

The Mooncake conversation trace on Llama-2-70B on eight A800, the machine of Mooncake's paper: modelled, not measured.
The trace's times are multiples of 3 s. Requests arrive at random times within such a tick: if all arrived at once, no
router could know the others' decisions (a variant does that). The trace is replayed faster or slower, so that each
replica has the same load at every fleet size, that of the trace on 16. 4 replicas get its first part only.

The second kind are sessions of agents (`traffic.agents`): one of eight instructions, a task, and then repeatedly a
tool call, a pause, and the same prompt with the tool's result. They are drawn with a fixed seed, not traced. A turn
begins when the turn before has ended and the tool has returned; larger fleets get more sessions, not faster ones.

Ray's `PrefixCacheAffinityRouter` takes part with its own tree and its decisions (`simulator/ray_affinity.py`), with its
default and with an imbalance threshold of 10 requests; its `KVAwareRouter` with the decisions of Dynamo's service
(`simulator/kv_aware.py`). They know true queues and caches, and all routers share this state; Folio's policies know the
load reports and the requests that their router has sent.

    hit share   prompt tokens found in a replica's cache; also relative to one infinite cache, and to one as large as
                all replicas' together, which sees one request at a time and keeps no outputs.
    load        of the most loaded replica over the mean: the worse of seconds in steps and prompt tokens computed. The
                line of the fleet's size has the same for two placements that look at nothing else and find every
                prefix anywhere: in order of arrival, and with all requests known in advance
                (`single_cache.load_bounds`). With 256 replicas one of the longest prompts is a third of the tokens
                that a replica computes at all, and half of the seconds.
    missed      difference of expected and actual hits, in tokens per request.
    speed       simulated seconds per second of one process; x replicas: replica-seconds per second.

**Variants.** One, two and eight routers; reports every 0.5, 1 and 5 s, and none at all: then prefix_aware must decide
like least_loaded.

**Decision.** `PrefixAware.rank`, and the look-up of the chosen replica's expected hits, with 64 replicas of 100,000
cached blocks each; prompts of 12,000 tokens that continue a cached one.

**Autoscaling.** The Azure code trace at its own times, and in bursts, on Llama-2-13B on one A100 (modelled from a data
sheet, too); replicas take 20 s to start. Compared with the smallest fixed fleet with no more late requests.

`benchmarks.routing_real` measures a real Ray Serve, and the simulator against it.
--sweep varies the weights of `CostWeights` one at a time, on the first requests of the trace. --quick replays 1,000
requests of either kind on 16 replicas, with three policies.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, workloads
from benchmarks.fleet import autoscaling, decision
from benchmarks.fleet import routing_picture as pictures
from benchmarks.simulator import single_cache, traffic
from benchmarks.simulator.device import roofline
from benchmarks.simulator.jobs import KV_AWARE, RAY_POLICIES, Job, Source, Summary, run_all, simulate, single_hit_share
from benchmarks.simulator.ray_affinity import prefix_tree
from folio.app.fleet.cost import CostWeights

DEVICE = roofline(
    "Llama-2-70B on eight A800",
    parameters=70e9,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    flops=8 * 312e12,
    bandwidth=8 * 2.039e12,
    memory_bytes=8 * 80e9,
    unit_tokens=traffic.MOONCAKE_UNIT,
)
OURS = "prefix_aware"
POLICIES = (OURS, "least_loaded", "round_robin", "consistent_hash", *RAY_POLICIES, KV_AWARE)
# The fleet that serves the trace at its own rate; for other fleets the rate is scaled with their size.
USUAL = 16
SIZES = (4, USUAL, 64, 256)
# Of agents' sessions, and of the trace for small fleets: replaying all of it would take as long as for a large fleet,
# without further information.
AGENTS_REQUESTS, SMALL_REQUESTS = 6000, 4000
AGENTS_POLICIES = (OURS, "least_loaded", "consistent_hash", "ray_affinity", KV_AWARE)
QUICK_REQUESTS, VARIANT_REQUESTS, SWEEP_REQUESTS = 1000, 3000, 6000
SWEEP = {"work": (0, 2, 8, 16), "even": (0, 0.5, 2, 4)}
DECISION_REPLICAS, DECISION_BLOCKS, DECISION_PROMPTS = 64, 100_000, 2000

Figures = dict[str, float]


def available(policies: Sequence[str]) -> list[str]:
    """The policies, without Ray's where this Ray lacks them."""
    try:
        prefix_tree()
    except ImportError as error:
        print(f"left out, because it cannot be imported: Ray's prefix tree ({error})")
        return [policy for policy in policies if policy not in RAY_POLICIES]
    return list(policies)


def source_for(path: Path, num_replicas: int, count: int | None) -> Source:
    return Source("chat", path, count, num_replicas / USUAL)


def agents_for(num_replicas: int, count: int) -> Source:
    return Source("agents", count=count, factor=num_replicas / USUAL)


def row(summary: Summary, single: float = 0.0, infinite: float = 0.0) -> str:
    shares = f"{summary.hit_share / infinite:8.3f}{summary.hit_share / single:8.3f}" if single else ""
    return (
        f"{summary.hit_share:8.1%}{shares}{summary.ttft_mean_s:9.2f}{summary.ttft_p50_s:8.2f}{summary.ttft_p99_s:8.2f}"
        f"{summary.busy_max_over_mean:8.3f}{summary.prefill_max_over_mean:8.3f}{summary.missed_tokens:9.0f}"
        f"{summary.speed:8.0f}{summary.replica_speed:9.0f}"
    )


HEAD = "hits    /inf   /one  ttft mean   p50     p99    busy prefill  missed   speed x replicas"
SHORT_HEAD = "hits  ttft mean   p50     p99    busy prefill  missed   speed x replicas"


def compare(sources: Mapping[int, Source], policies: Sequence[str], prefix: str = "") -> tuple[Figures, Any]:
    """Compare all policies at all fleet sizes; names of figures get this prefix."""
    figures: Figures = {}
    raw: list[dict[str, Any]] = []
    tasks: list[Callable[[], Summary | float]] = []
    for n, source in sources.items():
        tasks.append(partial(single_hit_share, source, DEVICE, n))
        tasks += [partial(simulate, Job(policy=p, num_replicas=n, device=DEVICE, source=source)) for p in policies]
    results = run_all(tasks)
    for n, source in sources.items():
        arrivals, single = source.arrivals(), next(results)
        assert isinstance(single, float)
        infinite = single_cache.infinite_hit_share(arrivals, DEVICE.unit_tokens)
        bounds = single_cache.load_bounds(arrivals, DEVICE, n)
        print(
            f"\n{n} replicas, {source.kind}: {len(arrivals)} requests, "
            f"{sum(a.num_tokens for a in arrivals) / len(arrivals):.0f} tokens of prompt on average; hits of one "
            f"cache: {single:.1%}, of an infinite one {infinite:.1%}; load in order of arrival: {bounds[0]:.3f}, known "
            f"in advance: {bounds[1]:.3f}\n{'':17s}{HEAD}"
        )
        summaries: list[Summary] = []
        for result in itertools.islice(results, len(policies)):
            assert isinstance(result, Summary)
            print(f"{result.policy:16s}{row(result, single, infinite)}", flush=True)
            summaries.append(result)
            raw.append(
                asdict(result)
                | {"requests": source.kind, "single_hit_share": single, "infinite_hit_share": infinite}
                | {"load_as_they_come": bounds[0], "load_known_beforehand": bounds[1]}
            )
            raw[-1]["fleet_sizes"] = result.fleet_sizes[-1:]
        suffix = "" if n == USUAL else f"_{n}"
        of_size = figures_of(summaries[0], summaries[1:], single) | {"load_as_they_come": bounds[0]}
        of_size["load_vs_as_they_come"] = of_size["load_max_over_mean"] / bounds[0]
        figures |= {prefix + name + suffix: value for name, value in of_size.items()}
    return figures, raw


def figures_of(ours: Summary, others: Sequence[Summary], single: float) -> Figures:
    figures = {
        "hit_share": ours.hit_share,
        "hit_share_of_single_cache": ours.hit_share / single,
        "ttft_p99_s": ours.ttft_p99_s,
        "p99_ttft_vs_best_other": ours.ttft_p99_s / min(other.ttft_p99_s for other in others),
        "mean_ttft_vs_best_other": ours.ttft_mean_s / min(other.ttft_mean_s for other in others),
        "load_max_over_mean": ours.load_max_over_mean,
        "missed_tokens": ours.missed_tokens,
        "simulator_replica_speed": ours.replica_speed,
    }
    return figures | {f"p99_ttft_vs_{o.policy}": ours.ttft_p99_s / o.ttft_p99_s for o in others}


def vary(path: Path) -> tuple[Figures, Any]:
    """Vary routers and report periods."""
    source = source_for(path, USUAL, VARIANT_REQUESTS)
    base = partial(Job, device=DEVICE, num_replicas=USUAL, source=source)
    jobs = {f"{n} router{'s' * (n > 1)}": base(policy=OURS, num_routers=n) for n in (1, 2, 8)}
    jobs |= {f"reports every {period} s": base(policy=OURS, report_period_s=period) for period in (0.5, 5.0)}
    jobs |= {f"no reports, {p}": base(policy=p, report_period_s=None) for p in (OURS, "least_loaded")}
    stamped = replace(source, as_stamped=True)
    jobs |= {f"as stamped, {p}": base(policy=p, source=stamped) for p in available([OURS, "ray_affinity"])}
    print(f"\nvariants of {OURS}: {USUAL} replicas, the first {VARIANT_REQUESTS} requests\n{'':30s}{SHORT_HEAD}")
    results: dict[str, Summary] = {}
    for name, result in zip(jobs, run_all([partial(simulate, job) for job in jobs.values()]), strict=True):
        results[name] = result
        print(f"{name:29s}{row(result)}", flush=True)
    blind, least = results[f"no reports, {OURS}"], results["no reports, least_loaded"]
    same = (blind.hit_share, blind.ttft_mean_s, blind.num_steps) == (
        least.hit_share,
        least.ttft_mean_s,
        least.num_steps,
    )
    print(f"without reports {OURS} {'does' if same else 'DOES NOT DO'} what least_loaded does")
    return {
        "blind_equals_least_loaded": float(same),
        "p99_ttft_8_routers_vs_1": results["8 routers"].ttft_p99_s / results["1 router"].ttft_p99_s,
        "p99_ttft_5_s_reports_vs_1": results["reports every 5.0 s"].ttft_p99_s / results["2 routers"].ttft_p99_s,
    }, {name: asdict(result) for name, result in results.items()}


def sweep(path: Path) -> Any:
    """Vary each weight by itself, with the defaults of the others."""
    source, default = source_for(path, USUAL, SWEEP_REQUESTS), asdict(CostWeights())
    weights = [default] + [default | {name: value} for name, values in SWEEP.items() for value in values]
    base = partial(Job, policy=OURS, num_replicas=USUAL, device=DEVICE, source=source)
    tasks: list[Callable[[], Summary | float]] = [partial(single_hit_share, source, DEVICE, USUAL)]
    tasks += [partial(simulate, base(weights=CostWeights(**w))) for w in weights]
    others = available(["least_loaded", *RAY_POLICIES, KV_AWARE])
    tasks += [partial(simulate, base(policy=policy)) for policy in others]
    results = run_all(tasks)
    single = next(results)
    assert isinstance(single, float)
    infinite = single_cache.infinite_hit_share(source.arrivals(), DEVICE.unit_tokens)
    print(f"\nweights, {USUAL} replicas, the first {SWEEP_REQUESTS} requests; one cache: {single:.1%}\n{'':40s}{HEAD}")
    names = [changed(default, w) for w in weights] + others
    raw = []
    for name, summary in zip(names, results, strict=True):
        assert isinstance(summary, Summary)
        print(f"{name:39s}{row(summary, single, infinite)}", flush=True)
        raw.append(asdict(summary) | {"weights": name})
    return raw


def changed(default: Mapping[str, float], weights: Mapping[str, float]) -> str:
    different = [f"{name} {value:g}" for name, value in weights.items() if value != default[name]]
    return ", ".join(different) or "as it is: " + ", ".join(f"{name} {value:g}" for name, value in default.items())


def decide(cached_blocks: int, num_prompts: int) -> Figures:
    cost = decision.measure(DECISION_REPLICAS, cached_blocks, num_prompts)
    print(
        f"\na decision among {DECISION_REPLICAS} replicas with {cached_blocks} cached blocks each, reports of "
        f"{cost.report_keys} keys, median of {num_prompts}: {cost.decision_us:.0f} us\n  beside it, hashing the prompt "
        f"{cost.hash_us:.0f} us, noting that it was sent and is over {cost.sent_us:.0f} us; taking in a replica's "
        f"first report {cost.first_report_us:.0f} us, a later one {cost.report_us:.0f} us; all that is known "
        f"{cost.known_bytes / 1e6:.0f} MB"
    )
    return {
        "decision_us": cost.decision_us,
        "hash_us": cost.hash_us,
        "sent_us": cost.sent_us,
        "report_us": cost.report_us,
        "directory_mb": cost.known_bytes / 1e6,
    }


def main() -> None:
    args = parse()
    harness.note_missing(args.trace, args.azure_trace)
    raw: dict[str, Any] = {}
    if args.quick:
        chat = {USUAL: source_for(args.trace, USUAL, QUICK_REQUESTS)}
        agents = {USUAL: agents_for(USUAL, QUICK_REQUESTS)}
        policies = agents_policies = available([OURS, "least_loaded", KV_AWARE])
    else:
        chat = {n: source_for(args.trace, n, None if n >= USUAL else SMALL_REQUESTS) for n in args.replicas}
        agents = {n: agents_for(n, AGENTS_REQUESTS) for n in args.replicas}
        policies, agents_policies = available(POLICIES), available(AGENTS_POLICIES)
    figures, raw["routing"] = compare(chat, policies)
    more, raw["agents"] = compare(agents, agents_policies, "agents_")
    figures |= more
    if not args.quick:
        variants, raw["variants"] = vary(args.trace)
        figures |= variants
    if args.sweep:
        raw["sweep"] = sweep(args.trace)
    scaling, raw["autoscaling"] = autoscaling.measure(args.azure_trace, quick=args.quick)
    figures |= scaling
    figures |= decide(DECISION_BLOCKS // (10 if args.quick else 1), DECISION_PROMPTS // (4 if args.quick else 1))
    harness.finish("routing", args, figures, raw, pictures.draw)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--trace", type=Path, default=traffic.MOONCAKE_TRACE, help="of conversations, JSON lines")
    parser.add_argument("--azure-trace", type=Path, default=workloads.AZURE_TRACE, help="of code completions, CSV")
    parser.add_argument("--replicas", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--sweep", action="store_true", help="vary the weights of the cost")
    return parser.parse_args()


if __name__ == "__main__":
    main()
