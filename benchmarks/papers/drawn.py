"""Pictures of `benchmarks.papers`, in the papers' form, from a result's JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.papers.sweep import AT_ONCE, BLOCK_SIZES, BLOCKS_SEED, CHAT, ORDER, PREFIXES, SEVERAL, WIDTHS
from benchmarks.picture import LIMIT, OURS, RIVALS, bars, legend_below, picture

Points = list[tuple[float, float, float]]  # (rate, seconds a token: mean, median)

NAMES = {
    "static": "whole batches, maximum reserved",
    "max": "maximum reserved (Orca Max)",
    "pow2": "powers of two (Orca Pow2)",
    "oracle": "true length reserved (Orca Oracle)",
    "folio": "Folio",
}
COLOURS = {"static": RIVALS[4], "max": RIVALS[0], "pow2": RIVALS[1], "oracle": RIVALS[2], "folio": OURS[0]}
WHERE = {"simulated": "OPT-13B on an A100, simulated", "real": "SmolLM2-135M on this machine"}
DATASETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
SHARES = {"state": "tokens", "reserved": "reserved for later tokens", "unused": "never used", "free": "free"}
# Mean percentages of the papers' figures.
PAPER_STATE = {"max": 20.4, "pow2": 26.8, "oracle": 38.2, "folio": 96.3}
PAPER_BATCHED = {
    "sharegpt": {"max": 7.0, "pow2": 9.81, "oracle": 13.62, "folio": 30.42},
    "alpaca": {"max": 7.0, "pow2": 43.24, "oracle": 72.75, "folio": 132.44},
}
PAPER_SAVED = {"parallel": (6.09, 8.53, 9.79), "beam": (37.56, 53.13, 55.16)}


def curves(result: Mapping[str, Any], where: str, kind: str) -> dict[str, Points]:
    """System → points of normalised latency, of equal runs the means."""
    found: dict[str, dict[float, list[Any]]] = {}
    for row in result["raw"][where]:
        if row["kind"] == kind and row["seed"] != BLOCKS_SEED and row["rate"] < AT_ONCE:
            found.setdefault(row["system"], {}).setdefault(row["rate"], []).append(row)
    return {
        system: [
            (rate, fmean(row["mean_s"] for row in equal), fmean(row["median_s"] for row in equal))
            for rate, equal in sorted(found[system].items())
        ]
        for system in ORDER
        if system in found
    }


def draw_curves(plot: Any, found: Mapping[str, Points], most_s: float, title: str) -> None:
    for system, points in found.items():
        rates, means, medians = zip(*points, strict=True)
        plot.plot(rates, means, marker="o", color=COLOURS[system], label=NAMES[system])
        plot.plot(rates, medians, linestyle=":", linewidth=1.2, color=COLOURS[system])
    plot.set(ylim=(0, most_s), xlim=(0, None), xlabel="requests a second", title=title)


def latency(result: Mapping[str, Any], path: Path) -> None:
    """PagedAttention's figure 12."""
    title = "Normalised latency by rate of requests"
    with picture(result, path, title, rows=2, columns=2, height=6.6) as (figure, plots):
        for i, (where, kind) in enumerate((where, kind) for where in WHERE for kind in DATASETS):
            if not (found := curves(result, where, kind)):  # quick runs have no rates on this machine
                continue
            most_s = 1.0 if where == "simulated" else 8 * found["folio"][0][1]
            draw_curves(plots[i], found, most_s, f"{DATASETS[kind]}, {WHERE[where]}")
            plots[i].set_ylabel("s a token (dotted: median)" if i % 2 == 0 else "")
        legend_below(figure, plots[0], 3)


def memory(result: Mapping[str, Any], path: Path) -> None:
    """PagedAttention's figure 2."""
    systems = [system for system in ORDER if system != "static"]
    with picture(result, path, "What the KV memory holds while requests wait (ShareGPT)", height=3.0) as (
        figure,
        plots,
    ):
        [plot] = plots
        left = [0.0] * len(systems)
        for name, colour in zip(SHARES, (OURS[0], OURS[2], RIVALS[5], RIVALS[4]), strict=True):
            key = f"simulated_{name}_share_sharegpt_"
            widths = [max(100 * result["figures"].get(key + system, 0.0), 0.0) for system in systems]
            plot.barh([NAMES[s] for s in systems], widths, left=left, color=colour, height=0.66, label=SHARES[name])
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for i, system in enumerate(systems):
            label = "tokens in the paper" if i == 0 else None
            plot.plot([PAPER_STATE[system]] * 2, [i - 0.4, i + 0.4], color=LIMIT, linewidth=2, label=label)
        plot.set(xlabel="% of the KV memory", xlim=(0, 100))
        plot.grid(axis="y", visible=False)
        legend_below(figure, plot, 5)


def batched(result: Mapping[str, Any], path: Path) -> None:
    """PagedAttention's figure 13."""
    systems = [system for system in ORDER if system != "static"]
    with picture(result, path, "Requests in a batch, at the highest rate", columns=2, height=2.9) as (figure, plots):
        for plot, kind in zip(plots, DATASETS, strict=True):
            values = {NAMES[s].split(" (")[0]: result["figures"][f"simulated_batched_{kind}_{s}"] for s in systems}
            bars(plot, values, [COLOURS[system] for system in systems], "%.1f")
            label = "the paper's"
            plot.scatter(
                [PAPER_BATCHED[kind][s] for s in systems], list(values), marker="|", s=260, color=LIMIT, label=label
            )
            plot.set(xlabel="requests, mean", title=f"{DATASETS[kind]}, simulated")
        plots[1].set_yticklabels([])
        legend_below(figure, plots[0], 1)


