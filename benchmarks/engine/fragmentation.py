"""Fragmentation: the share of token state in the KV memory that requests hold (PagedAttention figure 2).

Continuous batching over a fixed capacity, eight requests of the longest length: requests are admitted first come first
served while they fit, every running one gets a token a step, finished ones leave. A request of o output tokens runs for
o steps and has state for its prompt and all outputs but the last, to which no query attends. The share is token state
over the memory held by running requests, both summed over the steps from the end of the first quarter of the requests
until the waiting queue is empty.

Contiguous reservation, first fit, as in systems before PagedAttention:
    reserved max      the longest possible request, for each request
    reserved pow2     the prompt, and the next power of two of the output
    reserved oracle   the prompt and the output, as if its length were known
The second number adds memory that external fragmentation makes unusable: all free memory, while the next request fits
into it but into no single gap.

Blocks: a sequence holds whole ones. When a running request gets none, the latest request is preempted and waits at the
head of the queue, as in Folio's scheduler. First the table of block sizes, counted; then the real `KVMemory` on the
host, with the block size of `block_tokens_for`, in each view, stepped as the engine steps it:
    block table       read through the block table, as PagedAttention does
    region            read through contiguous regions
The blocks owned by its sequences must equal the count. The second number has all physical memory: free pages too, which
are parked, mapped ahead, or not given back yet. Steps compute nothing here and take 2 ms or less, so that
`idle_release_s` is hundreds of steps: with real steps more memory is given back. One small layer without padding stands
for a model: a block is one page. The planner chooses the block size with the workload's mean as `expected_tokens`;
`token_state_share_of_16` is the figure for its default of 1,024, blocks of 16.

ShareGPT and Alpaca lengths are synthetic, see `workloads.py`. --quick replays fewer requests. The trace is
`AzureLLMInferenceTrace_code.csv` of github.com/Azure/AzurePublicDataset (CC-BY-4.0; Patel et al., "Splitwise", ISCA
2024); without it those lengths are synthetic too.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import harness, workloads
from benchmarks.picture import LIMIT, OURS, RIVALS, bars, legend_below, picture
from folio.vmem import (
    HostBackend,
    KVMemory,
    LayerGroup,
    LayerSpec,
    OutOfPages,
    SequenceMemory,
    StepDemand,
    View,
    plan_layout,
)

SEED = 0
LONGEST_AT_ONCE = 8
MOST_RUNNING = 1024
BLOCK_SIZES = (1, 2, 4, 8, 16, 32)
PAPER_SHARE = 96.3
HOLDERS = {
    "reserved max": "contiguous, longest possible",
    "reserved pow2": "contiguous, next power of two",
    "reserved oracle": "contiguous, length known",
    "block table": "Folio, block table",
    "region": "Folio, contiguous view",
}
WORKLOADS = {"azure": "code completion", "sharegpt": "ShareGPT", "alpaca": "Alpaca"}
# Shapes whose waste is planned: layers, KV heads, head dimension.
CUDA_SHAPES = {"llama8b": (32, 8, 128), "qwen05b": (24, 2, 64)}
CUDA_PAGE_BYTES, CUDA_TOKENS = 2 << 20, 1024


@dataclass(slots=True, eq=False)
class Request:
    """A request; its first `num_tokens` tokens have state once the current step is over."""

    prompt: int
    output: int
    num_tokens: int

    @property
    def is_finished(self) -> bool:
        return self.num_tokens == self.prompt + self.output


class Holder(Protocol):
    """A memory policy: holds memory for running requests; all sizes are in tokens."""

    def hold(self, request: Request) -> bool:
        """Hold memory for the request's tokens. Returns False, without any change, if there is none."""
        ...

    def drop(self, request: Request) -> None: ...

    def step(self, running: list[Request]) -> None:
        """Hold what this step needs for all requests."""
        ...

    def held(self) -> tuple[float, float]:
        """Tokens of memory held by requests, and that plus the free memory that no other request can use."""
        ...


