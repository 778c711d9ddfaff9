"""PagedAttention's §6 in simulated time: OPT models on A100s, with the real scheduler and KV memory.

A step takes what its bytes and products take on an A100 with the efficiency that was measured on an H200
(`benchmarks/results/cuda`). Devices of a larger model share them, and add up their results twice a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from benchmarks import harness
from benchmarks.papers.held import Observer
from benchmarks.papers.outcome import BLOCK_TOKENS, CAPACITY, FOLIO, LONGEST, Outcome, Run, outcome
from benchmarks.papers.requests import arrivals
from benchmarks.papers.reserved import reserve
from benchmarks.simulator.device import Device, roofline
from benchmarks.simulator.replica import Leap, Served, SimulatedReplica

# Peaks of the H200, by its data sheet, and parameters of the model that was measured there.
H200_BANDWIDTH, H200_FLOPS, MEASURED_PARAMETERS = 4.8e12, 989e12, 8.0e9
# A sum over devices: the time of NCCL's small messages between A100s, which the paper does not state.
ALL_REDUCE_S = 20e-6
# A run ends after this many times the time in which its requests arrive.
LATEST = 3.0
# Memory of a baseline, of the capacity: its reservations alone decide.
ROOM = 8


@dataclass(frozen=True, slots=True)
class Model:
    """A row of the paper's table 1. `capacity`: tokens of the KV memory; `bandwidth`: of a device, bytes a second."""

    parameters: float
    layers: int
    heads: int
    devices: int
    bandwidth: float
    capacity: int


MODELS: Mapping[str, Model] = {
    "": Model(12.85e9, 40, 40, 1, 1.555e12, CAPACITY),
    "opt_66b": Model(65.7e9, 64, 72, 4, 1.555e12, 9_700),
    "opt_175b": Model(174.6e9, 96, 96, 8, 2.039e12, 60_100),
}


@cache
def device(model: Model, block_tokens: int = BLOCK_TOKENS) -> Device:
    """A model on its A100s, by data sheet and the H200's measured shares of its own."""
    measured = harness.committed("throughput-llama-3-8b", "cuda")["figures"]
    planned = roofline(
        "A100",
        parameters=model.parameters,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.heads,
        head_dim=128,
        flops=model.devices * 312e12,
        bandwidth=model.devices * model.bandwidth,
        memory_bytes=0,
        unit_tokens=block_tokens,
        compute_share=measured["prefill_tokens_per_s_2048"] * 2 * MEASURED_PARAMETERS / H200_FLOPS,
        bandwidth_share=measured["decode_gb_per_s_greedy_64"] * 1e9 / H200_BANDWIDTH,
    )
    sums_s = 2 * model.layers * ALL_REDUCE_S if model.devices > 1 else 0.0
    return replace(
        planned,
        fixed_s=planned.fixed_s + sums_s,
        cache_tokens=model.capacity // block_tokens * block_tokens,
        max_num_seqs=1024,
        step_tokens=2560,
        overlaps=True,
    )


class PaperReplica(SimulatedReplica):
    """A replica that holds memory as the run's system does.

    Attributes:
        seen: from a fifth of the run on.
    """

    def __init__(self, run: Run) -> None:
        model, admission, shares = MODELS[run.kind.model], None, run.system == FOLIO
        planned = device(model, run.block_tokens)
        room = 1 if shares else ROOM
        super().__init__(0, replace(planned, cache_tokens=room * planned.cache_tokens), prefix_cache=shares)
        if not shares:
            admission = reserve(self._scheduler, self._memory, run.system, model.capacity, LONGEST)
        window_s = 0.2 * run.duration_s, run.duration_s
        self.seen = Observer(self._scheduler, self._memory, admission, planned.cache_tokens, window_s)

    @property
    def num_preempted(self) -> int:
        return sum(self._scheduler.begun.num_preempted.values())

    def _end(self, leap: Leap) -> Iterator[Served]:
        self.seen.note(leap.begun_at, leap.ends_at)
        yield from super()._end(leap)


def simulate(run: Run) -> Outcome:
    """Serve the requests of a run."""
    replica = PaperReplica(run)
    pending = iter(arrivals(run.kind, run.rate, run.duration_s, run.block_tokens, run.seed))
    latest_s = LATEST * run.duration_s
    served: list[Served] = []
    arrival = next(pending, None)
    while True:
        wakes_at = math.inf if replica.wakes_at is None else replica.wakes_at
        if arrival is not None and arrival.at <= wakes_at:
            served.append(replica.submit(arrival, 0, arrival.at))
            arrival = next(pending, None)
        elif wakes_at < latest_s:
            for _ in replica.advance(wakes_at):
                pass
        else:
            break
    times = [(one.arrival.at, one.ended_at, one.arrival.num_output_tokens) for one in served]
    if all(end is not None for _, end, _ in times):
        replica.close()
    return outcome(times, run.duration_s, latest_s, replica.seen, replica.num_preempted)
