"""Shared device: what the engines of one process have in common when they share a device."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.model.weight_store import WeightStore
from vmem import BudgetError, DevicePages, KVMemory


@dataclass(frozen=True, slots=True, eq=False)
class SharedDevice:
    """Memory of a device that several engines share.

    Attributes:
        pages: physical memory of all weights and KV caches.
        weights: where weights go that are unmapped while a model sleeps; its bytes are charged to `pages`.
    """

    pages: DevicePages
    weights: WeightStore


def set_budget_within(memory: KVMemory, budget_bytes: int, revision: int) -> None:
    """Set a budget, or the nearest that the memory accepts. Pins may come between the question and the call."""
    while True:
        try:
            memory.set_budget(min(max(budget_bytes, memory.least_budget_bytes), memory.most_budget_bytes), revision)
        except BudgetError:
            continue
        return
