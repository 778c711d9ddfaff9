"""Sixty models on one simulated H100: the real arbiter, a static split, and one model at a time.

Models have the shapes of `SHAPES`, drawn at random; step times are a roofline of the device's data sheet. Requests are
those of a trace of production traffic (`--trace`, ServeGen's clients): each model's are those of one client, beginning
at another time of the trace, so that models of the same client are not busy together. Which client a model has is drawn
at random; every client has two or three models. Loads are this traffic, stretched or compressed in time. Prompts share
no prefix.

The arbiter, the arrival histories and the turns of the step thread are the real ones. Weights are copied from the host
at 50 GB/s (assumed; PCIe 5.0 has 63), one model after the other and beside steps; each 16 MiB handle is mapped and
unmapped in the time measured on an H200 (`benchmarks/results/cuda/mapping.json`), and is taken over without being made
anew. One model at a time starts a process, in 10 s.

- a static split: the models with most requests whose weights fit, each with an equal part of the rest for its KV cache
- one model at a time, as llama-swap does: a request of another model waits for those that run, and for a process
- the same with Folio's wakes instead of processes
- Folio's arbiter

A request meets its targets (SLO) with its first token within 1 s, and the others within 100 ms each on average.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.fleet.shelf_models import TRACE, TracedRequest, read_requests
from benchmarks.picture import OURS, RIVALS, legend_below, picture
from benchmarks.simulator.device import Device, roofline
from benchmarks.simulator.shelf import MemoryPolicy, ShelfOutcome, ShelfSimulation, by_model
from benchmarks.simulator.shelf_model import ShelfModel, ShelfRequest
from benchmarks.simulator.shelf_policies import OneAtATime, StaticSplit
from benchmarks.simulator.traffic import lognormal
from folio.app.config.shelf import SLO
from folio.app.shelf.arbiter import Arbiter

NUM_MODELS, SEED = 60, 0
# Billions of parameters, layers, heads, KV heads, dimension of heads; and how many models of ten have the shape.
SHAPES = (
    (1.2, 16, 32, 8, 64, 3),  # Llama-3.2-1B
    (3.2, 28, 24, 8, 128, 3),  # Llama-3.2-3B
    (8.0, 32, 32, 8, 128, 3),  # Llama-3.1-8B
    (14.8, 48, 40, 8, 128, 1),  # Qwen2.5-14B
)
# Of an H100 SXM: memory for weights and KV caches (the rest of 80 GB is workspace), peaks a second.
CAPACITY_BYTES, FLOPS, BANDWIDTH = 72 * 10**9, 989e12, 3.35e12
# Of wakes: bytes a second from the host, bytes of a handle, seconds to map and to unmap one in runs of 16
# (`map_again_us_16384kib_x16`, `unmap_us_16384kib_x16`); start of a process.
PCIE, HANDLE_BYTES, MAP_S, UNMAP_S, PROCESS_S = 50e9, 16 << 20, 23.7e-6, 15.5e-6, 10.0
SLO_S = SLO()
# Requests a second, and seconds of a run.
LOADS, QUICK_LOADS, SECONDS, QUICK_SECONDS = (0.5, 1.0, 2.0), (1.0,), 600.0, 120.0


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `ttft_s`: 50th and 99th percentile, of all and by thirds of the models, the most popular first."""

    policy: str
    rate: float
    num_requests: int
    slo_share: float
    slo_share_of_models: float
    ttft_s: list[tuple[float, float]]
    num_wakes: int
    num_sleeps: int
    num_preempted: int
    wake_s: float
    busy_share: float
    timeline: list[tuple[float, int, int, int]]


def make_models(seed: int = SEED) -> list[ShelfModel]:
    rng, shapes = random.Random(seed), [shape for shape in SHAPES for _ in range(shape[-1])]
    return [_model(f"m{i:02d}", *shapes[rng.randrange(len(shapes))][:-1]) for i in range(NUM_MODELS)]


