"""Which runs are made, and the figures that follow from their outcomes."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.papers.outcome import FOLIO, Outcome, Run
from benchmarks.papers.requests import TRACE, Kind

# From the least to the best, as in the paper.
ORDER = ("static", "max", "pow2", "oracle", FOLIO)
ORCAS = ("max", "pow2", "oracle")
# A rate is held while the mean normalised latency is at most this many seconds a token; on this machine, at most this
# many times Folio's at the lowest rate.
HELD_S, HELD_TIMES = 0.5, 3.0
AT_ONCE = 1e6  # requests a second: all wait from the start
# Latencies below this ratio of one another are equal: systems that wait for nothing do the same steps.
EQUAL = {"simulated": 1.03, "real": 1.15}  # of equal runs on this machine, the nearest ones
WIDTHS = (2, 4, 6)
SEVERAL = [Kind("alpaca", width, beams=beams) for beams in (False, True) for width in WIDTHS]
PREFIXES, CHAT = (Kind("one_example"), Kind("five_examples")), Kind("chat")
BASIC, TRACED = (Kind("sharegpt"), Kind("alpaca")), Kind("servegen")
LARGER = (Kind("sharegpt", model="opt_66b"), Kind("sharegpt", model="opt_175b"))
# Of the runs by block size.
BLOCKS_SEED = 1
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One kind of requests, for several systems and rates.

    Attributes:
        rates: requests a second; for all systems the same.
        duration_s: in which requests arrive.
    """

    kind: Kind
    systems: tuple[str, ...]
    rates: tuple[float, ...]
    duration_s: float

    def runs(self) -> list[Run]:
        return [Run(system, self.kind, rate, self.duration_s) for system in self.systems for rate in self.rates]


SIMULATED: tuple[Sweep, ...] = (
    Sweep(BASIC[0], ORDER, (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5), 1200.0),
    Sweep(BASIC[1], ORDER, (2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0, 80.0), 240.0),
    Sweep(TRACED, ORDER, (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0), 600.0),
    Sweep(LARGER[0], ("max", "oracle", FOLIO), (0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5), 1200.0),
    Sweep(LARGER[1], ("max", "oracle", FOLIO), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), 900.0),
    *(Sweep(kind, ("max", "pow2", "oracle", FOLIO), (1.0, 3.0, 6.0, 9.0, 12.0, 16.0, 24.0), 90.0) for kind in SEVERAL),
    Sweep(PREFIXES[0], ("oracle", FOLIO), (20.0, 30.0, 35.0, 40.0, 50.0, 60.0, 75.0, 90.0, 110.0), 90.0),
    Sweep(PREFIXES[1], ("oracle", FOLIO), (5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 75.0), 90.0),
    Sweep(CHAT, ("max", "pow2", "oracle", FOLIO), (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0), 1200.0),
)
# Blocks of each size, at a rate that those of 16 tokens just hold.
BLOCK_RATES = {"sharegpt": (3.0, 600.0), "alpaca": (64.0, 60.0)}


def simulated_runs(*, quick: bool) -> list[Run]:
    """All runs of the simulator; those of the trace if it is there."""
    if not TRACE.is_file():
        print(f"not measured: servegen, because there is no {TRACE.name} (github.com/alibaba/ServeGen)")
    sweeps = [sweep for sweep in SIMULATED if sweep.kind != TRACED or TRACE.is_file()]
    runs = [run for sweep in sweeps for run in (_few(sweep) if quick else sweep).runs()]
    for dataset, (rate, duration_s) in BLOCK_RATES.items():
        sizes = BLOCK_SIZES[::4] if quick else BLOCK_SIZES
        seconds = duration_s / 10 if quick else duration_s
        runs += [Run(FOLIO, Kind(dataset), rate, seconds, size, BLOCKS_SEED) for size in sizes]
    return sorted(runs, key=lambda run: -run.rate * run.duration_s * run.kind.num_sequences)


