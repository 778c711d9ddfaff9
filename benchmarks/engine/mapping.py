"""Mapping cost, and its exposed share.

First the cost of each backend call, by page size and by pages a call. Then the lengths of a trace, replayed through the
real scheduler and KV memory with a stand-in for the model: every step lasts as long as the model's would and keeps the
device as busy; the share of that time spent waiting for mappings is the *exposed share*. Measured with overlap,
deferred reclamation and eager allocation, without each of them in turn, and without all three.

The time of a step follows from the memory bandwidth and the matrix rate of the device, measured in this run: on a
CPU for Qwen2.5-0.5B, on CUDA for Llama-3-8B, and on either for a model with shorter steps. A step lasts at most 50 ms
here (10 in a quick run), which leaves the mapper less time than it would have; shares are still of the whole step. On
CUDA the default's pages are compared with whole blocks, too; `benchmarks.mapping_simulated` counts both without a
device.

--quick replays fewer requests; --tiny only shows that this program works. The trace is
`AzureLLMInferenceTrace_code.csv` of github.com/Azure/AzurePublicDataset (CC-BY-4.0; Patel et al., "Splitwise", ISCA
2024); without it lengths are synthetic, with the same means.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, workloads
from benchmarks.engine.device_time import product_limit, read_limit
from benchmarks.facts import record
from benchmarks.picture import LIMIT, OURS, RIVALS, bars, legend_below, picture
from folio.app.engine.layers.batch import demands, next_demands
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.engine.schedule.scheduler import Scheduler
from folio.vmem import (
    AddressRange,
    Backend,
    KVMemory,
    LayerGroup,
    LayerSpec,
    LayoutKind,
    MappingOptions,
    plan_layout,
    select_backend,
)

MEAN_PROMPT = 2048
MAX_TOKENS = workloads.AZURE_LONGEST
NUM_SEQS, CHUNK_TOKENS = 16, 1024
LONGEST_STEP_S, QUICK_LONGEST_STEP_S = 0.05, 0.01
# Side of the matrices of a quick run's product: in bfloat16 it takes some processors seconds.
QUICK_PRODUCT_SIZE = 512
VARIANTS = {
    "all on": MappingOptions(),
    "no overlap": MappingOptions(overlap=False),
    "no deferred reclamation": MappingOptions(deferred_reclamation=False),
    "no eager allocation": MappingOptions(eager_allocation=False),
    "all off": MappingOptions(overlap=False, deferred_reclamation=False, eager_allocation=False),
}
WHOLE = "all on, a page a block"
AIM_PERCENT = 1
DRAWN = {
    "all on": "Folio, as it is",
    "no overlap": "not in the background",
    "no deferred reclamation": "unmapped at once",
    "no eager allocation": "nothing mapped ahead",
    "all off": "none of the three",
    WHOLE: "a page a block",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model as far as mapping needs it: its cache, and the time of its steps on a device.

    Attributes:
        num_parameters: without embeddings.
        bytes_per_s, flop_per_s: rates of the device.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    num_parameters: float
    bytes_per_s: float
    flop_per_s: float

    def step_s(self, num_tokens: int, num_cached: int, token_bytes: int) -> float:
        """Time of a step: the longer of reading the weights and multiplying by them, plus reading the cache."""
        products = 2 * self.num_parameters * num_tokens / self.flop_per_s
        return max(2 * self.num_parameters / self.bytes_per_s, products) + num_cached * token_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Replay:
    """Seconds of all steps together, and their exposed mapping time."""

    steps_s: float
    exposed_s: float
    hidden_s: float
    num_steps: int

    @property
    def share(self) -> float:
        return self.exposed_s / self.steps_s


def main() -> None:
    parser = harness.arguments(__doc__, devices=("cpu", "cuda"))
    parser.add_argument(
        "--trace", type=Path, default=workloads.AZURE_TRACE, help="CSV with ContextTokens and GeneratedTokens"
    )
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, on the CPU")
    args = parser.parse_args()
    args.quick |= args.tiny
    harness.note_missing(args.trace)
    num_requests, repeats = (16 if args.device == "cpu" else 24, 1) if args.quick else (120, 3)
    lengths, workload = workloads.azure(args.trace, num_requests, 0)
    if args.tiny:
        lengths = [(64, 2), (65, 2)]
    figures: dict[str, float] = {}

    print("cost of backend calls, µs a page (median)")
    calls = call_costs(args)
    for row in calls:
        record("cost of backend calls", micros=row)
        print(
            f"  {row['page_kib']:>5.0f} KiB × {row['pages']:<3.0f}"
            + "".join(f"  {name} {row[name]:8.1f}" for name in ("create", "map", "map_again", "unmap", "destroy"))
        )
        for name in ("create", "map", "map_again", "unmap", "destroy"):
            figures[f"{name}_us_{row['page_kib']:.0f}kib_x{row['pages']:.0f}"] = row[name]

    raw: dict[str, object] = {"calls": calls, "workload": workload}
    shares: dict[str, dict[str, float]] = {}
    for model, prefix in zip(models(args), ("", "small_"), strict=True):
        kind = layout_kind(args.device)
        runs = {name: partial(share_of, args, model, lengths, kind, options) for name, options in VARIANTS.items()}
        if args.device == "cuda":
            runs[WHOLE] = partial(share_of, args, model, lengths, "whole", MappingOptions())
        results = harness.alternate(runs, repeats, warm_ups=1)
        medians = {name: statistics.median(values) for name, values in results.items()}
        shares[model.name] = medians
        record("exposed share", model=model.name, shares=medians)
        raw[model.name] = results
        figures[f"{prefix}exposed_share"] = medians["all on"]
        figures[f"{prefix}exposed_share_all_off"] = medians["all off"]
        if WHOLE in medians:
            figures[f"{prefix}exposed_share_whole"] = medians[WHOLE]
        for name in ("overlap", "deferred reclamation", "eager allocation"):
            figures[f"{prefix}exposed_share_no_{name.split()[0]}"] = medians[f"no {name}"]

    print(f"\n{len(lengths)} requests, {workload}; exposed mapping time as a share of step time")
    for model_name, medians in shares.items():
        print(f"  {model_name}")
        hidden = medians["all off"] - medians["all on"]
        for name, share in medians.items():
            note = ""
            if name.startswith("no ") and hidden > 0:
                note = f"   hides {(share - medians['all on']) / hidden:6.1%} of what is hidden, the others given"
            print(f"    {name:26s}{share:9.3%}{note}")
    harness.finish("mapping", args, figures, raw, draw)


def models(args: argparse.Namespace) -> tuple[Model, Model]:
    """The model of the main figure, and a smaller one with shorter steps."""
    device = torch.device(args.device)
    size = QUICK_PRODUCT_SIZE if args.quick and args.device == "cpu" else 0
    bandwidth, flops = (
        (1e11, 1e13) if args.tiny else (read_limit(device)(), product_limit(device, torch.bfloat16, size)())
    )
    if args.device == "cuda":
        large = Model("Llama-3-8B", (LayerSpec(8, 128, 128),) * 32, 7.0e9, bandwidth, flops)
        return large, Model("Qwen2.5-0.5B", (LayerSpec(2, 64, 64),) * 24, 3.6e8, bandwidth, flops)
    large = Model("Qwen2.5-0.5B", (LayerSpec(2, 64, 64),) * 24, 3.6e8, bandwidth, flops)
    return large, Model("Qwen2.5-0.5B, if it were ten times faster", large.layers, 3.6e7, bandwidth, flops)


def share_of(
    args: argparse.Namespace,
    model: Model,
    lengths: abc.Sequence[tuple[int, int]],
    kind: LayoutKind,
    options: MappingOptions,
) -> float:
    busy = busy_cuda if args.device == "cuda" else busy_cpu
    longest_step_s = QUICK_LONGEST_STEP_S if args.quick and args.device == "cpu" else LONGEST_STEP_S
    return replay(make_backend(args, 1 << 40), model, lengths, kind, options, busy, longest_step_s=longest_step_s).share


def layout_kind(device: str) -> LayoutKind:
    """The engine's default."""
    return "sliced" if device == "cuda" else "interleaved"


