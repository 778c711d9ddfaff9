"""Picture of `benchmarks.routing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.picture import LIMIT, OURS, RIVALS, picture, plain_numbers

_POLICIES = {
    "prefix_aware": ("Folio (prefix_aware)", OURS[0]),
    "least_loaded": ("least loaded", OURS[2]),
    "round_robin": ("round robin", RIVALS[4]),
    "consistent_hash": ("consistent hash", RIVALS[0]),
    "ray_affinity": ("Ray's prefix affinity", RIVALS[1]),
    "ray_affinity_10": ("Ray's prefix affinity, threshold 10", RIVALS[5]),
    "kv_aware": ("Ray's KVAwareRouter", RIVALS[2]),
}
LINEAR_S = 100.0  # with longer times the axis is logarithmic
_SCALING = {"code": "code completions at their own times", "code_bursts": "the same in bursts"}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Hits and TTFT of every policy at all fleet sizes, for conversations and agents; and the autoscaled fleet over
    time."""
    raw = result["raw"]
    title = "Routing, simulated: Mooncake's conversations, and agents, on Llama-2-70B"
    with picture(result, path, title, rows=3, columns=2, height=9.2) as (figure, plots):
        _draw_policies(plots[:2], raw["routing"], "Conversations")
        _draw_policies(plots[2:4], raw["agents"], "Agents")
        handles, labels = plots[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        for plot, (name, run) in zip(plots[4:], raw["autoscaling"].items(), strict=True):
            steps = run["autoscaled"]["fleet_sizes"]
            for column, label, colour in ((1, "ordered", RIVALS[1]), (2, "running", OURS[0])):
                points = [(step[0] / 60, step[column]) for step in steps]
                plot.step(*zip(*points, strict=True), where="post", label=label, color=colour)
            plot.set(xlabel="minutes", ylabel="replicas", title=f"Autoscaling, {_SCALING[name]}", ylim=(0, None))
            plot.legend(loc="lower center")


def _draw_policies(plots: Sequence[Any], runs: Sequence[Mapping[str, Any]], name: str) -> None:
    sizes = list(dict.fromkeys(run["num_replicas"] for run in runs))
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    width = 0.84 / len(policies)
    left, right = plots
    for plot, key in ((left, "hit_share"), (right, "ttft_p99_s")):
        for j, policy in enumerate(policies):
            values = [run[key] * (100 if key == "hit_share" else 1) for run in runs if run["policy"] == policy]
            at = [i + (j - (len(policies) - 1) / 2) * width for i in range(len(sizes))]
            label, colour = _POLICIES[policy]
            plot.bar(at, values, 0.95 * width, color=colour, label=label)
        plot.set_xticks(range(len(sizes)), [f"{size} replicas" for size in sizes])
        plot.grid(axis="x", visible=False)
    left.set(ylabel="prompt tokens found, %", title=f"{name}: hits")
    if max(run["ttft_p99_s"] for run in runs) > LINEAR_S:
        right.set_yscale("log")
        plain_numbers(right)
    right.set(ylabel="99th percentile, s", title=f"{name}: time to first token")
    for i, size in enumerate(sizes):
        single = next(run["single_hit_share"] for run in runs if run["num_replicas"] == size) * 100
        first = None if i else "one cache as large as all"
        left.hlines(single, i - 0.46, i + 0.46, color=LIMIT, linestyle="--", linewidth=1.4, label=first)
