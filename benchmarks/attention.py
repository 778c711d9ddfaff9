"""Attention kernels over mapped memory in both views, against the limits of the device.

Each available kernel reads the same scattered blocks through regions and through block tables. Decode is measured in
bytes of keys and values per second, against the memory bandwidth measured in the same run; prefill in floating-point
operations per second, against the rate of a large matrix product. Each case has several sets of sequences, read in
turn, so that no processor cache holds them from one call to the next. Baselines: torch's SDPA, one sequence after the
other (on a CPU with grouped heads folded into rows, many times faster than its own grouping), and on CUDA torch's flash
attention.

--footprints: decodes over growing amounts of memory, by layout and page size: the reach of the device's address
translation. All layers are read in turn, as a model does. --quick takes fewer cases; --tiny only shows that this
program works. Heads are those of Llama-3-8B and Qwen2.5-0.5B.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.facts import record
from benchmarks.picture import LIMIT, OURS, RIVALS, legend_below, picture
from kernels import AttentionProvider, KernelError, Masking, VarlenBatch, select_provider
from kernels.provider import AttentionCall
from vmem import (
    KVMemory,
    LayerGroup,
    LayerSpec,
    LayoutKind,
    SequenceMemory,
    StepDemand,
    View,
    plan_groups,
    select_backend,
)


@dataclass(frozen=True, slots=True)
class Heads:
    num_q_heads: int
    num_kv_heads: int
    dim: int

    @property
    def token_bytes(self) -> int:
        """Size of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.dim * DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences of `length` cached tokens; the last `queries` of each attend."""

    batch: int
    length: int
    queries: int = 1


@dataclass(frozen=True, slots=True)
class Device:
    """Sizes of the measurements on a device.

    Attributes:
        num_layers: layers whose tokens lie side by side in the interleaved layout.
        cold_bytes: bytes that a case reads before it reads any of them again, so that none is in a cache.
        filled_length: cached tokens of the sequences that fill the device.
        page_bytes: the smallest page size, if larger ones are measured as well.
        footprints: cases of `--footprints`.
        limit_bytes, limit_size: bytes copied, and side of the matrix, for the device's limits.
        least_s: least time of one measurement.
    """

    name: str
    providers: tuple[str, ...]
    num_layers: int
    cold_bytes: int
    most_tokens: int
    repeats: int
    filled_length: int = 4096
    page_bytes: int | None = None
    footprints: tuple[Case, ...] = ()
    limit_bytes: int = 1 << 30
    limit_size: int = 8192
    least_s: float = 0.05


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
        """Bytes that a decode reads, or operations of a prefill chunk (two products, without masked parts)."""
        heads, case = SHAPES[self.shape], self.case
        if case.queries == 1:
            return case.batch * case.length * heads.token_bytes
        seen = case.queries * (case.length - case.queries) + case.queries * (case.queries + 1) / 2
        return 4 * case.batch * seen * heads.num_q_heads * heads.dim

    @property
    def share(self) -> float:
        """Share of the limit."""
        shares = (self.work / s / limit for s, limit in zip(self.seconds, self.limits, strict=True))
        return statistics.median(shares)


SHAPES = {"Llama-3-8B": Heads(32, 8, 128), "Qwen2.5-0.5B": Heads(14, 2, 64)}
DEVICES = {
    "cpu": Device("cpu", ("cpu", "sdpa"), num_layers=8, cold_bytes=64 << 20, most_tokens=1 << 17, repeats=3),
    "cuda": Device(
        "cuda",
        ("triton", "torch-flash", "sdpa"),
        num_layers=32,
        cold_bytes=1 << 29,
        most_tokens=1 << 19,
        repeats=7,
        page_bytes=2 << 20,
        footprints=(Case(4, 1024), Case(16, 1024), Case(64, 1024), Case(64, 4096)),  # 0.5, 2, 8, 32 GiB for Llama-3-8B
    ),
}
TINY = Device(
    "cpu",
    ("cpu", "sdpa"),
    num_layers=2,
    cold_bytes=1 << 16,
    most_tokens=512,
    repeats=1,
    filled_length=64,
    page_bytes=64 << 10,
    footprints=(Case(1, 64), Case(2, 64)),
    limit_bytes=1 << 20,
    limit_size=128,
    least_s=0.001,
)
LAYOUTS: tuple[LayoutKind, ...] = ("interleaved", "per_layer")
DTYPE = torch.bfloat16
LENGTHS, BATCHES, BLOCKS = (256, 1024, 4096, 16384, 65536, 131072), (1, 4, 16, 64, 256), (16, 32, 128, 256)
PREFILLS = (Case(1, 512, 512), Case(1, 2048, 2048), Case(4, 512, 512), Case(1, 8192, 512), Case(4, 4096, 256))


def main() -> None:
    parser = harness.arguments(__doc__, devices=tuple(DEVICES))
    parser.add_argument("--footprints", action="store_true", help="also measure decodes over growing footprints")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, on the CPU")
    args = parser.parse_args()
    args.quick |= args.tiny
    device = TINY if args.tiny else DEVICES[args.device]
    if args.quick:
        device = replace(device, repeats=min(3, device.repeats))
    torch.manual_seed(0)
    rows: list[Row] = []
    for name, heads in SHAPES.items():
        for layout in LAYOUTS:
            for i, block_tokens in enumerate(_block_sizes(args, device, heads, layout)):
                cases, before = _cases(args, device, first=i == 0), len(rows)
                with _setting(device, heads, layout, block_tokens, cases) as setting:
                    for case in cases:
                        # The figures depend on it, and other processes use the memory, too.
                        often = case == _filled(device) and not args.quick
                        rows += _noted(_measure(device, setting, name, case, 3 if often else 1), setting)
                    _summary(f"{name}, {layout}, blocks of {setting.block_tokens}", rows[before:], device)
    figures = _figures(rows, device)
    footprints = _measure_footprints(device) if args.footprints else []
    for row in footprints:
        gib = row.case.batch * row.case.length * SHAPES[row.shape].token_bytes * device.num_layers / 2**30
        figures[f"footprint_{gib:g}gib_{row.layout}_{row.block_tokens}_{row.view}"] = row.share
    _table(rows + footprints)
    harness.finish("attention", args, figures, [asdict(row) for row in rows + footprints], draw)


def _block_sizes(args: argparse.Namespace, device: Device, heads: Heads, layout: LayoutKind) -> tuple[int, ...]:
    """Block sizes; the first one is measured at all lengths. With large pages: one, four and (interleaved) sixteen
    times the smallest block that fills a page."""
    if device.page_bytes is None:
        return BLOCKS[:1] if args.quick else BLOCKS
    token_bytes = heads.token_bytes * device.num_layers if layout == "interleaved" else heads.token_bytes // 2
    smallest = device.page_bytes // token_bytes
    return tuple(smallest * factor for factor in ((1, 4, 16) if layout == "interleaved" else (1, 4)))


def _cases(args: argparse.Namespace, device: Device, *, first: bool) -> list[Case]:
    most = device.most_tokens
    filled = [_filled(device)]
    if not first:
        return filled
    if args.quick:
        quick = [
            *filled,
            Case(1, device.filled_length),
            Case(1, min(512, device.filled_length), min(512, device.filled_length)),
        ]
        return [*quick, Case(256, 1024), Case(16, 1024)] if args.device == "cuda" else quick
    sweep = [Case(batch, length) for length in LENGTHS for batch in BATCHES if batch * length <= most]
    return filled + [case for case in sweep if case not in filled] + list(PREFILLS)


def _filled(device: Device) -> Case:
    """Enough sequences of some thousand tokens to fill the device."""
    return Case(device.most_tokens // 4 // device.filled_length, device.filled_length)


def _noted(rows: list[Row], setting: Setting) -> list[Row]:
    """The same rows, each recorded as it comes."""
    for row in rows:
        record(
            "attention",
            shape=row.shape,
            layout=row.layout,
            block_tokens=row.block_tokens,
            layers_read=len(setting.caches["region"]),
            view=row.view,
            kernel=row.provider,
            batch=row.case.batch,
            length=row.case.length,
            queries=row.case.queries,
            seconds=statistics.median(row.seconds),
            limit=statistics.median(row.limits),
            share=round(row.share, 4),
        )
    return rows


def _summary(fact: str, rows: Sequence[Row], device: Device) -> None:
    """Record the shares of all kernels in the largest case, and of the first kernel in every other."""
    shown: list[str] = []
    for view in ("region", "block_table"):
        shares: dict[Case, list[str]] = {}
        for row in rows:
            if row.view == view and (row.provider == device.providers[0] or row.case == _filled(device)):
                shares.setdefault(row.case, []).append(f"{row.provider} {row.share:.3f}")
        cases = (
            f"{case.batch}x{case.length}{' prefill' if case.queries > 1 else ''} {' '.join(by)}"
            for case, by in shares.items()
        )
        shown.append(f"{view} {', '.join(cases)}")
    record(fact, "; ".join(shown))


def _measure_footprints(device: Device) -> list[Row]:
    """Decodes of the first kernel over all layers in turn."""
    rows: list[Row] = []
    name, heads = next(iter(SHAPES.items()))
    assert device.page_bytes is not None
    for layout, factor in (("interleaved", 1), ("interleaved", 16), ("per_layer", 1)):
        kind: LayoutKind = "interleaved" if layout == "interleaved" else "per_layer"
        token_bytes = heads.token_bytes * device.num_layers if layout == "interleaved" else heads.token_bytes // 2
        block_tokens = factor * device.page_bytes // token_bytes
        with _setting(device, heads, kind, block_tokens, device.footprints, all_layers=True) as setting:
            before = len(rows)
            for case in device.footprints:
                rows += _noted(_measure(device, setting, name, case, 1, device.providers[:1]), setting)
            _summary(f"{name}, all layers, {layout}, blocks of {setting.block_tokens}", rows[before:], device)
    return rows


@dataclass(frozen=True, slots=True)
class Setting:
    """A memory of one layout whose blocks hold random numbers, and layers of it in both views."""

    heads: Heads
    layout: str
    block_tokens: int
    memory: KVMemory
    caches: Mapping[View, list[tuple[torch.Tensor, torch.Tensor]]]


@contextmanager
def _setting(
    device: Device,
    heads: Heads,
    layout: LayoutKind,
    block_tokens: int,
    cases: Sequence[Case],
    *,
    all_layers: bool = False,
) -> Iterator[Setting]:
    """With `all_layers`, all layers are read; otherwise one layer with more sequences, so that no cache holds them."""
    num_layers = device.num_layers if layout == "interleaved" or all_layers else 1

    def num_sets(case: Case) -> int:
        return 1 if all_layers else _num_sets(device, heads, case)

    spec = LayerSpec(heads.num_kv_heads, heads.dim, heads.dim)
    num_regions = max(num_sets(case) * case.batch for case in cases)
    longest = max(case.length for case in cases)
    backend = select_backend(torch.device(device.name), capacity_bytes=1 << 40)  # the budget is below
    [planned] = plan_groups(
        [[spec] * num_layers],
        DTYPE,
        granularity_bytes=backend.granularity_bytes,
        kind=layout,
        block_tokens=block_tokens,
        expected_tokens=device.filled_length,
    )
    group = LayerGroup(tuple(range(num_layers)), planned)
    num_blocks = max(num_sets(case) * case.batch * planned.num_blocks(case.length) for case in cases)
    num_pages = max(num_blocks, planned.num_blocks(longest)) * group.most_pages(1, 1)
    memory = KVMemory(
        backend,
        [group],
        budget_bytes=num_pages * planned.page_bytes,
        floor_bytes=num_pages * planned.page_bytes,
        num_regions=num_regions,
        max_tokens=max(longest, planned.block_tokens),
        prefix_cache=False,
    )
    try:
        read = range(num_layers if all_layers else 1)
        _fill(memory, num_blocks, planned.block_tokens, read)
        caches: dict[View, list[tuple[torch.Tensor, torch.Tensor]]] = {
            "region": [memory.tensors.region_view(layer) for layer in read],
            "block_table": [memory.tensors.home_view(layer) for layer in read],
        }
        yield Setting(heads, layout, planned.block_tokens, memory, caches)
    finally:
        memory.close()


def _fill(memory: KVMemory, num_blocks: int, block_tokens: int, layers: Sequence[int]) -> None:
    """Write random numbers everywhere in these layers, and shuffle the free blocks."""
    sequences = []
    for _ in range(num_blocks):
        sequences.append(memory.create_sequence("block_table"))
        memory.append(sequences[-1], block_tokens)
    memory.ensure([StepDemand(sequence, 0, block_tokens) for sequence in sequences])
    block_ids = [sequence.groups[0].block_ids[0] for sequence in sequences]
    for cache in (side for layer in layers for side in memory.tensors.home_view(layer)):
        noise = torch.randn(min(256, num_blocks), *cache.shape[1:], device=cache.device).to(cache.dtype)
        for start in range(0, num_blocks, len(noise)):
            part = torch.tensor(block_ids[start : start + len(noise)], device=cache.device)
            cache[part] = noise[: len(part)]
    memory.launched()
    random.Random(0).shuffle(sequences)
    for sequence in sequences:
        memory.free(sequence)


def _num_sets(device: Device, heads: Heads, case: Case) -> int:
    """Number of sets of sequences of a case: reading all of them evicts the first from every cache."""
    return max(1, -(-device.cold_bytes // (case.batch * case.length * heads.token_bytes)))


def _measure(
    device: Device, setting: Setting, shape: str, case: Case, times: int, providers: Sequence[str] = ()
) -> list[Row]:
    """Measure every kernel in every view that it can read, in turn, `times` as often as usual."""
    memory = setting.memory
    sets: list[list[SequenceMemory]] = []
    for _ in range(_num_sets(device, setting.heads, case) if len(setting.caches["region"]) == 1 else 1):
        sets.append([memory.create_sequence("region") for _ in range(case.batch)])
        for sequence in sets[-1]:
            memory.append(sequence, case.length)
    memory.ensure([StepDemand(sequence, 0, case.length) for sequences in sets for sequence in sequences])
    try:
        query = torch.randn(case.batch * case.queries, setting.heads.num_q_heads, setting.heads.dim).to(DTYPE)
        query = query.to(device.name)
        runs: list[tuple[Row, Callable[[], float]]] = []
        for view in ("region", "block_table"):
            batches = [_batch(setting, sequences, view, case).to(query.device) for sequences in sets]
            for name in providers or device.providers:
                if name == "sdpa" and view == "block_table":
                    continue  # otherwise the gathering would be measured
                run = _run(name, setting, view, batches, query, device.least_s)
                if run is not None:
                    runs.append((Row(shape, setting.layout, setting.block_tokens, view, name, case), run))
        for row, run in runs.copy():
            try:
                run()
            except RuntimeError as error:
                if row.provider == device.providers[0]:
                    raise
                runs.remove((row, run))  # a failed kernel has no figures; the others go on
                record("attention kernel failed", f"{row.provider} failed: {error}"[:300], case=asdict(case))
        limit = _read_limit if case.queries == 1 else _matrix_limit
        for _ in range(device.repeats * times):
            limit_now = limit(device)
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
    name: str, setting: Setting, view: View, batches: Sequence[VarlenBatch], query: torch.Tensor, least_s: float
) -> Callable[[], float] | None:
    """A function that attends over every batch in every layer and returns the seconds of one pass; `None` if the kernel
    cannot run the case."""
    layers = setting.caches[view]
    key, value = layers[0]
    masking = Masking(setting.heads.dim**-0.5)
    if (name, query.device.type) not in _PROVIDERS:
        try:
            _PROVIDERS[name, query.device.type] = select_provider(name, query.device)
        except KernelError as error:
            print(f"no {name} here: {error}")
            _PROVIDERS[name, query.device.type] = None
    provider = _PROVIDERS[name, query.device.type]
    if provider is None or provider.unsupported(AttentionCall(query, key, value, batches[0], masking)):
        return None

    def run() -> float:
        num_calls = 0
        _wait(query)
        start = time.perf_counter()
        while True:
            for batch in batches:
                for key, value in layers:
                    provider.attend(query, key, value, batch, masking)
            num_calls += len(batches) * len(layers)
            _wait(query)
            if time.perf_counter() - start > least_s:
                return (time.perf_counter() - start) / num_calls

    return run


def _wait(query: torch.Tensor) -> None:
    if query.is_cuda:
        torch.cuda.synchronize()


def _read_limit(device: Device) -> float:
    """Bytes a second that all threads read; on CUDA bytes that a copy reads and writes."""
    if device.name == "cpu" and device.page_bytes is None:  # not for tiny sizes, which follow the CUDA path
        return harness.read_bandwidth(1 << 28, repeats=3)
    source = torch.ones(device.limit_bytes // 4, dtype=torch.int32, device=device.name)
    target = torch.empty_like(source)
    return 2 * device.limit_bytes / _best_s(lambda: target.copy_(source))


def _matrix_limit(device: Device) -> float:
    """Floating-point operations a second of a large product in the caches' dtype."""
    if device.name == "cpu" and device.page_bytes is None:
        return harness.matrix_rate(DTYPE, repeats=2)
    size = device.limit_size
    a, b = (torch.randn(size, size, device=device.name).to(DTYPE) for _ in range(2))
    return 2 * size**3 / _best_s(lambda: a @ b)


