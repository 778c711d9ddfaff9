"""Attention kernels over real mapped memory, both views, beside what the device can do.

Sequences of a KV memory are read through their regions and through their block tables: the same blocks, scattered, by
each kernel that is there. Decode is measured in bytes of keys and values a second, against the memory bandwidth
measured in between; chunks of prompts in floating-point operations a second, against the rate of a large matrix
product. Each case has several sets of sequences, read in turn, so that no cache holds them from one call to the next.
Compared with: torch's SDPA, one sequence after the other (on a CPU with grouped heads folded into rows, many times
faster than its own grouping), and on CUDA the library kernels that are installed.

--quick takes fewer cases. Heads are those of Llama-3-8B and Qwen2.5-0.5B.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch

from benchmarks import harness
from kernels import AttentionProvider, KernelError, Masking, VarlenBatch, select_provider
from kernels.provider import problem_of
from vmem import Demand, KVMemory, LayerGroup, LayerSpec, LayoutKind, SequenceMemory, View, plan_groups, select_backend


@dataclass(frozen=True, slots=True)
class Heads:
    num_q_heads: int
    num_kv_heads: int
    dim: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.dim * DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class Device:
    """How much of what is measured where."""

    providers: tuple[str, ...]
    num_layers: int  # whose tokens lie together in the interleaved layout
    cold_bytes: int  # a case reads so much before it reads anything again
    most_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences of `length` cached tokens, of which the last `queries` attend."""

    batch: int
    length: int
    queries: int = 1


@dataclass(slots=True)
class Row:
    """One measurement: seconds of each repeat."""

    shape: str
    layout: str
    block_tokens: int
    view: str
    provider: str
    case: Case
    seconds: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)  # bytes or operations a second, measured beside each repeat

    @property
    def work(self) -> float:
        """Bytes that a decode reads, or operations that a chunk takes (two products, masked parts left out)."""
        heads, case = SHAPES[self.shape], self.case
        if case.queries == 1:
            return case.batch * case.length * heads.token_bytes
        seen = case.queries * (case.length - case.queries) + case.queries * (case.queries + 1) / 2
        return 4 * case.batch * seen * heads.num_q_heads * heads.dim

    @property
    def share(self) -> float:
        """Of the limit."""
        shares = (self.work / s / limit for s, limit in zip(self.seconds, self.limits, strict=True))
        return statistics.median(shares)


SHAPES = {"Llama-3-8B": Heads(32, 8, 128), "Qwen2.5-0.5B": Heads(14, 2, 64)}
DEVICES = {
    "cpu": Device(("cpu", "sdpa"), num_layers=8, cold_bytes=64 << 20, most_tokens=1 << 17, repeats=3),
    "cuda": Device(
        ("triton", "torch-flash", "flash-attn", "flashinfer", "sdpa"),
        num_layers=32,
        cold_bytes=1 << 29,
        most_tokens=1 << 19,
        repeats=7,
    ),
}
LAYOUTS: tuple[LayoutKind, ...] = ("interleaved", "per_layer")
DTYPE = torch.bfloat16
FILLED_LENGTH = 4096
LEAST_S = 0.05  # that one measurement takes
LENGTHS, BATCHES, BLOCKS = (256, 1024, 4096, 16384, 65536, 131072), (1, 4, 16, 64, 256), (16, 32, 128, 256)
PREFILLS = (Case(1, 512, 512), Case(1, 2048, 2048), Case(4, 512, 512), Case(1, 8192, 512), Case(4, 4096, 256))


def main() -> None:
    args = harness.arguments(__doc__, devices=tuple(DEVICES)).parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    for name, heads in SHAPES.items():
        for layout in LAYOUTS:
            for block_tokens in _block_sizes(args):
                cases = _cases(args, block_tokens)
                with _setting(args.device, heads, layout, block_tokens, cases) as setting:
                    for case in cases:
                        # The figures rest on it, and others use the memory, too.
                        often = case == _filled(args.device) and not args.quick
                        rows += _measure(args.device, setting, name, case, 3 if often else 1)
                print(f"{name}, {layout}, blocks of {setting.block_tokens} tokens: done", flush=True)
    _table(rows)
    _picture(rows, args)
    harness.finish("attention", args, _figures(rows, args.device), [asdict(row) for row in rows])