def _few(sweep: Sweep) -> Sweep:
    """A sweep for quick runs: three rates, a twentieth of the time, and of several sequences the widest."""
    if 1 < sweep.kind.num_sequences < WIDTHS[-1]:
        return replace(sweep, rates=())
    rates = (sweep.rates[0], sweep.rates[len(sweep.rates) // 2], sweep.rates[-1])
    return replace(sweep, rates=rates, duration_s=sweep.duration_s / 20)


Outcomes = Mapping[Run, Outcome]


def repeated(outcomes: Outcomes, system: str, kind: Kind) -> dict[float, list[Outcome]]:
    """Rate → outcomes of equal runs. Rates ascend; the last one may be that of all requests at once."""
    found: dict[float, list[Outcome]] = {}
    for run, seen in sorted(outcomes.items(), key=lambda item: item[0].rate):
        if (run.system, run.kind) == (system, kind) and run.seed != BLOCKS_SEED:
            found.setdefault(run.rate, []).append(seen)
    return found


def curve(outcomes: Outcomes, system: str, kind: Kind) -> list[tuple[float, Outcome]]:
    """(rate, outcome) in ascending order; of equal runs the means."""
    return [(rate, _mean(seen)) for rate, seen in repeated(outcomes, system, kind).items()]


def _mean(equal: Sequence[Outcome]) -> Outcome:
    names = ("mean_s", "median_s", "batched", "throughput", "saved", "preempted")
    return replace(equal[0], **{name: statistics.mean(getattr(seen, name) for seen in equal) for name in names})


def held_rate(points: Sequence[tuple[float, Outcome]], held_s: float) -> float:
    """The highest rate at which the mean normalised latency is at most `held_s`, between two measured rates by the
    logarithms of the latencies; below the lowest in proportion."""
    before: tuple[float, float] | None = None
    for rate, seen in points:
        if seen.mean_s > held_s:
            if before is None:
                return rate * held_s / seen.mean_s
            low, low_s = before
            return low + (rate - low) * math.log(held_s / low_s) / math.log(seen.mean_s / low_s)
        before = rate, seen.mean_s
    return points[-1][0]


def held_s(curves: Mapping[str, Sequence[tuple[float, Outcome]]], where: str) -> float:
    """The latency up to which a rate is held."""
    return HELD_S if where == "simulated" else HELD_TIMES * curves[FOLIO][0][1].mean_s


def order_share(outcomes: Outcomes, kind: Kind, equal: float) -> float:
    """Share of the rates above the first at which no system has a lower latency than one that is better in `ORDER`; of
    equal runs, in all of them."""
    latencies = [
        {
            rate: [one.mean_s for one in seen]
            for rate, seen in repeated(outcomes, system, kind).items()
            if rate < AT_ONCE
        }
        for system in ORDER
    ]
    right = [
        all(max(worse[rate]) * equal >= min(better[rate]) for worse, better in itertools.pairwise(latencies))
        for rate in list(latencies[0])[1:]
    ]
    return sum(right) / len(right)


def spread(outcomes: Outcomes, kind: Kind) -> float:
    """The largest ratio of the latencies of two equal runs; 1 if none was repeated."""
    latencies = [[one.mean_s for one in seen] for system in ORDER for seen in repeated(outcomes, system, kind).values()]
    return max(max(equal) / min(equal) for equal in latencies)


def figures(outcomes: Outcomes, where: str) -> dict[str, float]:
    """Figures of all outcomes; each key begins with `where` they were measured: "simulated" or "real"."""
    found: dict[str, float] = {}
    kinds = list(dict.fromkeys(run.kind for run in outcomes))
    for kind in kinds:
        systems = [system for system in ORDER if curve(outcomes, system, kind)]
        curves = {system: curve(outcomes, system, kind) for system in systems}
        for system, points in curves.items():
            key, busiest = f"{kind.name}_{system}", points[-1][1]
            rated = [point for point in points if point[0] < AT_ONCE]
            if len(rated) > 1:
                found[f"rate_{key}"] = held_rate(rated, held_s(curves, where))
            found[f"batched_{key}"] = busiest.batched
            found[f"throughput_{key}"] = max(seen.throughput for _, seen in points)
            if kind.num_sequences == 1 and kind not in PREFIXES and busiest.shares is not None:
                names = ("state", "reserved", "unused", "free")
                found |= {f"{n}_share_{key}": s for n, s in zip(names, busiest.shares, strict=True)}
            if system == FOLIO:  # as requests arrive, if that is measured, and not all at once
                found[f"saved_{kind.name}"] = (rated or points)[-1][1].saved
                found[f"preempted_{kind.name}"] = busiest.preempted
        for system in systems:
            if system != FOLIO and FOLIO in systems:
                key = f"{kind.name}_vs_{system}"
                if f"rate_{kind.name}_{system}" in found:
                    found[f"rate_{key}"] = found[f"rate_{kind.name}_{FOLIO}"] / found[f"rate_{kind.name}_{system}"]
                found[f"batched_{key}"] = found[f"batched_{kind.name}_{FOLIO}"] / found[f"batched_{kind.name}_{system}"]
                ours, theirs = (found[f"throughput_{kind.name}_{name}"] for name in (FOLIO, system))
                found[f"throughput_{key}"] = ours / theirs
        if set(systems) == set(ORDER) and len(curves[FOLIO]) > 1:
            found[f"order_{kind.name}"] = order_share(outcomes, kind, EQUAL[where])
            if where == "real":
                found[f"spread_{kind.name}"] = spread(outcomes, kind)
    for run, seen in outcomes.items():
        if run.seed == BLOCKS_SEED:
            found[f"block_{run.block_tokens}_s_{run.kind.name}"] = seen.mean_s
    for what, kind, usual in (("larger", LARGER[0], BASIC[0]), ("longer", BASIC[0], BASIC[1])):
        gains = [found.get(f"rate_{one.name}_vs_oracle") for one in (kind, usual)]
        if gains[0] and gains[1]:
            found[f"{what}_over_usual_gain"] = gains[0] / gains[1]
    return {f"{where}_{key}": value for key, value in found.items()}


def raw(outcomes: Outcomes) -> list[dict[str, object]]:
    """All runs and outcomes, as written to the result."""
    return [asdict(run) | {"kind": run.kind.name} | asdict(seen) for run, seen in outcomes.items()]
