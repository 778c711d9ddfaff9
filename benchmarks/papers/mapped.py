"""vAttention's §7 (Prabhu et al., ASPLOS 2025): latency of iterations that need new pages, and waste by page size.

Driver calls and steps take the times of `benchmarks.mapping_simulated`, measured on an H200; the mapper, its plans and
its memory are the real ones. Pages have 2 MiB, the smallest that the CUDA driver gives: the paper's smaller ones need a
changed driver.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks import harness
from benchmarks.engine.mapping_simulated import GRANULARITY_BYTES, MODEL, MapperTurns, SimulatedDevice
from folio.vmem import (
    KVMemory,
    LayerGroup,
    LayerSpec,
    LayoutKind,
    MappingOptions,
    SequenceMemory,
    StepDemand,
    plan_layout,
)

# Figure 12: four requests of 32K tokens decode. Figure 13: a prompt of 16K tokens, computed in chunks.
BATCH, CONTEXT, ITERATIONS, QUICK_ITERATIONS = 4, 32_768, 2100, 1100
PROMPT, CHUNK = 16_384, 2048
MODES: Mapping[str, MappingOptions] = {
    "synchronous": MappingOptions(overlap=False, deferred_reclamation=False, eager_allocation=False),
    "deferred": MappingOptions(overlap=False, deferred_reclamation=True, eager_allocation=False),
    "overlapped": MappingOptions(overlap=True, deferred_reclamation=False, eager_allocation=False),
    "all": MappingOptions(),
}
# The paper's layout, a buffer a layer for keys and one for values, and Folio's: k layers in each slice.
LAYOUTS: Mapping[str, LayoutKind] = {"per_layer": "per_layer", "sliced": "sliced"}
SHAPES: Mapping[str, tuple[LayerSpec, ...]] = {
    "yi_6b": (LayerSpec(4, 128, 128),) * 32,
    "llama3_8b": (LayerSpec(8, 128, 128),) * 32,
    "yi_34b": (LayerSpec(8, 128, 128),) * 60,
}
PAGES_KIB = (64, 128, 256, 2048)


@dataclass(frozen=True, slots=True)
class Iterations:
    """Decode iterations.

    Attributes:
        latencies_s: of each, with the mapping that it waits for.
        alone_s: of the longest without mapping.
    """

    latencies_s: list[float]
    alone_s: float

    @property
    def spike_s(self) -> float:
        """The longest iteration beyond its own time."""
        return max(self.latencies_s) - self.alone_s


class Simulated:
    """A memory of Llama-3-8B whose driver calls only take time."""

    def __init__(self, kind: LayoutKind, mode: str, tokens: int, num_regions: int) -> None:
        self.device = SimulatedDevice()
        options = MODES[mode]
        self.turns = MapperTurns(self.device, options.overlap)
        layout = plan_layout(MODEL.layers, torch.bfloat16, granularity_bytes=GRANULARITY_BYTES, kind=kind)
        self.token_bytes = layout.payload_bytes
        group = LayerGroup(tuple(range(len(MODEL.layers))), layout)
        self.memory = KVMemory(
            self.device,
            [group],
            budget_bytes=2 * num_regions * layout.num_blocks(tokens) * group.most_pages(1, 1) * layout.page_bytes,
            num_regions=num_regions,
            max_tokens=tokens,
            options=MappingOptions(
                background=False,
                idle_release_s=30.0,
                overlap=options.overlap,
                deferred_reclamation=options.deferred_reclamation,
                eager_allocation=options.eager_allocation,
            ),
            clock=lambda: self.turns.now_s,
        )

    def step(self, demands: Sequence[StepDemand], following: Sequence[StepDemand]) -> tuple[float, float]:
        """Seconds of a step, with and without the mapping that it waits for."""
        before = self.device.seconds["exposed"]
        for demand in demands:
            self.memory.append(demand.sequence, demand.end)
        self.memory.ensure(demands)
        self.memory.plan(following)
        exposed = self.device.seconds["exposed"] - before
        num_tokens = sum(demand.end - demand.start for demand in demands)
        alone = MODEL.step_s(num_tokens, sum(demand.end for demand in demands), self.token_bytes)
        self.turns.step(alone, self.memory)
        return alone + exposed, alone

    def prompt(self, sequence: SequenceMemory, num_tokens: int) -> tuple[float, float]:
        """Seconds of a prompt's chunks, with and without mapping."""
        times = []
        for start in range(0, num_tokens, CHUNK):
            end = start + CHUNK
            coming = CHUNK if end < num_tokens else 1
            times.append(self.step([StepDemand(sequence, start, end)], [StepDemand(sequence, end, end + coming)]))
        return sum(with_s for with_s, _ in times), sum(alone for _, alone in times)