def make_backend(args: argparse.Namespace, budget_bytes: int) -> Backend:
    return select_backend(torch.device(args.device), capacity_bytes=budget_bytes)


# ---- the replay ----


def replay(
    backend: Backend,
    model: Model,
    lengths: abc.Sequence[tuple[int, int]],
    kind: LayoutKind,
    options: MappingOptions,
    busy: Callable[[float, KVMemory], None],
    clock: Callable[[], float] = time.monotonic,
    longest_step_s: float = LONGEST_STEP_S,
) -> Replay:
    """Replay all requests, as many at once as the scheduler admits, beginning with empty memory.

    Args:
        busy: computes a step of so many seconds; calls `launched` of the memory.
    """
    layout = plan_layout(model.layers, torch.bfloat16, granularity_bytes=backend.granularity_bytes, kind=kind)
    budget = NUM_SEQS * 3 * layout.num_blocks(MEAN_PROMPT) * layout.block_bytes
    budget = max(budget, 2 * layout.num_blocks(MAX_TOKENS) * layout.block_bytes)
    memory = KVMemory(
        backend,
        [LayerGroup(tuple(range(len(model.layers))), layout)],
        budget_bytes=budget,
        num_regions=NUM_SEQS + 1,
        max_tokens=MAX_TOKENS,
        options=options,
        clock=clock,
    )
    scheduler = Scheduler(
        memory,
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=CHUNK_TOKENS,
        view="region",
        recovery=PreemptionCostModel(CHUNK_TOKENS),
        policy="recompute",
        clock=clock,
    )
    submit(scheduler, memory, lengths)
    steps_s, num_steps = 0.0, 0
    while scheduler.num_running or scheduler.num_waiting:
        scheduled = scheduler.schedule()
        assert scheduled, "the scheduler found no memory for anybody"
        memory.ensure(demands(scheduled))
        following = next_demands(scheduled, CHUNK_TOKENS)
        memory.plan(following, scheduler.coming_tokens(following), scheduler.view)
        num_tokens = sum(s.num_tokens for s in scheduled)
        num_cached = sum(s.sequence.num_computed + s.num_tokens for s in scheduled)
        step_s = model.step_s(num_tokens, num_cached, layout.payload_bytes)
        busy(min(step_s, longest_step_s), memory)
        steps_s += step_s
        num_steps += 1
        sampling = [s for s in scheduled if s.samples]
        scheduler.commit_step()
        scheduler.settle(scheduled)
        for s in sampling:
            s.sequence.append([0], frozenset())
            if s.sequence.num_output_tokens == s.sequence.max_tokens:
                scheduler.remove_sequence(s.sequence)
    report = memory.report()
    memory.check_integrity()
    memory.close()
    return Replay(steps_s, report.exposed_us / 1e6, report.hidden_us / 1e6, num_steps)