def _best_s(work: Callable[[], torch.Tensor]) -> float:
    _wait(work())
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        _wait(work())
        best = min(best, time.perf_counter() - start)
    return best


def _figures(rows: Sequence[Row], device: Device) -> dict[str, float]:
    kernel = device.providers[0]
    ours = [row for row in rows if row.provider == kernel]
    filled = [row for row in ours if row.case == _filled(device)]
    figures = {}
    for shape in SHAPES:
        for layout in LAYOUTS:
            for view in ("region", "block_table"):
                [row, *_] = [r for r in filled if (r.shape, r.layout, r.view) == (shape, layout, view)]
                figures[f"decode_share_{shape}_{layout}_{view}"] = row.share
    # Keys and values of a layer side by side, contiguous: the kernel's speed without block tables or mappings.
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
        for name in device.providers[1:]:
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


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Decode: share of the memory bandwidth by length, for both heads."""
    rows = [Row(**row | {"case": Case(**row["case"])}) for row in result["raw"]]
    kernel = rows[0].provider
    lines = (
        (kernel, "per_layer", "region", "Folio, contiguous view", OURS[0], "-o"),
        (kernel, "per_layer", "block_table", "Folio, block table", OURS[1], "--s"),
        (kernel, "interleaved", "region", "Folio, layers interleaved, contiguous view", RIVALS[2], "-^"),
        (kernel, "interleaved", "block_table", "Folio, layers interleaved, block table", RIVALS[5], "--v"),
        ("sdpa", "per_layer", "region", "torch SDPA, contiguous", RIVALS[0], "-x"),
    )
    title = "Decode attention: share of the machine's memory bandwidth"
    with picture(result, path, title, columns=len(SHAPES), height=4.4, sharey=True) as (figure, plots):
        for plot, shape in zip(plots, SHAPES, strict=True):
            for provider, layout, view, label, colour, style in lines:
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
                        best[row.case.length] = max(best.get(row.case.length, 0.0), 100 * row.share)
                plot.plot(sorted(best), [best[n] for n in sorted(best)], style, color=colour, label=label)
            plot.axhline(100, color=LIMIT, linewidth=1, linestyle=":", label="measured bandwidth")
            plot.set(xscale="log", ylim=(0, None), xlabel="cached tokens of a sequence", title=f"heads of {shape}")
            lengths = [n for n in LENGTHS if any(row.case.length == n for row in rows)]
            plot.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths], minor=False)
            plot.minorticks_off()
        plots[0].set_ylabel("keys and values read, % of bandwidth\n(best batch size)")
        legend_below(figure, plots[0], 2)


if __name__ == "__main__":
    main()
