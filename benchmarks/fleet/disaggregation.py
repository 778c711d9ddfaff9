"""Prefill apart from decode, against replicas that do both, at equal devices, in simulated time.

Only the engines' steps and the transfers of blocks are simulated (`simulator/device.py`, `simulator/transfers.py`).
Scheduler, KV memory, router and roles (`folio.app.fleet.roles`) are the real ones.

**Goodput** (DistServe, OSDI 2024): the highest load, in requests a second and replica, at which nine of ten requests
meet both limits: TTFT, and TPOT, the mean time of the tokens after the first, with the pause of the move in it.
Interpolated between the loads of the sweep.

**Candidates.** Mixed replicas with chunked prefill: at most 256 or 512 tokens a step, and Folio's own bound of mixed
steps (`max_mixed_step_s`) at 30 ms and by default. Roles: every ratio of 4 replicas, every second one of 8. The best of
either kind counts, for each pair of limits by itself.

**Requests.** The Mooncake conversations ("chat": prompts of 12,000 tokens, answers of 340), TTFT within 3 s, and the
Azure code completions ("code": 2,000 and 28), TTFT within 0.5 s; arrivals faster or slower than in the trace.

**Devices.** 4 H200, and 8 for chat, with Llama-3-8B's shape, by the data sheet; links of 50 GB/s for each, and each
step's blocks sent while the next step computes the prompt's next tokens, as Folio does. Variants, of chat on 4
replicas: slower links; steps of up to 8,192 tokens instead of 2,048; nothing sent before the first token; prompts of
which a decode replica lacks little are computed there; steps that read weights while they multiply, so that chunks cost
less beside decodes; 70B's shape on replicas of 8 devices each, with eight links.

--quick: one load and two candidates of either kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from benchmarks import harness, workloads
from benchmarks.simulator import traffic
from benchmarks.simulator.cluster import Cluster
from benchmarks.simulator.device import Device, roofline
from benchmarks.simulator.jobs import Source, policy_maker, run_all
from benchmarks.simulator.transfers import Link
from folio.app.fleet.roles import Roles

H200 = partial(roofline, flops=989e12, bandwidth=4.8e12, memory_bytes=141e9, unit_tokens=traffic.MOONCAKE_UNIT)
DEVICE = H200("Llama-3-8B on one H200", parameters=8e9, layers=32, heads=32, kv_heads=8, head_dim=128)
LINK = Link(bytes_per_s=50e9, token_bytes=4 * 32 * 8 * 128)
DEVICE_70B = roofline(
    "Llama-3-70B on eight H200",
    parameters=70e9,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    flops=8 * 989e12,
    bandwidth=8 * 4.8e12,
    memory_bytes=8 * 141e9,
    unit_tokens=traffic.MOONCAKE_UNIT,
)
LINK_70B = Link(bytes_per_s=8 * 50e9, token_bytes=4 * 80 * 8 * 128)
# The Azure trace's prompts have no common prefixes; blocks of fewer tokens than its prompts.
CODE_UNIT = 128

Kind = Literal["chat", "code"]
TTFT_S: Mapping[Kind, float] = {"chat": 3.0, "code": 0.5}
TPOT_S = (0.015, 0.03, 0.06)
ATTAINED = 0.9
LOADS: Mapping[Kind, Sequence[float]] = {
    "chat": (0.2, 0.4, 0.6, 0.8, 1.0, 1.2),
    "code": (0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
}
REQUESTS = 800
# A candidate is not run at higher loads when fewer requests than this meet the loosest limits.
HOPELESS = 0.6
SLOW_LINKS = (12.5e9, 3e9, 1e9)
USUAL = slice(1, None)  # ratios of 4 replicas without the one that computes too few prompts
LEAST_TOKENS = 1024
# Of steps that compute prompts only: long enough for products, short enough that a part of a prompt is sent early.
STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Replicas that serve the requests.

    Attributes:
        num_prefill: replicas that compute prompts only; 0: all do both.
        least_tokens: see `ByRole`.
    """

    name: str
    device: Device
    num_replicas: int
    num_prefill: int = 0
    link: Link | None = None
    least_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate at a load, in requests a second and replica. `attained`: shares of requests within the limits, by
    `TPOT_S`."""

    load: float
    attained: tuple[float, ...]
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    num_requests: int


def sweep(candidate: Candidate, kind: Kind, loads: Sequence[float], count: int) -> list[Point]:
    """The candidate at rising loads."""
    points: list[Point] = []
    for load in loads:
        points.append(measure(candidate, kind, load, count))
        if points[-1].attained[-1] < HOPELESS:
            break
    return points


def measure(candidate: Candidate, kind: Kind, load: float, count: int) -> Point:
    path = traffic.MOONCAKE_TRACE if kind == "chat" else workloads.AZURE_TRACE
    arrivals = Source(kind, path, count).arrivals()
    own = len(arrivals) / arrivals[-1].at
    device = candidate.device if kind == "chat" else replace(candidate.device, unit_tokens=CODE_UNIT)
    roles = Roles(candidate.num_prefill / candidate.num_replicas) if candidate.num_prefill else None
    cluster = Cluster(
        device,
        candidate.num_replicas,
        policy_maker("prefix_aware", device),
        roles=roles,
        link=candidate.link if roles is not None else None,
        least_tokens=candidate.least_tokens,
    )
    served = cluster.run(list(traffic.faster(arrivals, load * candidate.num_replicas / own))).served
    ttfts, tpots = [s.ttft_s for s in served], [s.tpot_s for s in served]
    attained = tuple(
        sum(ttft <= TTFT_S[kind] and tpot <= limit for ttft, tpot in zip(ttfts, tpots, strict=True)) / len(served)
        for limit in TPOT_S
    )
    (ttft_p50, ttft_p90), (tpot_p50, tpot_p90) = (
        [harness.percentile(values, percent) for percent in (50, 90)] for values in (ttfts, tpots)
    )
    return Point(load, attained, ttft_p50, ttft_p90, tpot_p50, tpot_p90, len(served))


def goodput(points: Sequence[Point], limit: int) -> float:
    """The load up to which enough requests are within the limits, between the loads of the sweep."""
    before = Point(0.0, (1.0,) * len(TPOT_S), 0.0, 0.0, 0.0, 0.0, 0)
    for point in points:
        high, low = before.attained[limit], point.attained[limit]
        if low < ATTAINED:
            return before.load + (point.load - before.load) * (high - ATTAINED) / (high - low)
        before = point
    return before.load


def mixed(device: Device, num_replicas: int) -> list[Candidate]:
    """Replicas that do both, with chunked prefill."""
    by_chunk = {f"{n} tokens a step": replace(device, step_tokens=n) for n in (256, 512)}
    by_time = {f"steps of {s:g} s": replace(device, max_mixed_step_s=s) for s in (0.03, 0.25)}
    return [
        Candidate(name=f"mixed, {name}", device=of, num_replicas=num_replicas)
        for name, of in (by_chunk | by_time).items()
    ]


def by_role(
    device: Device, num_replicas: int, link: Link = LINK, least_tokens: int = 0, step_tokens: int = STEP_TOKENS
) -> list[Candidate]:
    """Replicas with roles, in every ratio."""
    device = replace(device, step_tokens=step_tokens)
    base = partial(Candidate, device=device, num_replicas=num_replicas, link=link, least_tokens=least_tokens)
    return [base(name=f"{n} prefill, {num_replicas - n} decode", num_prefill=n) for n in range(1, num_replicas)]


def cases() -> dict[str, tuple[Kind, list[Candidate]]]:
    """By the suffix of their figures. Variants of roles alone are compared with the mixed replicas of "chat"."""
    both = replace(DEVICE, overlaps=True)
    found: dict[str, tuple[Kind, list[Candidate]]] = {
        kind: (kind, mixed(DEVICE, 4) + by_role(DEVICE, 4)) for kind in ("chat", "code")
    }
    found["chat_8"] = "chat", mixed(DEVICE, 8) + by_role(DEVICE, 8)[1::2]
    found["chat_70b"] = "chat", mixed(DEVICE_70B, 4) + by_role(DEVICE_70B, 4, LINK_70B)[USUAL]
    found["chat_overlapped"] = "chat", mixed(both, 4) + by_role(both, 4)[USUAL]
    for rate in SLOW_LINKS:
        found[f"chat_link_{rate / 1e9:g}"] = "chat", by_role(DEVICE, 4, replace(LINK, bytes_per_s=rate))[USUAL]
    found["chat_long_steps"] = "chat", by_role(DEVICE, 4, step_tokens=DEVICE.step_tokens)[USUAL]
    found["chat_after"] = "chat", by_role(DEVICE, 4, replace(LINK, overlaps=False))[USUAL]
    found["chat_direct"] = "chat", by_role(DEVICE, 4, least_tokens=LEAST_TOKENS)[USUAL]
    return found


def quick_cases() -> dict[str, tuple[Kind, list[Candidate]]]:
    return {"chat": ("chat", mixed(DEVICE, 4)[:1] + by_role(DEVICE, 4)[1:2])}


def compare(name: str, results: Mapping[Candidate, list[Point]], best_mixed: Sequence[float]) -> dict[str, float]:
    """Figures of a case: the best of its roles, over the best of its mixed replicas, or of those given."""
    print(f"\n{name}{'':12s}" + "".join(f"{f'within {s * 1000:g} ms':>16s}" for s in TPOT_S) + "   TPOT p90 at loads")
    figures: dict[str, float] = {}
    best: dict[str, list[float]] = {"mixed": list(best_mixed), "roles": [0.0] * len(TPOT_S)}
    for candidate, points in results.items():
        found = [goodput(points, i) for i in range(len(TPOT_S))]
        kind = "roles" if candidate.num_prefill else "mixed"
        best[kind] = [max(pair) for pair in zip(best[kind], found, strict=True)]
        tails = ", ".join(f"{p.load:g}: {p.tpot_p90_s * 1000:.0f}" for p in points[-3:])
        print(f"  {candidate.name:24s}" + "".join(f"{value:12.2f}/s  " for value in found) + f"   {tails} ms")
    for i, limit in enumerate(TPOT_S):
        ms = f"{limit * 1000:g}ms"
        figures |= {f"goodput_{kind}_{name}_{ms}": values[i] for kind, values in best.items()}
        if best["mixed"][i]:
            figures[f"goodput_vs_mixed_{name}_{ms}"] = best["roles"][i] / best["mixed"][i]
    return figures


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    harness.note_missing(traffic.MOONCAKE_TRACE, workloads.AZURE_TRACE)
    chosen = quick_cases() if args.quick else cases()
    count = 300 if args.quick else REQUESTS
    tasks = [
        partial(sweep, candidate, kind, (0.7,) if args.quick else LOADS[kind], count)
        for kind, candidates in chosen.values()
        for candidate in candidates
    ]
    results = run_all(tasks)
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    for name, (_, candidates) in chosen.items():
        found = dict(zip(candidates, itertools.islice(results, len(candidates)), strict=True))
        known = [figures.get(f"goodput_mixed_chat_{limit * 1000:g}ms", 0.0) for limit in TPOT_S]
        figures |= compare(name, found, [0.0] * len(TPOT_S) if any(not c.num_prefill for c in candidates) else known)
        raw[name] = {candidate.name: [asdict(point) for point in points] for candidate, points in found.items()}
    harness.finish("disaggregation", args, figures, raw)


if __name__ == "__main__":
    main()