class Reservations:
    """One contiguous range for each request, first fit."""

    def __init__(self, capacity: int, size: Callable[[Request], int]) -> None:
        self._capacity = capacity
        self._size = size
        self._pieces: list[tuple[int, int]] = []  # (start, end), ascending
        self._piece_of: dict[Request, tuple[int, int]] = {}
        self._useless = 0

    def hold(self, request: Request) -> bool:
        if request in self._piece_of:
            return True
        size, start = self._size(request), 0
        for piece in [*self._pieces, (self._capacity, self._capacity)]:
            if piece[0] - start >= size:
                self._piece_of[request] = (start, start + size)
                bisect.insort(self._pieces, (start, start + size))
                self._useless = 0
                return True
            start = piece[1]
        free = self._capacity - self._reserved
        self._useless = free if free >= size else 0
        return False

    def drop(self, request: Request) -> None:
        self._pieces.remove(self._piece_of.pop(request))

    def step(self, running: list[Request]) -> None:
        pass

    def held(self) -> tuple[float, float]:
        return self._reserved, self._reserved + self._useless

    @property
    def _reserved(self) -> int:
        return sum(end - start for start, end in self._pieces)


class CountedBlocks:
    """Blocks that are only counted."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._num_free = capacity // block_tokens
        self._owned: dict[Request, int] = {}

    def hold(self, request: Request) -> bool:
        missing = -(-request.num_tokens // self._block_tokens) - self._owned.get(request, 0)
        if missing > self._num_free:
            return False
        self._num_free -= missing
        self._owned[request] = self._owned.get(request, 0) + missing
        return True

    def drop(self, request: Request) -> None:
        self._num_free += self._owned.pop(request)

    def step(self, running: list[Request]) -> None:
        pass

    def held(self) -> tuple[float, float]:
        held = sum(self._owned.values()) * self._block_tokens
        return held, held


class RealBlocks:
    """Blocks of a real `KVMemory` over the host."""

    def __init__(self, capacity: int, block_tokens: int, longest: int, view: View) -> None:
        backend = HostBackend(1 << 40)
        granularity = backend.granularity_bytes
        dim = granularity // block_tokens // (2 * torch.float32.itemsize)  # a block fills a page: no padding
        spec = LayerSpec(1, dim, dim)
        layout = plan_layout([spec], torch.float32, granularity_bytes=granularity, block_tokens=block_tokens)
        self._token_bytes = layout.payload_bytes
        self._view = view
        budget = capacity // block_tokens * layout.block_bytes
        self.memory = KVMemory(
            backend,
            [LayerGroup((0,), layout)],
            budget_bytes=budget,
            num_regions=MOST_RUNNING,
            max_tokens=longest,
        )
        self._sequences: dict[Request, SequenceMemory] = {}
        self._computed: dict[Request, int] = {}

    def hold(self, request: Request) -> bool:
        sequence = self._sequences.get(request)
        if sequence is None:
            sequence = self._sequences[request] = self.memory.create_sequence(self._view)
        try:
            self.memory.append(sequence, request.num_tokens)
        except OutOfPages:
            return False
        return True

    def drop(self, request: Request) -> None:
        self.memory.free(self._sequences.pop(request))
        self._computed.pop(request, None)

    def step(self, running: list[Request]) -> None:
        demands = [StepDemand(self._sequences[r], self._computed.get(r, 0), r.num_tokens) for r in running]
        self.memory.ensure(demands)
        going_on = (d for d, r in zip(demands, running, strict=True) if r.num_tokens + 1 < r.prompt + r.output)
        self.memory.plan(StepDemand(demand.sequence, demand.end, demand.end + 1) for demand in going_on)
        self._computed |= {request: request.num_tokens for request in running}
        self.memory.launched()

    def held(self) -> tuple[float, float]:
        report = self.memory.report()
        return report.active_bytes / self._token_bytes, report.physical_bytes / self._token_bytes

    def close(self) -> None:
        self.memory.check_idle()
        self.memory.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of token state in the memory held by requests, and in that plus the unusable free memory."""

    share: float
    share_of_all: float
    mean_running: float
    num_preempted: int