def decode(kind: LayoutKind, mode: str, count: int) -> Iterations:
    """Decode iterations of `BATCH` sequences after `CONTEXT` tokens each."""
    simulated = Simulated(kind, mode, CONTEXT + count + 2, BATCH)
    sequences = [simulated.memory.create_sequence("region") for _ in range(BATCH)]
    for sequence in sequences:
        simulated.prompt(sequence, CONTEXT)
    latencies, alone = [], 0.0
    for i in range(count + 1):
        start = CONTEXT + i
        demands = [StepDemand(sequence, start, start + 1) for sequence in sequences]
        seconds, alone = simulated.step(demands, [StepDemand(d.sequence, d.end, d.end + 1) for d in demands])
        latencies.append(seconds)
    del latencies[0]  # all four begin to decode at once, and the paper's do not
    for sequence in sequences:
        simulated.memory.free(sequence)
    simulated.memory.check_integrity()
    simulated.memory.close()
    return Iterations(latencies, alone)


def prefill(kind: LayoutKind, mode: str) -> float:
    """Time of a prompt over that without mapping, after another one of the same length has ended."""
    simulated = Simulated(kind, mode, PROMPT + 1, 2)
    for _ in range(2):
        sequence = simulated.memory.create_sequence("region")
        seconds, alone = simulated.prompt(sequence, PROMPT)
        simulated.memory.free(sequence)
        simulated.turns.step(alone / 8, simulated.memory)
    simulated.memory.close()
    return seconds / alone


def waste() -> dict[str, float]:
    """Tokens that the smallest allocation of a sequence holds, and MiB that a sequence leaves unused on average, by
    shape, page size and layout."""
    figures: dict[str, float] = {}
    for shape, layers in SHAPES.items():
        for page_kib in PAGES_KIB:
            for name, kind in LAYOUTS.items():
                layout = plan_layout(layers, torch.bfloat16, granularity_bytes=page_kib << 10, kind=kind)
                key = f"{shape}_{page_kib}kib_{name}"
                figures[f"block_tokens_{key}"] = layout.block_tokens
                figures[f"unused_mib_{key}"] = layout.block_tokens / 2 * layout.payload_bytes / 2**20
    return figures


def allocation() -> dict[str, float]:
    """GB a second of new mapped memory by page size, of `benchmarks.mapping` on this machine and on a GPU, and what
    decodes need there."""
    figures: dict[str, float] = {}
    for device in ("cpu", "cuda"):
        calls = harness.committed("mapping", device)["raw"]["calls"]
        for row in calls:
            if row["pages"] == 16:
                seconds = (row["create"] + row["map"]) / 1e6
                figures[f"allocated_gb_per_s_{device}_{row['page_kib']:.0f}kib"] = (
                    row["page_kib"] * 1024 / seconds / 1e9
                )
    measured = harness.committed("throughput-llama-3-8b", "cuda")["figures"]
    token_bytes = sum(sum(layer.row_bytes(torch.bfloat16)) for layer in MODEL.layers)
    figures["needed_gb_per_s_cuda"] = measured["decode_tokens_per_s_greedy_256"] * token_bytes / 1e9
    return figures


def measure(*, quick: bool) -> tuple[dict[str, float], dict[str, object]]:
    """Figures, and raw data."""
    figures, raw = waste() | allocation(), dict[str, object]()
    count = QUICK_ITERATIONS if quick else ITERATIONS
    for name, kind in LAYOUTS.items():
        for mode in MODES:
            seen = decode(kind, mode, count)
            figures[f"iteration_ms_median_{name}_{mode}"] = 1e3 * statistics.median(seen.latencies_s)
            figures[f"iteration_ms_max_{name}_{mode}"] = 1e3 * max(seen.latencies_s)
            figures[f"iteration_spike_ms_{name}_{mode}"] = 1e3 * seen.spike_s
            figures[f"prefill_ratio_{name}_{mode}"] = prefill(kind, mode)
            raw[f"{name} {mode}"] = [round(1e3 * s, 4) for s in seen.latencies_s]
            prompt = figures[f"prefill_ratio_{name}_{mode}"]
            print(
                f"{name:10} {mode:12} longest iteration + {1e3 * seen.spike_s:.2f} ms; prompt × {prompt:.4f}",
                flush=True,
            )
    return figures, raw
