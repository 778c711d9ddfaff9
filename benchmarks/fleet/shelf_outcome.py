"""Outcome of a replay of `benchmarks.shelf`: requests within their latency targets, by popularity, and the picture."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet.shelf_models import BenchModel, ModelAsk
from benchmarks.harness import percentile
from benchmarks.picture import LIMIT, OURS, RIVALS, legend_below, picture
from benchmarks.serving.latency import Targets
from folio.app.cli.bench.load import Record

# Multiples of the latency targets; the figures without a scale are of 1.
SCALES = (0.5, 1.0, 2.0, 4.0)
# Popularity: name → ranks.
GROUPS = {"first": range(1), "next3": range(1, 4), "others": range(4, 12)}
NAMES = {"folio": "Folio", "static": "static split", "swap": "one process at a time"}
COLOURS = {"folio": OURS[0], "static": RIVALS[0], "swap": RIVALS[1]}
SAMPLE_S = 0.5

Curve = list[tuple[float, int]]


@asynccontextmanager
async def memory_curve(num_bytes: Callable[[], Awaitable[int]]) -> AsyncIterator[Curve]:
    """(seconds since the begin, bytes), which grows within this context.

    Args:
        num_bytes: bytes of weights and KV caches at this moment.
    """
    loop = asyncio.get_running_loop()
    points: Curve = []
    began = loop.time()

    async def sample() -> None:
        while True:
            points.append((loop.time() - began, await num_bytes()))
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.create_task(sample())
    try:
        yield points
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way of serving.

    Attributes:
        asks, records: in the same order.
        curve: bytes of weights and KV caches over time.
        facts: of this way of serving.
    """

    asks: Sequence[ModelAsk]
    records: Sequence[Record]
    curve: Curve
    facts: Mapping[str, Any] = field(default_factory=dict)

    def good_share(self, targets: Mapping[str, Targets], scale: float = 1.0) -> float:
        """Share of all requests within the targets of their models times `scale`."""
        return statistics.fmean(self._good(targets, scale))

    def good_share_of_models(self, targets: Mapping[str, Targets]) -> float:
        """The mean of the models' shares: each model counts the same."""
        good = list(self._good(targets, 1.0))
        return statistics.fmean(
            statistics.fmean(is_good for is_good, ask in zip(good, self.asks, strict=True) if ask.model == model)
            for model in {ask.model for ask in self.asks}
        )

    def ttft_s(self, names: Sequence[str], percent: float) -> float:
        """Of the requests to these models that were answered whole."""
        pairs = zip(self.asks, self.records, strict=True)
        return percentile([r.ttft_s for ask, r in pairs if r.completed and ask.model in names], percent)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of complete answers."""
        end_s = max(record.ended_s or 0.0 for record in self.records)
        return sum(record.num_tokens for record in self.records if record.completed) / end_s

    def _good(self, targets: Mapping[str, Targets], scale: float) -> list[bool]:
        wider = {name: Targets(scale * t.ttft_s, scale * t.tpot_s) for name, t in targets.items()}
        return [wider[ask.model].met_by(record) for ask, record in zip(self.asks, self.records, strict=True)]

    def figures(self, models: Sequence[BenchModel], targets: Mapping[str, Targets]) -> dict[str, float]:
        figures = {f"slo_attainment_scale_{scale:g}": self.good_share(targets, scale) for scale in SCALES}
        figures |= {
            "slo_attainment": self.good_share(targets),
            "slo_attainment_of_models": self.good_share_of_models(targets),
            "tokens_per_s": self.tokens_per_s,
            "completed_share": statistics.fmean(record.completed for record in self.records),
            "peak_mib": max((num_bytes for _, num_bytes in self.curve), default=0) / 2**20,
        }
        for group, ranks in GROUPS.items():
            names = [models[rank].name for rank in ranks]
            for percent in (50, 99):
                if (ttft_s := self.ttft_s(names, percent)) == ttft_s:  # NaN where none was answered
                    figures[f"ttft_ms_p{percent}_{group}"] = 1e3 * ttft_s
        return figures

    def as_dict(self) -> dict[str, Any]:
        """Raw data."""
        return {
            "requests": [
                (ask.model, round(ask.at_s, 3), len(ask.prompt), ask.max_tokens, r.status)
                + ((round(r.ttft_s, 4), round(r.tpot_s, 5)) if r.completed else ())
                for ask, r in zip(self.asks, self.records, strict=True)
            ],
            "curve": [(round(at_s, 2), num_bytes) for at_s, num_bytes in self.curve],
        } | dict(self.facts)


def print_table(figures: Mapping[str, Mapping[str, float]]) -> None:
    """A row for each way of serving."""
    columns = [f"slo_attainment_scale_{scale:g}" for scale in SCALES]
    head = [*(f"SLO x{scale:g}" for scale in SCALES), "of models", "tokens/s"]
    head += [f"{group} p{percent}" for group in GROUPS for percent in (50, 99)]
    print(f"{'':24s}" + "".join(f"{title:>12s}" for title in head))
    for name, row in figures.items():
        cells = [f"{row[key]:.1%}" for key in (*columns, "slo_attainment_of_models")] + [f"{row['tokens_per_s']:.1f}"]
        times = [row.get(f"ttft_ms_p{percent}_{group}") for group in GROUPS for percent in (50, 99)]
        cells += ["-" if time_ms is None else f"{time_ms:.0f} ms" for time_ms in times]
        print(f"{NAMES[name]:24s}" + "".join(f"{cell:>12s}" for cell in cells))


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Requests within their targets by scale, and memory over time, a line for each way of serving."""
    ways = [name for name in NAMES if name in result["raw"]["ways"]]
    with picture(result, path, "Twelve models in the memory of three", columns=2, height=3.9) as (
        figure,
        (slo, memory),
    ):
        for name in ways:
            shares = [100 * result["figures"][f"{name}_slo_attainment_scale_{scale:g}"] for scale in SCALES]
            slo.plot(SCALES, shares, "-o", color=COLOURS[name], label=NAMES[name])
            curve = result["raw"]["ways"][name]["curve"]
            at_s, num_bytes = [at for at, _ in curve], [size / 2**30 for _, size in curve]
            memory.plot(at_s, num_bytes, color=COLOURS[name], linewidth=1.2)
        budget = result["raw"]["budget_bytes"] / 2**30
        memory.axhline(budget, color=LIMIT, linestyle=":", label="budget")
        slo.plot([], [], color=LIMIT, linestyle=":", label="budget")
        slo.set_xscale("log", base=2)
        slo.set_xticks(SCALES, [f"{scale:g}" for scale in SCALES])
        slo.set(title="Requests within their targets", xlabel="targets times", ylabel="%", ylim=(0, 100))
        memory.set(title="Weights and KV caches", xlabel="s", ylabel="GiB", ylim=(0, None))
        legend_below(figure, slo, 2)
