"""Memory of a CUDA device by part, for metrics, dashboard and `folio top`."""

from __future__ import annotations

from collections.abc import Sequence

from folio.app.engine.memory.footprint import Footprint
from folio.app.engine.memory.memory_profile import DeviceMemory
from folio.app.engine.report import GpuMemory
from folio.vmem import DevicePages


def gpu_memory(
    memory: DeviceMemory, footprints: Sequence[Footprint], pages: DevicePages | None, pinned_copies_bytes: int
) -> GpuMemory:
    """Measure the parts. From any thread.

    Args:
        footprints: footprints of the engines on the device.
        pages: device pages that they share; `None` for a single engine.
        pinned_copies_bytes: pinned memory that is not torch's.
    """
    free_bytes, total_bytes = memory.free_and_total()
    weight_bytes = sum(footprint.loaded_bytes for footprint in footprints)
    graph_bytes = sum(footprint.graph_bytes for footprint in footprints)
    parts = {
        "weights": weight_bytes,
        "kv": sum(footprint.seen_bytes + footprint.anchor_bytes for footprint in footprints),
        "graphs": graph_bytes,
        # Without `pages` torch allocates the weights. The driver allocates a part of the graphs.
        "activations": max(memory.reserved() - graph_bytes - (weight_bytes if pages is None else 0), 0),
        "idle": 0 if pages is None else pages.idle_bytes,
    }
    parts["other"] = max(total_bytes - free_bytes - sum(parts.values()), 0)
    return GpuMemory(parts | {"free": free_bytes}, pinned_copies_bytes + memory.pinned())
