"""Attention kernels over mapped memory in both views, against the limits of the device.

Each available kernel reads the same scattered blocks through regions and through block tables. Decode is measured in
bytes of keys and values per second, against the rate of reads measured in the same run; prefill in floating-point
operations per second, against the rate of a large matrix product. On CUDA both are device time: a graph of one pass is
replayed between two events (`benchmarks.device_time`). A pass of decodes reads at least 1 GiB there, of several sets of
sequences or layers, so that no cache holds them from one pass to the next; `pass_bytes` of a row says how much. Only
what a pass of prefills reads may be in a cache. Baselines: on a CPU torch's SDPA, one sequence after the other, with
grouped heads folded into rows, many times faster than its own grouping; on CUDA torch's flash attention.

--footprints: decodes over growing amounts of memory, by layout and page size: the reach of the device's address
translation. All layers are read in turn, as a model does. --quick takes fewer cases; --tiny only shows that this
program works. Heads are those of Llama-3-8B and Qwen2.5-0.5B.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.engine.attention_memory import DTYPE, Case, Device, Heads, Setting, batch_of, setting
from benchmarks.engine.device_time import LEAST_S, device_timer, product_limit, read_limit
from benchmarks.facts import note_dtypes, record
from benchmarks.picture import LIMIT, OURS, RIVALS, legend_below, picture
from folio.kernels import AttentionProvider, KernelError, Masking, VarlenBatch, select_provider
from folio.kernels.provider import AttentionCall
from folio.vmem import LayoutKind, View


@dataclass(slots=True)
class Row:
    """One measurement: seconds of a call, in each repeat.

    Attributes:
        dtype, pass_bytes: of the caches, and `Setting.pass_bytes`; results from before they were recorded have none.
        limits: bytes or operations a second, measured beside each repeat.
    """

    shape: str
    layout: str
    block_tokens: int
    view: str
    provider: str
    case: Case
    seconds: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    dtype: str = ""
    pass_bytes: int = 0

    @property
    def work(self) -> float:
        """Bytes that a decode reads, or operations of a prefill chunk (two products, without masked parts)."""
        heads, case = SHAPES[self.shape], self.case
        if case.queries == 1:
            return case.num_tokens * heads.token_bytes
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
        ("triton", "torch-flash"),  # sdpa reads lengths on the host, which a graph cannot
        num_layers=32,
        cold_bytes=1 << 30,
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
# Of quick runs on a CPU: torch's products of bfloat16 are slow on processors without instructions for them.
QUICK: dict[str, Any] = {
    "num_layers": 4,
    "cold_bytes": 16 << 20,
    "most_tokens": 1 << 14,
    "filled_length": 512,
    "limit_bytes": 256 << 20,
    "limit_size": 512,
    "least_s": 0.01,
}
LAYOUTS: tuple[LayoutKind, ...] = ("interleaved", "per_layer")
VIEWS: tuple[View, ...] = ("region", "block_table")
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
        device = replace(device, repeats=min(3, device.repeats), **QUICK if device is DEVICES["cpu"] else {})
    torch.manual_seed(0)
    where, least_s = torch.device(device.name), min(LEAST_S, device.least_s)
    limits = {  # of decodes, and of prefills
        True: read_limit(where, device.limit_bytes, least_s),
        False: product_limit(where, DTYPE, device.limit_size, least_s),
    }
    rows: list[Row] = []
    for name, heads in SHAPES.items():
        for layout in LAYOUTS:
            for i, block_tokens in enumerate(_block_sizes(args, device, heads, layout)):
                cases, before = _cases(args, device, first=i == 0), len(rows)
                with setting(device, heads, layout, block_tokens, cases) as made:
                    for case in cases:
                        # The figures depend on it, and other processes use the memory, too.
                        often = case == _filled(device) and not args.quick
                        measured = _measure(device, made, name, case, limits, device.repeats * (3 if often else 1))
                        rows += _noted(measured, made)
                    _summary(f"{name}, {layout}, blocks of {made.block_tokens}", rows[before:], device)
    figures = _figures(rows, device)
    footprints = _measure_footprints(device, limits) if args.footprints else []
    for row in footprints:
        gib = row.case.num_tokens * SHAPES[row.shape].token_bytes * device.num_layers / 2**30
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


def _noted(rows: list[Row], made: Setting) -> list[Row]:
    """The same rows, each recorded as it comes."""
    for row in rows:
        record(
            "attention",
            shape=row.shape,
            layout=row.layout,
            block_tokens=row.block_tokens,
            layers_read=len(made.caches["region"]),
            pass_bytes=row.pass_bytes,
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
    for view in VIEWS:
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


def _measure_footprints(device: Device, limits: Mapping[bool, Callable[[], float]]) -> list[Row]:
    """Decodes of the first kernel over all layers in turn."""
    rows: list[Row] = []
    name, heads = next(iter(SHAPES.items()))
    assert device.page_bytes is not None
    settings: tuple[tuple[LayoutKind, int], ...] = (
        ("interleaved", 1),
        ("sliced", 4),
        ("whole", 4),
        ("interleaved", 16),
        ("per_layer", 1),
    )
    for layout, factor in settings:
        token_bytes = heads.token_bytes // 2 if layout == "per_layer" else heads.token_bytes * device.num_layers
        block_tokens = factor * device.page_bytes // token_bytes
        with setting(device, heads, layout, block_tokens, device.footprints, all_layers=True) as made:
            before = len(rows)
            for case in device.footprints:
                measured = _measure(device, made, name, case, limits, device.repeats, device.providers[:1])
                rows += _noted(measured, made)
            _summary(f"{name}, all layers, {layout}, blocks of {made.block_tokens}", rows[before:], device)
    return rows


def _measure(
    device: Device,
    made: Setting,
    shape: str,
    case: Case,
    limits: Mapping[bool, Callable[[], float]],
    repeats: int,
    providers: Sequence[str] = (),
) -> list[Row]:
    """Measure every kernel in every view that it can read, in turn.

    Args:
        limits: of decodes (`True`) and of prefills.
        providers: all of the device's by default.
    """
    query = torch.randn(case.batch * case.queries, made.heads.num_q_heads, made.heads.dim).to(DTYPE).to(device.name)
    runs: list[tuple[Row, Callable[[], float]]] = []
    with made.sequences(case) as sets:
        for view in VIEWS:
            batches = [batch_of(sequences, view, case).to(query.device) for sequences in sets]
            cache = made.caches[view][0][0]
            note_dtypes(query.dtype, cache.dtype)
            for name in providers or device.providers:
                if name == "sdpa" and view == "block_table":
                    continue  # otherwise the gathering would be measured
                row = Row(shape, made.layout, made.block_tokens, view, name, case)
                row.dtype, row.pass_bytes = str(cache.dtype).removeprefix("torch."), made.pass_bytes(case)
                try:
                    with made.memory.mapper.paused():  # the driver's calls must not meet a capture
                        timer = _timer(name, made, view, batches, query, device.least_s)
                except RuntimeError as error:
                    if name == device.providers[0]:
                        raise
                    # A failed kernel has no figures; the others go on.
                    record("attention kernel failed", f"{name} failed: {error}"[:300], case=asdict(case))
                    continue
                if timer is not None:
                    runs.append((row, timer))
        for _ in range(repeats):
            limit_now = limits[case.queries == 1]()
            for row, run in runs:
                row.seconds.append(run())
                row.limits.append(limit_now)
    return [row for row, _ in runs]


_PROVIDERS: dict[tuple[str, str], AttentionProvider | None] = {}


def _timer(
    name: str, made: Setting, view: View, batches: Sequence[VarlenBatch], query: torch.Tensor, least_s: float
) -> Callable[[], float] | None:
    """A function that measures the seconds of one call, of a pass over every batch in every layer; `None` if the kernel
    cannot run the case."""
    layers = made.caches[view]
    key, value = layers[0]
    masking = Masking(made.heads.dim**-0.5)
    if (name, query.device.type) not in _PROVIDERS:
        try:
            _PROVIDERS[name, query.device.type] = select_provider(name, query.device)
        except KernelError as error:
            print(f"no {name} here: {error}")
            _PROVIDERS[name, query.device.type] = None
    provider = _PROVIDERS[name, query.device.type]
    if provider is None or provider.unsupported(AttentionCall(query, key, value, batches[0], masking)):
        return None

    def attend_all() -> None:
        for batch in batches:
            for key, value in layers:
                provider.attend(query, key, value, batch, masking)

    timer = device_timer(attend_all, query.device, least_s)
    timer()  # warm
    return lambda: timer() / (len(batches) * len(layers))


def _figures(rows: Sequence[Row], device: Device) -> dict[str, float]:
    kernel = device.providers[0]
    ours = [row for row in rows if row.provider == kernel]
    filled = [row for row in ours if row.case == _filled(device)]
    figures = {}
    for shape in SHAPES:
        for layout in LAYOUTS:
            for view in VIEWS:
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
        and (region.shape, region.layout, region.block_tokens) == (table.shape, table.layout, table.block_tokens)
    ]
    ratios = [(region, harness.median_ratio(table.seconds, region.seconds)) for region, table in pairs]
    figures["paged_over_contiguous"] = max(ratio for region, ratio in ratios if region in filled)
    decodes = [(region.case.length, ratio) for region, ratio in ratios if region.case.queries == 1]
    figures["paged_over_contiguous_all_cases_median"] = statistics.median(ratio for _, ratio in decodes)
    for length in sorted({length for length, _ in decodes}):
        figures[f"paged_over_contiguous_decode_{length}"] = statistics.median(r for n, r in decodes if n == length)
    for case in {region.case for region, _ in ratios if region.case.queries > 1}:
        of_case = statistics.median(ratio for region, ratio in ratios if region.case == case)
        figures[f"paged_over_contiguous_prefill_{case.batch}x{case.queries}_of_{case.length}"] = of_case
    return figures | _beside_others(rows, ours, device)


def _beside_others(rows: Sequence[Row], ours: Sequence[Row], device: Device) -> dict[str, float]:
    """Time of every other kernel over that of Folio's in the same cases: the worst, and the median."""
    kernel = device.providers[0]
    figures: dict[str, float] = {}
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