def _model(name: str, billions: float, layers: int, heads: int, kv_heads: int, head_dim: int) -> ShelfModel:
    device: Device = roofline(
        name,
        parameters=billions * 1e9,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        flops=FLOPS,
        bandwidth=BANDWIDTH,
        memory_bytes=80e9,
        unit_tokens=16,
    )
    weight_bytes = int(2e9 * billions)
    num_handles = -(-weight_bytes // HANDLE_BYTES)
    return ShelfModel(
        name=name,
        device=device,
        weight_bytes=weight_bytes,
        kv_token_bytes=4 * layers * kv_heads * head_dim,
        load_s=weight_bytes / PCIE + num_handles * MAP_S,
        sleep_s=num_handles * UNMAP_S,
        ttft_s=SLO_S.ttft_s,
        tpot_s=SLO_S.tpot_s,
    )


def read_trace(path: Path) -> tuple[list[TracedRequest], str]:
    """The requests of a trace, or, without the file, Poisson arrivals with rates that fall with the rank."""
    if path.is_file():
        return read_requests(path), path.name
    rng, lasts_s = random.Random(SEED), 3 * 3600.0
    drawn = [(rng.random() * lasts_s, rank) for rank in range(24) for _ in range(1800 // (rank + 1))]
    return [
        TracedRequest(at_s, f"model-{rank:02}", lognormal(rng, 605, 1.5), lognormal(rng, 152, 1.0))
        for at_s, rank in sorted(drawn)
    ], "synthetic: Poisson arrivals, 1,800 requests in 3 hours ÷ rank, because there is no trace"


def make_requests(
    traced: Sequence[TracedRequest], rate: float, seconds: float, *, seed: int = SEED, begin: float = 0.0
) -> list[ShelfRequest]:
    """Requests of all models at this mean rate, in order of arrival.

    Args:
        begin: share of the trace's time that is left out before them.
    """
    rng, clients = random.Random(seed), sorted({request.model for request in traced})
    lasts_s = max(request.at_s for request in traced)
    drawn = clients * (NUM_MODELS // len(clients)) + rng.sample(clients, NUM_MODELS % len(clients))
    rng.shuffle(drawn)
    rows = []
    for i, client in enumerate(drawn):
        shift_s = rng.uniform(0, lasts_s)
        for request in traced:
            if request.model == client:
                at_s = (request.at_s + shift_s) % lasts_s
                rows.append((at_s, f"m{i:02d}", request.prompt_tokens, request.output_tokens))
    stretch = len(rows) / lasts_s / rate
    begin_s = begin * lasts_s
    requests = [
        ShelfRequest(model, (at_s - begin_s) * stretch, prompt, output) for at_s, model, prompt, output in sorted(rows)
    ]
    return [request for request in requests if 0 <= request.at < seconds]


def best_split(models: Sequence[ShelfModel], requests: Sequence[ShelfRequest]) -> StaticSplit:
    """The models with most requests that fit, each with KV memory for its longest request at least."""
    by_name = {model.name: model for model in models}
    chosen: list[ShelfModel] = []
    least_bytes = 0
    for name, own in by_model(requests).items():
        model = by_name[name]
        longest_bytes = max(r.num_tokens + r.num_output_tokens + 16 for r in own) * model.kv_token_bytes
        weights = sum(m.weight_bytes for m in chosen) + model.weight_bytes
        least = max(least_bytes, longest_bytes)
        if weights + least * (len(chosen) + 1) <= CAPACITY_BYTES:
            chosen.append(model)
            least_bytes = least
    rest = CAPACITY_BYTES - sum(model.weight_bytes for model in chosen)
    return StaticSplit(CAPACITY_BYTES, {model.name: rest // len(chosen) for model in chosen})


def simulate(name: str, rate: float, traced: Sequence[TracedRequest], seconds: float) -> Result:
    models, requests = make_models(), make_requests(traced, rate, seconds)
    policy: MemoryPolicy
    if name == "static":
        policy = best_split(models, requests)
    elif name == "folio":
        policy = Arbiter(CAPACITY_BYTES)
    else:
        policy = OneAtATime(CAPACITY_BYTES)
        if name == "process":
            models = [replace(model, load_s=PROCESS_S) for model in models]
    outcome = ShelfSimulation(models, policy).run(requests, until_s=seconds + 60)
    return _result(name, rate, outcome)


def _result(name: str, rate: float, outcome: ShelfOutcome) -> Result:
    own = list(by_model(outcome.requests).values())
    third = -(-len(own) // 3)
    groups = [outcome.requests, *([r for rs in own[i : i + third] for r in rs] for i in range(0, len(own), third))]
    return Result(
        policy=name,
        rate=rate,
        num_requests=len(outcome.requests),
        slo_share=slo_share_of(outcome.requests),
        slo_share_of_models=sum(map(slo_share_of, own)) / len(own),
        ttft_s=[percentiles_of(group) for group in groups],
        num_wakes=outcome.num_wakes,
        num_sleeps=outcome.num_sleeps,
        num_preempted=outcome.num_preempted,
        wake_s=outcome.wake_s,
        busy_share=outcome.busy_s / outcome.ended_at,
        timeline=outcome.timeline,
    )


def slo_share_of(requests: Sequence[ShelfRequest]) -> float:
    return sum(r.ttft_s <= SLO_S.ttft_s and r.tpot_s <= SLO_S.tpot_s for r in requests) / len(requests)


def percentiles_of(requests: Sequence[ShelfRequest]) -> tuple[float, float]:
    """Of the time to first token; a request without one counts as an hour."""
    times = sorted(min(request.ttft_s, 3600.0) for request in requests)
    return times[len(times) // 2], times[len(times) * 99 // 100]


NAMES = {
    "folio": "Folio's arbiter",
    "static": "static split",
    "process": "one process at a time",
    "swap": "one at a time, Folio's wakes",
}


def main() -> None:
    args = parse(__doc__)
    traced, source = read_trace(args.trace)
    print(f"{NUM_MODELS} models, {sum(m.weight_bytes for m in make_models()) / 1e9:.0f} GB of weights; {source}")
    print(f"{'':44s}  SLO  models   TTFT p50, p99: all, then by popularity{'':32s}wakes sleeps preempted  wake s  busy")
    results = []
    seconds = QUICK_SECONDS if args.quick else SECONDS
    for rate in QUICK_LOADS if args.quick else LOADS:
        for name in NAMES:
            results.append(result := simulate(name, rate, traced, seconds))
            ttft = "  ".join(f"{p50:7.2f} {p99:7.1f}" for p50, p99 in result.ttft_s)
            print(
                f"{rate:4g}/s {NAMES[name]:30s}{result.num_requests:6d}  {result.slo_share:6.1%} "
                f"{result.slo_share_of_models:6.1%}  {ttft}  {result.num_wakes:6d} {result.num_sleeps:6d} "
                f"{result.num_preempted:6d} {result.wake_s:7.0f} {result.busy_share:6.1%}",
                flush=True,
            )
    raw = {"runs": [_as_dict(result) for result in results]}
    harness.finish("shelf_simulated", args, figures_of(results), raw, draw)


def _as_dict(result: Result) -> dict[str, Any]:
    step = -(-len(result.timeline) // 300)
    fields = {name: getattr(result, name) for name in Result.__slots__}
    timeline = result.timeline[::step] if result.policy == "folio" else []
    return fields | {"timeline": timeline}


def figures_of(results: Sequence[Result]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for rate in dict.fromkeys(result.rate for result in results):
        runs = {result.policy: result for result in results if result.rate == rate}
        ours, suffix = runs["folio"], f"_at_{rate:g}"
        rivals = max(runs[name].slo_share for name in ("static", "process"))
        figures |= {
            f"slo_share{suffix}": ours.slo_share,
            f"slo_share_vs_best_other{suffix}": ours.slo_share / rivals,
            f"slo_share_vs_swap{suffix}": ours.slo_share / runs["swap"].slo_share,
            f"ttft_p50_s{suffix}": ours.ttft_s[0][0],
            f"ttft_p99_s{suffix}": ours.ttft_s[0][1],
            f"slo_share_of_models{suffix}": ours.slo_share_of_models,
        }
    return figures


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Share of requests within their targets by load, and Folio's memory over time."""
    runs = result["raw"]["runs"]
    rates = list(dict.fromkeys(run["rate"] for run in runs))
    with picture(result, path, "Sixty models on one simulated H100", columns=2, height=4.2) as (figure, plots):
        left, right = plots
        colours = dict(zip(NAMES, (OURS[0], *RIVALS), strict=False))
        for name, label in NAMES.items():
            shares = [100 * run["slo_share"] for run in runs if run["policy"] == name]
            left.plot(rates, shares, marker="o", color=colours[name], label=label)
        left.set(xlabel="requests a second", ylabel="within targets, %", ylim=(0, 100), title="SLO attainment")
        left.set_xscale("log", base=2)
        left.set_xticks(rates, [f"{rate:g}" for rate in rates])
        legend_below(figure, left, 4)
        run = next(run for run in runs if run["policy"] == "folio" and run["rate"] == rates[len(rates) // 2])
        minutes = [point[0] / 60 for point in run["timeline"]]
        weights, used = ([point[i] / 1e9 for point in run["timeline"]] for i in (1, 2))
        right.stackplot(minutes, weights, used, labels=("weights", "KV in use"), colors=(OURS[2], OURS[0]))
        right.set(
            xlabel="minutes", ylabel="GB", ylim=(0, 85), title=f"Folio's memory, {run['rate']:g} request a second"
        )
        right.legend(loc="upper right", ncols=2)


def parse(doc: str | None) -> argparse.Namespace:
    """Arguments of a simulation. `doc`: of its module."""
    parser = harness.arguments(doc)
    parser.add_argument("--trace", type=Path, default=TRACE, help="a CSV like servegen_models.csv")
    args = parser.parse_args()
    harness.note_missing(args.trace)
    return args


if __name__ == "__main__":
    main()