def decoding(result: Mapping[str, Any], path: Path) -> None:
    """PagedAttention's figure 14."""
    title = "Samples and beams (Alpaca, OPT-13B on an A100, simulated)"
    with picture(result, path, title, rows=2, columns=3, height=5.4, sharey=True) as (figure, plots):
        for plot, kind in zip(plots, SEVERAL, strict=True):
            what = "beams" if kind.beams else "samples"
            draw_curves(plot, curves(result, "simulated", kind.name), 1.0, f"{kind.num_sequences} {what}")
        for plot in plots[::3]:
            plot.set_ylabel("s a token (dotted: median)")
        legend_below(figure, plots[0], 2)


def saved(result: Mapping[str, Any], path: Path) -> None:
    """PagedAttention's figure 15."""
    with picture(result, path, "Blocks saved by sharing (Alpaca)", columns=2, height=3.0, sharey=True) as (
        figure,
        plots,
    ):
        for plot, (method, paper) in zip(plots, PAPER_SAVED.items(), strict=True):
            at = list(range(len(WIDTHS)))
            rows = {"PagedAttention's paper": paper}
            for where, name in (("simulated", "simulated"), ("real", "SmolLM2-135M")):
                keys = [f"{where}_saved_alpaca_{method}_{width}" for width in WIDTHS]
                rows[name] = tuple(100 * result["figures"].get(key, 0.0) for key in keys)
            for i, ((name, values), colour) in enumerate(zip(rows.items(), (RIVALS[0], OURS[1], OURS[0]), strict=True)):
                drawn = plot.bar([x + 0.27 * (i - 1) for x in at], values, width=0.25, color=colour, label=name)
                plot.bar_label(drawn, fmt="%.0f", fontsize=8)
            plot.set_xticks(at, [str(width) for width in WIDTHS])
            plot.set(xlabel="samples" if method == "parallel" else "beams")
            plot.grid(axis="x", visible=False)
        plots[0].set_ylabel("% of blocks")
        legend_below(figure, plots[0], 3)


def prefix(result: Mapping[str, Any], path: Path) -> None:
    """PagedAttention's figures 16 and 17."""
    titles = ("common prefix, 80 tokens", "common prefix, 341 tokens", "conversations, window 1,024")
    title = "Common prefixes and conversations (13B on an A100, simulated)"
    with picture(result, path, title, columns=3, height=3.4, sharey=True) as (figure, plots):
        for plot, kind, name in zip(plots, (*PREFIXES, CHAT), titles, strict=True):
            draw_curves(plot, curves(result, "simulated", kind.name), 1.0, name)
        plots[0].set_ylabel("s a token (dotted: median)")
        legend_below(figure, plots[2], 2)


def blocks(result: Mapping[str, Any], path: Path) -> None:
    """PagedAttention's figure 18b."""
    with picture(result, path, "Latency by tokens of a block", columns=2, height=3.0) as (figure, plots):
        for plot, where in zip(plots, WHERE, strict=True):
            for kind, colour in zip(DATASETS, (OURS[0], RIVALS[1]), strict=True):
                key = f"{where}_block_{{}}_s_{kind}"
                sizes = [size for size in BLOCK_SIZES if key.format(size) in result["figures"]]
                best = min(result["figures"][key.format(size)] for size in sizes)
                values = [result["figures"][key.format(size)] / best for size in sizes]
                plot.plot(sizes, values, marker="o", color=colour, label=DATASETS[kind])
            plot.set(xscale="log", xlabel="tokens of a block", title=WHERE[where], ylim=(0, None))
            plot.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES], minor=False)
            plot.minorticks_off()
        plots[0].set_ylabel("latency over the best size's")
        legend_below(figure, plots[0], 2)


def iterations(result: Mapping[str, Any], path: Path) -> None:
    """vAttention's figure 12."""
    titles = {"per_layer": "a buffer for each layer's keys and values", "sliced": "Folio: several layers a page"}
    title = "Decode iterations of 4 × 32K tokens, Llama-3-8B on an H200, simulated"
    with picture(result, path, title, columns=2, height=3.0, sharey=True) as (figure, plots):
        for plot, (layout, name) in zip(plots, titles.items(), strict=True):
            for mode, colour, label in (
                ("synchronous", RIVALS[1], "mapped when needed"),
                ("all", OURS[0], "mapped in the background"),
            ):
                plot.plot(result["raw"]["iterations_ms"][f"{layout} {mode}"], color=colour, label=label, linewidth=1.2)
            plot.set(xlabel="iteration", title=name, ylim=(0, None))
        plots[0].set_ylabel("milliseconds")
        legend_below(figure, plots[0], 2)


PICTURES: Mapping[str, Callable[[Mapping[str, Any], Path], None]] = {
    "": latency,
    "-memory": memory,
    "-batched": batched,
    "-decoding": decoding,
    "-saved": saved,
    "-prefix": prefix,
    "-blocks": blocks,
    "-iterations": iterations,
}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """All pictures: `papers.png`, `papers-memory.png` …"""
    for suffix, one in PICTURES.items():
        one(result, path.with_name(f"{path.stem}{suffix}{path.suffix}"))


def pictures(stem: str = "papers") -> Sequence[str]:
    """Names of the pictures' files."""
    return [f"{stem}{suffix}.png" for suffix in PICTURES]
