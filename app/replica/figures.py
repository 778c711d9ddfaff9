"""Load and memory of a replica's models, for routers, operators and metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from folio.app.engine.report import ReplicaReport
from folio.app.errors import UnavailableError
from folio.app.fleet.shelf_load import summed_load, summed_memory, unloaded_report
from folio.vmem import MemoryReport

if TYPE_CHECKING:
    from folio.app.engine.gpu_memory import GpuMemory
    from folio.app.engine.shelf.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Figures:
    """Loads by model, load and memory of all models together, memory of each model that has an engine, and a GPU's by
    part."""

    loads: dict[str, ReplicaReport]
    load: ReplicaReport
    memory: MemoryReport
    memories: dict[str, MemoryReport]
    gpu: GpuMemory | None = None


def figures_of(shelf: Shelf, *, is_shared: bool, most_keys: int = 0) -> Figures:
    """The figures of this moment; may wait for the memory's lock.

    Args:
        is_shared: several models share a device: one whose engine has stopped has the load of a model that has not been
            loaded.
        most_keys: in each engine's load.

    Raises:
        UnavailableError: the only engine has stopped.
    """
    engines, loads, memories = shelf.engines(), {}, {}
    for status in shelf.statuses():
        engine = engines.get(status.name)
        try:
            if engine is not None:
                loads[status.name], memory = engine.load(most_keys=most_keys), engine.report()
                memories[status.name] = memory
                continue
        except UnavailableError:
            if not is_shared:
                raise
        loads[status.name] = unloaded_report(status, time.monotonic())
    load, memory = summed_load(list(loads.values())), summed_memory(list(memories.values()))
    return Figures(loads, load, memory, memories, shelf.gpu_memory())