def submit(scheduler: Scheduler, memory: KVMemory, lengths: abc.Sequence[tuple[int, int]]) -> None:
    """Requests of these prompts and outputs, no two of which share a prefix."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    for i, (prompt, output) in enumerate(lengths):
        tokens = list(range(i * MAX_TOKENS, i * MAX_TOKENS + prompt))
        request = Request(str(i), params, arrival=i)
        Sequence(request, tokens, params, output, None, memory.prefixes.chain(), tokens.copy())
        scheduler.add(request)


def busy_cpu(seconds: float, memory: KVMemory) -> None:
    """Keep every core multiplying for this long, as a step would."""
    memory.launched()
    end = time.perf_counter() + seconds
    a = _matrix()
    while time.perf_counter() < end:
        torch.mm(a, a)


def busy_cuda(seconds: float, memory: KVMemory) -> None:
    """Keep the device busy for this long, mark the end, and wait for it as sampling does."""
    torch.cuda._sleep(int(seconds * _clock_hz()))
    memory.launched()
    torch.cuda.current_stream().synchronize()


_cache: dict[str, torch.Tensor] = {}


def _matrix() -> torch.Tensor:
    if "a" not in _cache:
        _cache["a"] = torch.randn(256, 256)
    return _cache["a"]


def _clock_hz() -> float:
    """Cycles a second of the device's sleep, measured once."""
    if "hz" not in _cache:
        torch.cuda._sleep(1_000_000)
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(100_000_000)
        torch.cuda.synchronize()
        _cache["hz"] = torch.tensor(1e8 / (time.perf_counter() - start), dtype=torch.float64)
    return float(_cache["hz"])