def simulate(holder: Holder, lengths: workloads.Lengths) -> Outcome:
    """Continuous batching of requests that all wait from the start."""
    waiting = deque(Request(prompt, output, prompt) for prompt, output in lengths)
    running: list[Request] = []  # in order of arrival
    num_finished = num_preempted = 0
    steps: list[tuple[int, int, float, float]] = []  # running requests, tokens with state, held, unusable
    while waiting or running:
        i = 0
        while i < len(running):
            if holder.hold(running[i]):
                i += 1
            else:
                latest = running.pop()
                holder.drop(latest)
                waiting.appendleft(latest)
                num_preempted += 1
        while waiting and holder.hold(waiting[0]):
            running.append(waiting.popleft())
        assert running, "the capacity does not hold the next request"
        holder.step(running)
        if waiting and 4 * num_finished >= len(lengths):
            steps.append((len(running), sum(request.num_tokens for request in running), *holder.held()))
        for request in running:
            request.num_tokens += 1
            if request.is_finished:
                holder.drop(request)
        still = [request for request in running if not request.is_finished]
        num_finished += len(running) - len(still)
        running = still
    if not steps:
        raise ValueError(f"{len(lengths)} requests are too few: none waits when a quarter of them have finished")
    counts, tokens, held, held_back = (sum(column) for column in zip(*steps, strict=True))
    return Outcome(tokens / held, tokens / held_back, counts / len(steps), num_preempted)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    source: str
    lengths: workloads.Lengths
    longest: int

    @property
    def capacity(self) -> int:
        return LONGEST_AT_ONCE * self.longest


def read_workloads(trace: Path, counts: dict[str, int]) -> list[Workload]:
    azure, source = workloads.azure(trace, 1 << 20 if trace.is_file() else counts["azure"], SEED)
    longest = max(prompt + output for prompt, output in azure)
    made = {name: getattr(workloads, name)(counts[name], SEED) for name in ("sharegpt", "alpaca")}
    return [Workload("azure", source, azure[: counts["azure"]], longest)] + [
        Workload(name, "synthetic, the paper's means", lengths, workloads.LONGEST) for name, lengths in made.items()
    ]


def block_tokens_for(lengths: workloads.Lengths) -> int:
    """The server's block size when `expected_tokens` is the workload's mean length."""
    mean = statistics.mean(prompt + output for prompt, output in lengths)
    layout = plan_layout(
        [LayerSpec(2, 64, 64)] * 24,  # Qwen2.5-0.5B
        torch.bfloat16,
        granularity_bytes=4096,
        expected_tokens=round(mean),
    )
    return layout.block_tokens


def planned_waste() -> dict[str, float]:
    """Expected waste of the planner's layout on CUDA, whose granularity is 2 MiB, for sequences of 1,024 tokens."""
    return {
        f"cuda_waste_{name}": plan_layout(
            [LayerSpec(heads, dim, dim)] * layers,
            torch.bfloat16,
            granularity_bytes=CUDA_PAGE_BYTES,
            kind="sliced",
            shares_handles=True,
        ).expected_waste(CUDA_TOKENS)
        for name, (layers, heads, dim) in CUDA_SHAPES.items()
    }


def run_reservations(workload: Workload) -> dict[str, Outcome]:
    longest, sizes = workload.longest, dict[str, Callable[[Request], int]]()
    sizes["reserved max"] = lambda request: longest
    sizes["reserved pow2"] = lambda request: min(request.prompt + (1 << (request.output - 1).bit_length()), longest)
    sizes["reserved oracle"] = lambda request: request.prompt + request.output
    return {n: simulate(Reservations(workload.capacity, size), workload.lengths) for n, size in sizes.items()}


