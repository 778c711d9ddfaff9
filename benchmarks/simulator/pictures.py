"""Charts of `benchmarks.routing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness

_COLORS = {
    "prefix_aware": "#2a6f97",
    "least_loaded": "#c9dbe6",
    "round_robin": "#adb5bd",
    "consistent_hash": "#61a5c2",
    "ray_affinity": "#e07a5f",
    "ray_affinity_10": "#f2cc8f",
    "kv_aware": "#81b29a",
}


def draw(
    runs: Sequence[Mapping[str, Any]],
    agents: Sequence[Mapping[str, Any]],
    scaling: Mapping[str, Any],
    path: Path,
) -> None:
    """Plot hits and TTFT of every policy at all fleet sizes, for conversations and agents; and the autoscaled fleet
    over time."""
    pyplot = harness.pyplot()
    if pyplot is None:
        return
    figure, (top, middle, bottom) = pyplot.subplots(3, 2, figsize=(10, 9), layout="constrained")
    for row, some, name in ((top, runs, "conversations"), (middle, agents, "agents")):
        _draw_policies(row, some, name)
    figure.legend(*top[0].get_legend_handles_labels(), loc="outside upper center", ncols=8, fontsize=7)
    for axes, (name, result) in zip(bottom, scaling.items(), strict=True):
        steps = result["autoscaled"]["fleet_sizes"]
        for column, label in ((1, "ordered"), (2, "running")):
            points = [(step[0] / 60, step[column]) for step in steps]
            axes.step(*zip(*points, strict=True), where="post", label=label, color=("#e07a5f", "#2a6f97")[column - 1])
        axes.set_xlabel(f"minutes, {name.replace('_', ', ')}")
        axes.set_ylabel("replicas")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _draw_policies(row: Any, runs: Sequence[Mapping[str, Any]], name: str) -> None:
    sizes = list(dict.fromkeys(run["num_replicas"] for run in runs))
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    width = 0.8 / len(policies)
    for axes, key, label in ((row[0], "hit_share", "hits, % of tokens"), (row[1], "ttft_p99_s", "TTFT p99, s")):
        for j, policy in enumerate(policies):
            values = [run[key] * (100 if key == "hit_share" else 1) for run in runs if run["policy"] == policy]
            at = [i + (j - (len(policies) - 1) / 2) * width for i in range(len(sizes))]
            axes.bar(at, values, 0.95 * width, color=_COLORS[policy], label=policy)
        axes.set_xticks(range(len(sizes)), [f"{size} replicas" for size in sizes])
        axes.set_ylabel(f"{name}: {label}")
    for i, size in enumerate(sizes):
        single = next(run["single_hit_share"] for run in runs if run["num_replicas"] == size) * 100
        row[0].hlines(single, i - 0.45, i + 0.45, color="#c1121f", label=None if i else "one cache of that size")
