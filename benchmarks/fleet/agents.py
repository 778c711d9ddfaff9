"""Sessions that pause and come back: which cached prefixes are evicted meanwhile.

Three eviction orders: least recently used (LRU), Folio's (`folio.vmem.ReturnOrder`), and the optimal one (Belady 1966),
which knows the future. All drive the real `KVMemory`; contents do not exist, and blocks are 512 tokens.

**Replay.** The requests of a trace one at a time, in order, so that all orders see the same uses and the optimal one is
exact. Each order at several sizes of the cache.

    hits      prompt tokens found in the cache, and their share of the optimal order's
    harmful   evicted blocks that a later prompt needs, over those of LRU

    agents        `traffic.agents`: every turn but a session's last one calls a tool; drawn from three seeds
    agents blind  the same, and nobody tells how a turn ended: completions, or syntaxes that are not known
    mixed         `sessions.sessions`: a quarter agents, whose users may go on after an answer, a quarter chats, and
                  completions that never return; three seeds
    chat          Mooncake's conversations, whose turns nobody tells apart, from request 5,000 on

The order's constants were chosen on other seeds, and on Mooncake's first 5,000 requests.

**Sessions.** Agents on one simulated replica (`simulator.replica`: the real scheduler, too): Llama-3-8B on one H100 by
its data sheet, at several rates. A turn begins when the turn before has ended and the tool has returned. The optimal
order knows when each session in progress goes on. TTFT of the turns after the first, and the time of whole sessions.

`benchmarks.agents_real` has sessions on a real server. --quick replays fewer requests of one seed, at one size each.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.picture import LIMIT, OURS, RIVALS, picture
from benchmarks.simulator import traffic
from benchmarks.simulator.cache_replay import ORDERS, Replayed, replay
from benchmarks.simulator.device import roofline
from benchmarks.simulator.eviction_orders import LeastRecentlyUsed, Optimal
from benchmarks.simulator.jobs import run_all
from benchmarks.simulator.sessions import sessions
from benchmarks.simulator.single_replica import Schedule, run

DEVICE = roofline(
    "Llama-3-8B on one H100",
    parameters=8e9,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    flops=989e12,
    bandwidth=3.35e12,
    memory_bytes=80e9,
    unit_tokens=traffic.MOONCAKE_UNIT,
)
SEEDS = (11, 12, 13)
# New sessions: of `traffic.agents` as a factor of its rate, of `sessions` a second.
AGENTS_FACTOR, MIXED_PER_S = 1 / 4, 0.5
# Of `traffic.agents` on one replica: from few sessions to more than it can serve. Figures without a suffix are of the
# second one.
FACTORS = (0.05, 0.06, 0.07)
REQUESTS, SESSION_REQUESTS, QUICK_REQUESTS = 3000, 1500, 500
# Mooncake's requests on which constants were chosen.
CHAT_FROM = 5000
SIZES = {"agents": (0.25, 0.5, 1.0), "mixed": (0.25, 0.5, 1.0), "chat": (1.0, 2.0, 4.0)}  # million tokens
# The size that is the device's, where figures without a suffix are taken.
USUAL = {"agents": 0.5, "mixed": 0.5, "chat": 2.0}

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Workload:
    """A list of requests that another process can make: a name of `SIZES`, a seed, and the number of requests."""

    name: str
    seed: int
    count: int
    trace: Path
    is_blind: bool = False

    def arrivals(self) -> list[traffic.Arrival]:
        if self.name == "chat":
            drawn = traffic.mooncake(self.trace)[CHAT_FROM:][: self.count] if self.trace.is_file() else None
            return drawn or traffic.conversations(self.count, self.seed)
        if self.name == "mixed":
            return sessions(self.count, MIXED_PER_S, self.seed)
        drawn = traffic.agents(self.count, AGENTS_FACTOR, self.seed)
        return [replace(arrival, kind="") for arrival in drawn] if self.is_blind else drawn


def replay_one(workload: Workload, order: str, million_tokens: float) -> Replayed:
    return replay(workload.arrivals(), order, DEVICE, int(million_tokens * 1e6))


def compare(workloads: Sequence[Workload], title: str, sizes: Sequence[float]) -> tuple[dict[float, Figures], Any]:
    """Replay workloads in each order at each size; returns figures by size, means over the workloads."""
    tasks: list[Callable[[], Replayed]] = [
        partial(replay_one, workload, order, size) for size in sizes for workload in workloads for order in ORDERS
    ]
    results = run_all(tasks)
    figures: dict[float, Figures] = {}
    raw = []
    print(f"\n{title}\n{'million tokens':>16s}{'infinite':>10s}" + "".join(f"{order:>26s}" for order in ORDERS))
    for size in sizes:
        runs: dict[str, list[Replayed]] = {order: [] for order in ORDERS}
        for workload in workloads:
            for order in ORDERS:
                runs[order].append(next(results))
                raw.append({"name": title, "seed": workload.seed, "million_tokens": size} | asdict(runs[order][-1]))
        hits = {order: statistics.fmean(run.hit_share for run in of) for order, of in runs.items()}
        harmful = {order: sum(run.num_harmful for run in of) for order, of in runs.items()}
        columns = [
            f"{hits[order]:8.1%} {hits[order] / hits['optimal']:7.3f} {harmful[order] / max(harmful['lru'], 1):7.3f}"
            for order in ORDERS
        ]
        infinite = statistics.fmean(run.infinite_hit_share for run in runs["lru"])
        print(f"{size:16.2f}{infinite:10.1%}" + "".join(f"{column:>26s}" for column in columns), flush=True)
        figures[size] = {
            "hit_share": hits["folio"],
            "hit_share_lru": hits["lru"],
            "hit_share_vs_optimal": hits["folio"] / hits["optimal"],
            "lru_hit_share_vs_optimal": hits["lru"] / hits["optimal"],
            "harmful_evictions_vs_lru": harmful["folio"] / max(harmful["lru"], 1),
            "optimal_harmful_evictions_vs_lru": harmful["optimal"] / max(harmful["lru"], 1),
        }
    return figures, raw


@dataclass(frozen=True, slots=True)
class Sessions:
    """A run of whole sessions, seconds of simulated time."""

    order: str
    seed: int
    factor: float
    hit_share: float
    next_turn_ttft_s: float
    next_turn_ttft_p90_s: float
    session_s: float


def serve_one(order: str, seed: int, count: int, factor: float) -> Sessions:
    arrivals = traffic.agents(count, factor, seed)
    schedule = Schedule(arrivals)
    orders = {"lru": LeastRecentlyUsed(), "optimal": Optimal(schedule.next_use)}
    served = run(schedule, DEVICE, orders.get(order))
    next_turns = sorted(s.ttft_s for s in served if s.arrival.follows is not None)
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    for s in served:
        assert s.ended_at is not None
        name = s.arrival.session or ""
        begun.setdefault(name, s.arrival.at)
        ended[name] = max(ended.get(name, 0.0), s.ended_at)
    return Sessions(
        order,
        seed,
        factor,
        sum(s.cached_tokens for s in served) / sum(s.arrival.num_tokens for s in served),
        statistics.fmean(next_turns),
        next_turns[int(0.9 * len(next_turns))],
        statistics.fmean(ended[name] - begun[name] for name in begun),
    )


def serve(seeds: Sequence[int], count: int, factors: Sequence[float]) -> tuple[Figures, Any]:
    """Whole sessions on one replica, at each rate: means over the seeds."""
    tasks = [partial(serve_one, order, seed, count, factor) for factor in factors for seed in seeds for order in ORDERS]
    results = list(run_all(tasks))
    figures: Figures = {}
    print(f"\nsessions of agents on {DEVICE.name}, a cache of {DEVICE.cache_tokens} tokens")
    print(f"{'a minute':>8s} {'':10s}{'hits':>8s}{'next turn: TTFT mean':>22s}{'p90':>8s}{'session':>10s}")
    for factor in factors:
        mean = {
            order: {
                key: statistics.fmean(
                    getattr(run, key) for run in results if (run.order, run.factor) == (order, factor)
                )
                for key in ("hit_share", "next_turn_ttft_s", "next_turn_ttft_p90_s", "session_s")
            }
            for order in ORDERS
        }
        for order, of in mean.items():
            print(
                f"{60 * factor * traffic.SESSIONS_PER_S:8.1f} {order:10s}{of['hit_share']:8.1%}"
                f"{of['next_turn_ttft_s']:20.3f} s{of['next_turn_ttft_p90_s']:6.2f} s{of['session_s']:8.1f} s"
            )
        ours, lru, best = mean["folio"], mean["lru"], mean["optimal"]
        suffix = "" if factor == FACTORS[1] else f"_at_{factor:g}"
        figures |= {
            f"next_turn_ttft_s{suffix}": ours["next_turn_ttft_s"],
            f"next_turn_ttft_vs_lru{suffix}": ours["next_turn_ttft_s"] / lru["next_turn_ttft_s"],
            f"optimal_next_turn_ttft_vs_lru{suffix}": best["next_turn_ttft_s"] / lru["next_turn_ttft_s"],
            f"session_vs_lru{suffix}": ours["session_s"] / lru["session_s"],
        }
    return figures, [asdict(run) for run in results]


def main() -> None:
    args = parse()
    seeds, count = (SEEDS[:1], QUICK_REQUESTS) if args.quick else (SEEDS, REQUESTS)
    harness.note_missing(args.trace)
    drawn = [Workload("agents", seed, count, args.trace) for seed in seeds]
    groups = {
        "": drawn,
        "blind_": [replace(workload, is_blind=True) for workload in drawn],
        "mixed_": [replace(workload, name="mixed") for workload in drawn],
        "chat_": [Workload("chat", 0, count if args.quick else 10**6, args.trace)],
    }
    figures: Figures = {}
    raw: dict[str, Any] = {"replays": []}
    for prefix, workloads in groups.items():
        title, name = prefix.rstrip("_") or "agents", workloads[0].name
        by_size, runs = compare(workloads, title, (USUAL[name],) if args.quick else SIZES[name])
        raw["replays"] += runs
        for size, of in by_size.items():
            suffix = "" if size == USUAL[name] else f"_{size:g}m"
            figures |= {f"{prefix}{key}{suffix}": value for key, value in of.items()}
    more, raw["sessions"] = serve(
        seeds, count if args.quick else SESSION_REQUESTS, FACTORS[1:2] if args.quick else FACTORS
    )
    figures |= more
    harness.finish("agents", args, figures, raw, draw)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Hits of each order by the size of the cache, for each workload."""
    styles = {
        "optimal": ("optimal", LIMIT, "--"),
        "folio": ("Folio", OURS[0], "-"),
        "lru": ("least recently used", RIVALS[0], "-"),
    }
    names = list(dict.fromkeys(run["name"] for run in result["raw"]["replays"]))
    with picture(result, path, "Cached prefixes that come back", rows=2, columns=2, height=5.6) as (figure, plots):
        for plot, name in zip(plots, names, strict=True):
            runs = [run for run in result["raw"]["replays"] if run["name"] == name]
            sizes = sorted({run["million_tokens"] for run in runs})
            for order, (label, colour, line) in styles.items():
                of = [[r["hit_share"] for r in runs if (r["order"], r["million_tokens"]) == (order, n)] for n in sizes]
                plot.plot(sizes, [100 * statistics.fmean(h) for h in of], line, marker="o", color=colour, label=label)
            plot.set(title=name, xlabel="cache, million tokens", ylabel="prompt tokens found, %", ylim=(0, None))
        handles, labels = plots[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--trace", type=Path, default=traffic.MOONCAKE_TRACE, help="of conversations, JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