# ---- single calls ----


def call_costs(args: argparse.Namespace) -> list[dict[str, float]]:
    """Microseconds a page of each call, by page size, for single pages and runs."""
    sizes: tuple[int, ...] = (64 << 10, 192 << 10, 2 << 20)
    if args.device == "cuda" or args.tiny:
        sizes = (64 << 10,) if args.tiny else (2 << 20, 16 << 20)
    rows = []
    for size in sizes:
        for pages in (1, 16):
            rows.append({"page_kib": size / 1024, "pages": float(pages)} | one_size(args, size, pages))
    return rows


def one_size(args: argparse.Namespace, size: int, pages: int, repeats: int = 7) -> dict[str, float]:
    backend = make_backend(args, 2 * repeats * pages * size)
    reserved = backend.reserve(2 * pages * size)
    again = AddressRange(reserved.address + pages * size, pages * size)
    first = AddressRange(reserved.address, pages * size)
    times: dict[str, list[float]] = {name: [] for name in ("create", "map", "map_again", "unmap", "destroy")}

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        times[name].append((time.perf_counter() - start) / pages * 1e6)

    def create(handles: list[int]) -> None:
        handles += [backend.create(size) for _ in range(pages)]

    def destroy(handles: abc.Sequence[int]) -> None:
        for handle in handles:
            backend.destroy(handle)

    for _ in range(repeats):
        handles: list[int] = []
        timed("create", partial(create, handles))
        timed("map", partial(backend.map, first.address, handles))
        timed("map_again", partial(backend.map, again.address, handles))
        timed("unmap", partial(backend.unmap, again))
        backend.unmap(first)
        timed("destroy", partial(destroy, handles))
    backend.release(reserved)
    backend.close()
    return {name: statistics.median(values) for name, values in times.items()}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Exposed share by variant, for both models."""
    shares = {
        name: {variant: 100 * statistics.median(shares) for variant, shares in runs.items()}
        for name, runs in result["raw"].items()
        if name not in ("calls", "workload")
    }
    title = "Time that steps wait for memory to be mapped"
    with picture(result, path, title, columns=len(shares), height=3.2, sharey=True) as (figure, plots):
        for plot, (model, medians) in zip(plots, shares.items(), strict=True):
            colours = [OURS[0] if name == "all on" else RIVALS[0] for name in medians]
            bars(plot, {DRAWN[name]: share for name, share in medians.items()}, colours, "%.2f")
            plot.axvline(AIM_PERCENT, color=LIMIT, linestyle="--", linewidth=1.2, label=f"aim: at most {AIM_PERCENT} %")
            plot.set(xlabel="% of step time", title=model)
        plots[0].set_ylim(
            max(map(len, shares.values())) - 0.5, -0.5
        )  # the plots share the axis, and each has turned it
        legend_below(figure, plots[0], 1)


if __name__ == "__main__":
    main()