def _block_sizes(args: argparse.Namespace) -> tuple[int | None, ...]:
    """The first one is measured at all lengths. On CUDA pages of 2 MiB leave no choice."""
    if args.device == "cuda":
        return (None,)
    return BLOCKS[:1] if args.quick else BLOCKS


def _cases(args: argparse.Namespace, block_tokens: int | None) -> list[Case]:
    most = DEVICES[args.device].most_tokens
    filled = [_filled(args.device)]
    if args.quick:
        return [*filled, Case(1, FILLED_LENGTH), PREFILLS[0]]
    if block_tokens not in (BLOCKS[0], None):
        return filled
    sweep = [Case(batch, length) for length in LENGTHS for batch in BATCHES if batch * length <= most]
    return filled + [case for case in sweep if case not in filled] + list(PREFILLS)


def _filled(device_name: str) -> Case:
    """As many sequences of 4,096 tokens as keep the whole device busy."""
    return Case(DEVICES[device_name].most_tokens // 4 // FILLED_LENGTH, FILLED_LENGTH)


@dataclass(frozen=True, slots=True)
class Setting:
    """A memory of one layout whose blocks hold random numbers, and a layer of it in both views."""

    heads: Heads
    layout: str
    block_tokens: int
    memory: KVMemory
    caches: Mapping[View, tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def _setting(
    device_name: str, heads: Heads, layout: LayoutKind, block_tokens: int | None, cases: Sequence[Case]
) -> Iterator[Setting]:
    device = DEVICES[device_name]
    num_layers = device.num_layers if layout == "interleaved" else 1
    spec = LayerSpec(heads.num_kv_heads, heads.dim, heads.dim)
    num_regions = max(_num_sets(device, heads, case) * case.batch for case in cases)
    longest = max(case.length for case in cases)
    most_tokens = max(_num_sets(device, heads, case) * case.batch * (case.length + 512) for case in cases)
    capacity = 2 * most_tokens * num_layers * heads.token_bytes
    backend = select_backend(torch.device(device_name), capacity_bytes=capacity)
    [planned] = plan_groups(
        [[spec] * num_layers],
        DTYPE,
        granularity_bytes=backend.granularity_bytes,
        kind=layout,
        block_tokens=block_tokens,
        expected_tokens=FILLED_LENGTH,
    )
    group = LayerGroup(tuple(range(num_layers)), planned)
    num_blocks = max(_num_sets(device, heads, case) * case.batch * planned.num_blocks(case.length) for case in cases)
    num_pages = max(num_blocks, planned.num_blocks(longest)) * group.most_pages(1, 1)
    memory = KVMemory(
        backend,
        [group],
        budget_bytes=num_pages * planned.page_bytes,
        floor_bytes=num_pages * planned.page_bytes,
        num_regions=num_regions,
        max_tokens=longest,
        prefix_cache=False,
    )
    try:
        _fill(memory, num_blocks, planned.block_tokens)
        caches: dict[View, tuple[torch.Tensor, torch.Tensor]] = {
            "region": memory.tensors.region_view(0),
            "block_table": memory.tensors.home_view(0),
        }
        yield Setting(heads, layout, planned.block_tokens, memory, caches)
    finally:
        memory.close()


def _fill(memory: KVMemory, num_blocks: int, block_tokens: int) -> None:
    """Write random numbers everywhere, and leave the free blocks in random order."""
    sequences = []
    for _ in range(num_blocks):
        sequences.append(memory.open("block_table"))
        memory.append(sequences[-1], block_tokens)
    memory.ensure([Demand(sequence, 0, block_tokens) for sequence in sequences])
    block_ids = [sequence.groups[0].block_ids[0] for sequence in sequences]
    for cache in memory.tensors.home_view(0):
        noise = torch.randn(256, *cache.shape[1:], device=cache.device).to(cache.dtype)
        for start in range(0, num_blocks, len(noise)):
            part = torch.tensor(block_ids[start : start + len(noise)], device=cache.device)
            cache[part] = noise[: len(part)]
    memory.launched()
    random.Random(0).shuffle(sequences)
    for sequence in sequences:
        memory.free(sequence)


def _num_sets(device: Device, heads: Heads, case: Case) -> int:
    """Sets of sequences of a case, so many that reading all of them leaves nothing of the first in a cache."""
    return max(1, -(-device.cold_bytes // (case.batch * case.length * heads.token_bytes)))


def _measure(device_name: str, setting: Setting, shape: str, case: Case, times: int) -> list[Row]:
    """Every kernel in every view that it can read, in turn, `times` as often as usual."""
    device, memory = DEVICES[device_name], setting.memory
    sets: list[list[SequenceMemory]] = []
    for _ in range(_num_sets(device, setting.heads, case)):
        sets.append([memory.open("region") for _ in range(case.batch)])
        for sequence in sets[-1]:
            memory.append(sequence, case.length)
    memory.ensure([Demand(sequence, 0, case.length) for sequences in sets for sequence in sequences])
    try:
        query = torch.randn(case.batch * case.queries, setting.heads.num_q_heads, setting.heads.dim).to(DTYPE)
        query = query.to(device_name)
        runs: list[tuple[Row, Callable[[], float]]] = []
        for view in ("region", "block_table"):
            batches = [_batch(setting, sequences, view, case).to(query.device) for sequences in sets]
            for name in device.providers:
                if name == "sdpa" and view == "block_table":
                    continue  # it would measure the gathering
                run = _run(name, setting, view, batches, query)
                if run is not None:
                    runs.append((Row(shape, setting.layout, setting.block_tokens, view, name, case), run))
        for _, run in runs:
            run()
        limit = _read_limit if case.queries == 1 else _matrix_limit
        for _ in range(device.repeats * times):
            limit_now = limit(device_name)
            for row, run in runs:
                row.seconds.append(run())
                row.limits.append(limit_now)
        return [row for row, _ in runs]
    finally:
        memory.launched()
        for sequences in sets:
            for sequence in sequences:
                memory.free(sequence)


def _batch(setting: Setting, sequences: Sequence[SequenceMemory], view: View, case: Case) -> VarlenBatch:
    tables = [sequence.groups[0] for sequence in sequences]
    if view == "region":
        assert all(table.region is not None for table in tables)
        places = [[table.region.slot] for table in tables if table.region is not None]
    else:
        places = [table.block_ids for table in tables]
    return VarlenBatch(
        torch.arange(case.batch + 1, dtype=torch.int32) * case.queries,
        torch.full((case.batch,), case.length, dtype=torch.int32),
        torch.tensor(places, dtype=torch.int32),
        case.queries,
        case.length,
    )


_PROVIDERS: dict[tuple[str, str], AttentionProvider | None] = {}


def _run(
    name: str, setting: Setting, view: View, batches: Sequence[VarlenBatch], query: torch.Tensor
) -> Callable[[], float] | None:
    """A function that attends once over every batch and says how long one took; `None` if the kernel cannot."""
    key, value = setting.caches[view]
    masking = Masking(setting.heads.dim**-0.5)
    if (name, query.device.type) not in _PROVIDERS:
        try:
            _PROVIDERS[name, query.device.type] = select_provider(name, query.device)
        except KernelError as error:
            print(f"no {name} here: {error}")
            _PROVIDERS[name, query.device.type] = None
    provider = _PROVIDERS[name, query.device.type]
    if provider is None or provider.unsupported(problem_of(query, key, value, batches[0], masking)):
        return None

    def run() -> float:
        num_calls = 0
        _wait(query)
        start = time.perf_counter()
        while True:
            for batch in batches:
                provider.attend(query, key, value, batch, masking)
            num_calls += len(batches)
            if query.is_cuda:
                _wait(query)
            if time.perf_counter() - start > LEAST_S:
                return (time.perf_counter() - start) / num_calls

    return run


def _wait(query: torch.Tensor) -> None:
    if query.is_cuda:
        torch.cuda.synchronize()


def _read_limit(device_name: str) -> float:
    """Bytes a second: read by all threads; on CUDA read and written by a copy."""
    if device_name == "cpu":
        return harness.read_bandwidth(1 << 28, repeats=3)
    source = torch.empty(1 << 30, dtype=torch.int32, device=device_name)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _best_s(lambda: target.copy_(source))


def _matrix_limit(device_name: str) -> float:
    """Floating-point operations a second of a large product in the caches' dtype."""
    if device_name == "cpu":
        return harness.matrix_rate(DTYPE, repeats=2)
    a, b = (torch.randn(8192, 8192, device=device_name).to(DTYPE) for _ in range(2))
    return 2 * 8192**3 / _best_s(lambda: a @ b)


def _best_s(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _figures(rows: Sequence[Row], device_name: str) -> dict[str, float]:
    kernel = DEVICES[device_name].providers[0]
    ours = [row for row in rows if row.provider == kernel]
    filled = [row for row in ours if row.case == _filled(device_name)]
    figures = {}
    for shape in SHAPES:
        for layout in LAYOUTS:
            for view in ("region", "block_table"):
                [row, *_] = [r for r in filled if (r.shape, r.layout, r.view) == (shape, layout, view)]
                figures[f"decode_share_{shape}_{layout}_{view}"] = row.share
    # Keys and values of a layer side by side, contiguous: what the kernel makes of memory as such.
    figures["decode_share_of_bandwidth"] = figures["decode_share_Llama-3-8B_per_layer_region"]
    pairs = [
        (region, table)
        for region in ours
        for table in ours
        if region.view == "region"
        and table.view == "block_table"
        and region.case == table.case
        and region.case.queries == 1
        and (region.shape, region.layout, region.block_tokens) == (table.shape, table.layout, table.block_tokens)
    ]
    figures["paged_over_contiguous"] = max(
        harness.median_ratio(table.seconds, region.seconds) for region, table in pairs if region in filled
    )
    figures["paged_over_contiguous_all_cases_median"] = statistics.median(
        harness.median_ratio(table.seconds, region.seconds) for region, table in pairs
    )
    for phase, decode in (("decode", True), ("prefill", False)):
        for name in DEVICES[device_name].providers[1:]:
            ratios = [
                harness.median_ratio(other.seconds, row.seconds)
                for row in ours
                for other in rows
                if other.provider == name
                and (row.case.queries == 1) == decode
                and (row.shape, row.layout, row.block_tokens, row.view, row.case)
                == (other.shape, other.layout, other.block_tokens, other.view, other.case)
            ]
            if ratios:
                figures[f"{phase}_{name}_over_{kernel}_worst"] = min(ratios)
                figures[f"{phase}_{name}_over_{kernel}_median"] = statistics.median(ratios)
    return figures


def _table(rows: Sequence[Row]) -> None:
    print(
        f"\n{'heads':<14}{'layout':<13}{'block':>6} {'case':<24}{'view':<13}{'kernel':<12}{'rate':>12}{'of limit':>10}"
    )
    for row in rows:
        case = f"{row.case.batch} × {row.case.length}"
        case += f", last {row.case.queries}" if row.case.queries > 1 else ""
        unit = (1e9, "GB/s") if row.case.queries == 1 else (1e12, "TFLOP/s")
        rate = f"{row.work / statistics.median(row.seconds) / unit[0]:.2f} {unit[1]}"
        print(
            f"{row.shape:<14}{row.layout:<13}{row.block_tokens:>6} {case:<24}{row.view:<13}{row.provider:<12}{rate:>12}"
            f"{row.share:>10.1%}"
        )


def _picture(rows: Sequence[Row], args: argparse.Namespace) -> None:
    plt = harness.pyplot()
    if plt is None:
        return
    kernel = DEVICES[args.device].providers[0]
    figure, axes = plt.subplots(1, len(SHAPES), figsize=(12, 4.5), sharey=True)
    for axis, shape in zip(axes, SHAPES, strict=True):
        for provider, layout, view, style in (
            (kernel, "per_layer", "region", "-o"),
            (kernel, "per_layer", "block_table", "--o"),
            (kernel, "interleaved", "region", "-s"),
            (kernel, "interleaved", "block_table", "--s"),
            ("sdpa", "per_layer", "region", ":^"),
        ):
            chosen = [
                row
                for row in rows
                if (row.shape, row.provider, row.layout, row.view) == (shape, provider, layout, view)
                and row.case.queries == 1
            ]
            smallest = min((row.block_tokens for row in chosen), default=0)
            best: dict[int, float] = {}
            for row in chosen:
                if row.block_tokens == smallest:
                    best[row.case.length] = max(best.get(row.case.length, 0.0), row.share)
            axis.plot(sorted(best), [best[n] for n in sorted(best)], style, label=f"{provider}, {layout}, {view}")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xscale="log", xlabel="cached tokens of a sequence", title=f"{shape} heads, decode, best batch")
    axes[0].set_ylabel("share of the measured bandwidth")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(harness.results_folder(args) / f"attention{'-quick' if args.quick else ''}.png", dpi=120)


if __name__ == "__main__":
    main()
