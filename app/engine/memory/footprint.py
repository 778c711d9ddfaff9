"""Footprint: device memory of one engine: weights, KV memory and graphs, a draft model's included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain

from folio.app.engine.execution.captured_graphs import CapturedGraphs
from folio.app.models.weights.arena import WeightArena
from folio.vmem import BudgetError, CachedPrefix, KVMemory
from folio.vmem.prefix.store.kept_prefixes import KeptPrefixes


class Footprint:
    """Memory of one engine.

    Args:
        memory, draft: KV memories of the model and of a draft model, which has the rest of the budget.
        share: the model's share of the budget.
        arenas: weights that can be unmapped; none on a device that is not shared.
        graphs: graphs of the model, and of a draft model.
        own_weight_bytes: weights on a device that is not shared.
        kept: prefixes that stay in host memory; `None`: they are forgotten.
    """

    def __init__(
        self,
        memory: KVMemory,
        draft: KVMemory | None,
        share: float,
        arenas: Sequence[WeightArena],
        graphs: Sequence[CapturedGraphs],
        own_weight_bytes: int = 0,
        kept: KeptPrefixes | None = None,
    ) -> None:
        self._kept = kept
        self.graphs, self._own_weight_bytes = graphs, own_weight_bytes
        self._memory, self._draft, self._share, self._arenas = memory, draft, share, arenas
        self._memories = [memory] if draft is None else [memory, draft]
        self._revision = 1  # of the budget; the first one is that of `Engine`'s `admit`

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights while they are mapped."""
        return sum(arena.num_bytes for arena in self._arenas)

    @property
    def loaded_bytes(self) -> int:
        """Weights that are on the device now. From any thread."""
        return self._own_weight_bytes + sum(arena.num_bytes for arena in self._arenas if arena.is_mapped)

    @property
    def graph_bytes(self) -> int:
        """Graphs with their buffers. From any thread."""
        return sum(graphs.held_bytes for graphs in self.graphs)

    @property
    def held_bytes(self) -> int:
        """KV memory that exists. From any thread."""
        return sum(memory.held_bytes for memory in self._memories)

    @property
    def kept_bytes(self) -> int:
        """Host memory of kept prefixes. From any thread."""
        return self._memory.swapping.space.kept_bytes

    @property
    def seen_bytes(self) -> int:
        """`held_bytes`, but without waiting for a call in progress."""
        return sum(memory.pages.num_created * memory.pages.page_bytes for memory in self._memories)

    @property
    def anchor_bytes(self) -> int:
        """Bytes of anchor pages, which KV memories hold beside the budget while they are open."""
        return sum(memory.anchor_bytes for memory in self._memories)

    @property
    def pinned_bytes(self) -> int:
        """Part of the budget that pinned prefixes take, a draft model's share of it included."""
        return int(self._memory.pages.num_pinned * self._memory.pages.page_bytes / self._share)

    @property
    def budget_bytes(self) -> int:
        """Budget of KV memory."""
        return sum(memory.pages.budget * memory.pages.page_bytes for memory in self._memories)

    def set_budget(self, budget_bytes: int) -> None:
        """Set the budget of KV memory, as far as pins allow. The mapper gives back what is above it."""
        self._revision += 1
        own_bytes = budget_bytes if self._draft is None else int(self._share * budget_bytes)
        set_budget_within(self._memory, own_bytes, self._revision)
        if self._draft is not None:
            set_budget_within(self._draft, budget_bytes - own_bytes, self._revision)

    def set_attainable(self, num_bytes: int) -> None:
        """Set the most KV memory, pins included, that can ever exist at once: it bounds requests, not the budget."""
        self._memory.pages.set_attainable(int(self._share * num_bytes))

    def release(self) -> list[CachedPrefix]:
        """Give back KV memory, graphs and weights, without sequences; returns the prefixes that were pinned. Cached
        prefixes are kept. KV memory comes first: its release waits for launched steps."""
        if self._kept is not None:
            self._kept.keep()
        pinned = self._memory.release_all()
        if self._draft is not None:
            self._draft.release_all()
        for graphs in self.graphs:
            graphs.release()
        for arena in self._arenas:
            arena.unmap()
        return pinned

    def pin_copy(self, prefix: CachedPrefix) -> bool:
        """Pin a prefix that is kept; false if that is not possible now."""
        return self._kept is not None and self._kept.pin(prefix)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the kept prefixes add up."""
        if self._kept is not None:
            self._kept.check_integrity()

    def read_ahead(self) -> Iterator[int]:
        """Read the files of the weights into the page cache, see `WeightArena.read_ahead`."""
        return chain.from_iterable(arena.read_ahead() for arena in self._arenas)

    def map_weights(self) -> None:
        """Map the weights again. From any thread, one at a time.

        Raises:
            OutOfPages: the device has too little memory; nothing is mapped.
            ModelError: the file of the weights is gone, and cannot be made again.
            MapError: the system refused.
        """
        with ExitStack() as undo:
            for arena in self._arenas:
                arena.map()
                undo.callback(arena.unmap)
            undo.pop_all()


def set_budget_within(memory: KVMemory, budget_bytes: int, revision: int) -> None:
    """Set a budget, or the nearest that the memory accepts. Pins may be added before the call: try again."""
    while True:
        try:
            memory.set_budget(min(max(budget_bytes, memory.least_budget_bytes), memory.most_budget_bytes), revision)
        except BudgetError:
            continue
        return
