"""Latency statistics of a run, and their chart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import percentile
from benchmarks.picture import LIMIT, OURS, RIVALS, legend_below, picture
from folio.app.cli.bench.load import Record

_NAMES = {"folio": "Folio"}
_PERCENTILES = {"p50": "median", "p99": "99th percentile"}


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets. A request is good if it meets both (goodput: DistServe, OSDI 2024)."""

    ttft_s: float
    tpot_s: float

    def met_by(self, record: Record) -> bool:
        return record.completed and record.ttft_s <= self.ttft_s and record.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run; NaN where no request completed.

    Attributes:
        rate: requests due per second.
        normalised_ms: mean seconds per token (PagedAttention's figure 12), times 1,000.
        gap_ms_p99: between two events of one request.
        good_share, good_per_s: requests that met the targets, of those that were due.
        late_ms_p99: delay of sending; when it is not small, the load generator was the bottleneck.
    """

    rate: float
    requests: int
    completed: int
    refused: int
    failed: int
    lost: int
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    gap_ms_p99: float
    normalised_ms: float
    good_share: float
    good_per_s: float
    late_ms_p99: float

    @staticmethod
    def of(records: Sequence[Record], duration_s: float, targets: Targets) -> Summary:
        """The summary of a run.

        Args:
            duration_s: time in which the requests were due.
        """
        completed = [record for record in records if record.completed]
        good = sum(map(targets.met_by, records))
        ttft_s, tpot_s = [r.ttft_s for r in completed], [r.tpot_s for r in completed]
        normalised_s = [r.answered_s / r.num_tokens for r in completed]
        gaps_s = [after[0] - before[0] for r in completed for before, after in itertools.pairwise(r.events)]
        return Summary(
            rate=len(records) / duration_s,
            requests=len(records),
            completed=len(completed),
            refused=sum(r.refused for r in records),
            failed=sum(r.failed for r in records),
            lost=sum(r.lost for r in records),
            tokens_per_s=sum(r.num_tokens for r in completed) / max(duration_s, *(r.ended_s or 0.0 for r in records)),
            ttft_ms_p50=1e3 * percentile(ttft_s, 50),
            ttft_ms_p99=1e3 * percentile(ttft_s, 99),
            tpot_ms_p50=1e3 * percentile(tpot_s, 50),
            tpot_ms_p99=1e3 * percentile(tpot_s, 99),
            gap_ms_p99=1e3 * percentile(gaps_s, 99),
            normalised_ms=1e3 * sum(normalised_s) / len(normalised_s) if normalised_s else math.nan,
            good_share=good / len(records),
            good_per_s=good / duration_s,
            late_ms_p99=1e3 * percentile([r.sent_s - r.due_s for r in records if r.sent_s is not None], 99),
        )

    def as_dict(self) -> dict[str, float | None]:
        """Fields for JSON, which has no NaN."""
        return {name: None if math.isnan(value) else round(value, 4) for name, value in asdict(self).items()}


def tokens_per_s(records: Sequence[Record], begin_s: float, end_s: float) -> float:
    """Output tokens of completed requests per second."""
    return sum(_tokens_between(r, begin_s, end_s) for r in records if r.completed) / (end_s - begin_s)


def _tokens_between(record: Record, begin_s: float, end_s: float) -> float:
    """Tokens in a time range. Events do not state their tokens: tokens are spread in proportion to text."""
    characters = sum(count for _, count in record.events)
    inside = sum(count for at, count in record.events if begin_s <= at < end_s)
    return record.num_tokens * inside / characters if characters else 0.0


def slope_per_minute(points: list[tuple[float, float]]) -> float:
    """Slope of the least-squares line through (seconds, value), per minute."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 60 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


HEADINGS = ("rate", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "gap p99", "ms/token", "good", "refused", "lost")


def print_table(summaries: Mapping[str, Sequence[Summary]]) -> None:
    print(f"{'':16s}" + "".join(f"{heading:>10s}" for heading in HEADINGS))
    for name, runs in summaries.items():
        for s in runs:
            cells = (
                f"{s.rate:.2f}/s",
                f"{s.tokens_per_s:.1f}",
                *(f"{ms:.0f} ms" for ms in (s.ttft_ms_p50, s.ttft_ms_p99, s.tpot_ms_p50, s.tpot_ms_p99, s.gap_ms_p99)),
                f"{s.normalised_ms:.0f}",
                f"{s.good_share:.0%}",
                f"{s.refused}",
                f"{s.lost + s.failed}",
            )
            print(f"{name:16s}" + "".join(f"{cell:>10s}" for cell in cells))


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Time to first token, time per token, and the share of good requests over the rate, a line for each server."""
    loads, goal = result["raw"]["loads"], result["raw"]["targets"]
    title = "Latency over HTTP under Poisson arrivals"
    with picture(result, path, title, columns=3, height=3.9) as (figure, (ttft, tpot, good)):
        for number, (name, runs) in enumerate(loads.items()):
            colour = OURS[0] if name == "folio" else RIVALS[number % len(RIVALS)]
            rates = [run["rate"] for run in runs]
            for plot, key, scale in ((ttft, "ttft_ms", 1e-3), (tpot, "tpot_ms", 1.0)):
                for percent, style in (("p50", "-o"), ("p99", "--s")):
                    values = [run[f"{key}_{percent}"] * scale for run in runs]
                    label = f"{_NAMES.get(name, name)}, {_PERCENTILES[percent]}"
                    plot.plot(rates, values, style, color=colour, label=label)
            good.plot(rates, [100 * run["good_share"] for run in runs], "-o", color=colour)
        ttft.axhline(goal["ttft_s"], color=LIMIT, linestyle=":", label="target of a good request")
        tpot.axhline(1e3 * goal["tpot_s"], color=LIMIT, linestyle=":")
        ttft.set(title="Time to first token", ylabel="s")
        tpot.set(title="Time per further token", ylabel="ms")
        good.set(title="Goodput", ylabel="% of requests that meet both targets")
        for plot in (ttft, tpot, good):
            plot.set(xlabel="requests a second", xlim=(0, None), ylim=(0, None))
        legend_below(figure, ttft, 3)
