"""Exposed mapping of Llama-3-8B, simulated: driver calls counted, and their time where steps wait for it.

The requests of `benchmarks.mapping` run over memory that does not exist. Each call takes what it took on an H200 (a
page: create 10 µs, map and set access 24 µs, whatever its size), a step what its bytes and products take there. The
mapper works while a step computes, unit by unit; calls of the step's own thread are exposed. Compared are the layouts,
with and without what the mapper prepares. The same on every machine:

    python -m benchmarks.mapping_simulated [--quick]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks import harness, workloads
from benchmarks.engine.mapping import VARIANTS, Model, replay
from benchmarks.facts import record
from folio.vmem import AddressRange, KVMemory, LayerSpec, LayoutKind, MappingOptions
from folio.vmem.backends.base import AccountedBackend, MemoryInfo

GRANULARITY_BYTES = 2 << 20
CALL_S = {"create": 10e-6, "map": 24e-6, "unmap": 2e-6, "destroy": 10e-6}
# An H200: seven billion parameters without embeddings, bytes and products a second.
MODEL = Model("Llama-3-8B", (LayerSpec(8, 128, 128),) * 32, 7.0e9, 4.2e12, 7e14)
LAYOUTS: tuple[LayoutKind, ...] = ("sliced", "whole")


class SimulatedDevice(AccountedBackend):
    """A device without memory, whose calls take their time on a clock of its own.

    Attributes:
        seconds: of all calls, by what made them: "exposed" or "hidden".
        calls: pages created, mapped, unmapped and destroyed.
    """

    max_call_bytes = 32 << 20

    def __init__(self) -> None:
        super().__init__(GRANULARITY_BYTES, "simulated")
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls = Counter[str]()
        self.caller = "exposed"
        self._next_address, self._next_handle, self._last_fence, self._passed = 1 << 40, 0, 0, 0

    def finish_step(self) -> None:
        self._passed = self._last_fence

    def _spend(self, name: str, num_pages: int = 1) -> None:
        self.calls[name] += num_pages
        self.seconds[self.caller] += num_pages * CALL_S[name]

    def _reserve(self, num_bytes: int) -> int:
        self._next_address += num_bytes
        return self._next_address - num_bytes

    def _release(self, reserved: AddressRange) -> None:
        pass

    def _create(self, page_bytes: int) -> int:
        self._spend("create")
        self._next_handle += 1
        return self._next_handle

    def _destroy(self, handle: int, page_bytes: int) -> None:
        self._spend("destroy")

    def _map(self, address: int, handles: Sequence[int]) -> None:
        self._spend("map", len(handles))

    def _unmap(self, mapped: AddressRange) -> None:
        self._spend("unmap", mapped.num_bytes // self.page_bytes)

    def tensor(self, reserved: AddressRange) -> torch.Tensor:
        return torch.empty(reserved.num_bytes, dtype=torch.uint8, device="meta")

    def fence(self) -> int:
        self._last_fence += 1
        return self._last_fence

    def completed(self, fence: int) -> bool:
        return fence <= self._passed

    def wait(self, fence: int) -> None:
        self._passed = max(self._passed, fence)

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._created_bytes, 1 << 50)

    def close(self) -> None:
        self._end_accounting()


@dataclass(eq=False)
class MapperTurns:
    """What the mapper does during each step: units of work until the step's time is over. The last one may take longer,
    and the next step's time is less by so much.

    Attributes:
        exposed_s, calls: until the last step, without the end of the memory.
    """

    device: SimulatedDevice
    works: bool
    now_s: float = 0.0
    exposed_s: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    _late_s: float = 0.0

    def step(self, seconds: float, memory: KVMemory) -> None:
        memory.launched()
        self.exposed_s = self.device.seconds["exposed"]
        self.device.caller = "hidden"
        spent = self._late_s
        while self.works and spent < seconds:
            before = self.device.seconds["hidden"]
            with memory.lock.exclusive():
                work = memory.policy.next_work(self.now_s)
                if work is None:
                    break
                memory.mapper.run_now(work)
            spent += self.device.seconds["hidden"] - before
        self._late_s = max(spent - seconds, 0.0)
        self.device.caller = "exposed"
        self.device.finish_step()
        self.calls = self.device.calls.copy()
        self.now_s += seconds


def simulate(kind: LayoutKind, lengths: Sequence[tuple[int, int]], *, prepares: bool) -> tuple[float, Counter[str]]:
    """The exposed share of step time, and the pages of each call.

    Args:
        prepares: whether the mapper works ahead; else every step maps for itself, and unmaps at once.
    """
    device = SimulatedDevice()
    turns = MapperTurns(device, prepares)
    options = VARIANTS["all on" if prepares else "all off"]
    switches = {name: getattr(options, name) for name in ("overlap", "deferred_reclamation", "eager_allocation")}
    # Idle pages are kept as long as the engine keeps them on CUDA.
    options = MappingOptions(background=False, idle_release_s=30.0, **switches)
    seen = replay(device, MODEL, lengths, kind, options, turns.step, lambda: turns.now_s)
    return turns.exposed_s / seen.steps_s, turns.calls


def main() -> None:
    args = harness.arguments(__doc__, devices=("cpu",)).parse_args()
    harness.note_missing(workloads.AZURE_TRACE)
    lengths, workload = workloads.azure(workloads.AZURE_TRACE, 24 if args.quick else 120, 0)
    figures: dict[str, float] = {}
    print(f"{len(lengths)} requests, {workload}")
    for prepares in (True, False):
        for kind in LAYOUTS:
            share, calls = simulate(kind, lengths, prepares=prepares)
            name = f"{kind}{'' if prepares else ', nothing prepared'}"
            figures[f"exposed_share_{kind}{'' if prepares else '_unprepared'}"] = share
            record(name, f"{share:.3%} of step time exposed, {calls.total()} pages' calls", **calls)
    harness.finish("mapping_simulated", args, figures, {"workload": workload})


if __name__ == "__main__":
    main()