def run_views(workload: Workload, block_tokens: int, counted: Outcome) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    views: tuple[View, ...] = ("block_table", "region")
    for view in views:
        holder = RealBlocks(workload.capacity, block_tokens, workload.longest, view)
        outcome = outcomes[view.replace("_", " ")] = simulate(holder, workload.lengths)
        holder.close()
        if abs(outcome.share - counted.share) > 1e-9 or outcome.num_preempted != counted.num_preempted:
            raise RuntimeError(f"{view}: KVMemory's sequences own {outcome}, counted was {counted}")
    return outcomes


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--trace", type=Path, default=workloads.AZURE_TRACE, help="CSV of the Azure code trace")
    args = parser.parse_args()
    harness.note_missing(args.trace)
    counts = {"azure": 300, "sharegpt": 200, "alpaca": 1500} if args.quick else {}
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    shares: dict[str, dict[str, Outcome]] = {}
    for workload in read_workloads(args.trace, counts or {"azure": 10_000, "sharegpt": 3000, "alpaca": 15_000}):
        sizes = {size: simulate(CountedBlocks(workload.capacity, size), workload.lengths) for size in BLOCK_SIZES}
        block_tokens = block_tokens_for(workload.lengths)
        outcomes = run_reservations(workload) | run_views(workload, block_tokens, sizes[block_tokens])
        print_workload(workload, block_tokens, sizes, outcomes)
        shares[workload.name] = outcomes
        figures[f"{workload.name}_block_tokens"] = block_tokens
        figures |= {f"{workload.name}_blocks_of_{size}_share": outcome.share for size, outcome in sizes.items()}
        for name, outcome in outcomes.items():
            key = {"block table": "paged"}.get(name, name.replace(" ", "_"))
            figures[f"{workload.name}_{key}_share"] = outcome.share
            figures[f"{workload.name}_{key}_share_of_all"] = outcome.share_of_all
        raw[workload.name] = {
            "source": workload.source,
            "num_requests": len(workload.lengths),
            "capacity_tokens": workload.capacity,
            "outcomes": {
                name: [o.share, o.share_of_all, o.mean_running, o.num_preempted] for name, o in outcomes.items()
            },
        }
    ours = [outcomes[view] for outcomes in shares.values() for view in ("block table", "region")]
    worst = {
        "token_state_share": min(outcome.share for outcome in ours),
        "token_state_share_of_physical": min(outcome.share_of_all for outcome in ours),
        "token_state_share_of_16": min(figures[f"{name}_blocks_of_16_share"] for name in shares),
    }
    print(
        f"\nworst workload and view: {worst['token_state_share']:.1%}, of all physical memory "
        f"{worst['token_state_share_of_physical']:.1%}; with blocks of 16 tokens in all workloads "
        f"{worst['token_state_share_of_16']:.1%}"
    )
    harness.finish("fragmentation", args, worst | planned_waste() | figures, raw, draw)


def print_workload(
    workload: Workload, block_tokens: int, sizes: dict[int, Outcome], outcomes: dict[str, Outcome]
) -> None:
    prompt, output = (statistics.mean(column) for column in zip(*workload.lengths, strict=True))
    print(
        f"\n{workload.name}: {len(workload.lengths)} requests, {workload.source}; means {prompt:.1f} and {output:.1f}, "
        f"longest {workload.longest}, capacity "
        f"{workload.capacity} tokens"
    )
    print("  tokens a block  " + "".join(f"{size:8d}{'*' if size == block_tokens else ' '}" for size in sizes))
    print("  token state     " + "".join(f"{outcome.share:8.1%} " for outcome in sizes.values()) + "   * the planner's")
    print(f"  {'':16s}  token state   of all   running   preempted")
    for name, outcome in outcomes.items():
        print(
            f"  {name:16s}{outcome.share:13.1%}{outcome.share_of_all:9.1%}{outcome.mean_running:10.1f}"
            f"{outcome.num_preempted:12d}"
        )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Share of token state by workload and way of holding memory."""
    colours = (*[RIVALS[0]] * 3, *[OURS[0]] * 2)
    title = "KV memory that holds tokens, of the memory that requests hold"
    with picture(result, path, title, columns=len(result["raw"]), height=3.6, sharey=True) as (figure, plots):
        for plot, (workload, row) in zip(plots, result["raw"].items(), strict=True):
            shares = {HOLDERS[name]: 100 * outcome[0] for name, outcome in row["outcomes"].items()}
            bars(plot, shares, colours, "%.1f")
            of_all = [100 * outcome[1] for outcome in row["outcomes"].values()]
            label = "the same of that and of free memory that no request can use"
            plot.scatter(of_all, list(shares), marker="|", s=160, color=LIMIT, zorder=3, label=label)
            label = f"PagedAttention's paper: {PAPER_SHARE} %"
            plot.axvline(PAPER_SHARE, color="#1c1f23", linestyle=":", linewidth=1.2, label=label)
            source = "trace" if row["source"].startswith("the first") else "synthetic lengths"
            plot.set(xlim=(0, 125), xticks=(0, 50, 100), xlabel="%", title=f"{WORKLOADS[workload]}\n({source})")
        plots[0].set_ylim(len(HOLDERS) - 0.5, -0.5)  # the plots share the axis, and each has turned it
        legend_below(figure, plots[0], 2)


if __name__ == "__main__":
    main()
