"""The KV memory of one engine: sequences own blocks, blocks lie in pages, pages are mapped where kernels read them.

Two address ranges show the same pages:

    home      | block 0 | block 1 | block 2 | block 3 | …      block b is always at b · block_bytes
    regions   | 2 | 0 |   hole    | 3 |     hole       | …     each holds one sequence's blocks in order

A paged kernel reads home through the block table; any contiguous kernel reads the sequence's region.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from vmem.backend import AddressRange, Backend
from vmem.block_pool import BlockPool
from vmem.errors import IntegrityError, VmemError
from vmem.layout import KVLayout

View = Literal["region", "block_table"]


@dataclass(slots=True, eq=False)
class SequenceMemory:
    """What one sequence owns. Made by `KVMemory.open`, changed by `KVMemory` only.

    Attributes:
        block_ids: the block table: logical block index → block id.
        region: index of the sequence's region, `None` if it is read through the block table.
        num_mapped: how many of its blocks, from the first on, are mapped in the region.
    """

    region: int | None
    block_ids: list[int] = field(default_factory=list)
    num_mapped: int = 0


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """KV memory at one moment. Bytes are physical unless the name says otherwise."""

    budget_bytes: int
    physical_bytes: int
    active_bytes: int
    reserved_virtual_bytes: int
    free_blocks: int
    active_blocks: int
    num_mappings: int
    exposed_us: float


class KVMemory:
    """Blocks, pages, mappings and regions of one device.

    Not thread-safe: the engine's thread owns it.

    Args:
        backend: owned from now on and closed by `close`.
        layout: strides of all layers; one block is one page.
        num_blocks: the budget. Pages are created when a block is first used.
        num_regions: how many sequences may hold a region at once.
        max_tokens: the longest sequence.
    """

    def __init__(
        self, backend: Backend, layout: KVLayout, *, num_blocks: int, num_regions: int, max_tokens: int
    ) -> None:
        self.layout = layout
        self.region_blocks = layout.num_blocks(max_tokens)
        self._backend = backend
        self._pool = BlockPool(num_blocks)
        self._handles: dict[int, int] = {}  # block id → page
        self._sequences: set[SequenceMemory] = set()
        self._retired: deque[tuple[int, SequenceMemory]] = deque()  # (fence, sequence): freed, still readable
        self._free_regions = list(range(num_regions))[::-1]
        self._fence = backend.fence()
        self._exposed_s = 0.0
        self._home = backend.reserve(num_blocks * layout.block_bytes)
        try:
            self._regions = backend.reserve(num_regions * self.region_blocks * layout.block_bytes)
        except VmemError:
            backend.release(self._home)
            raise

    # ---- sequences ----

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def open(self, view: View) -> SequenceMemory:
        """A new sequence without blocks, read through a region or through its block table. Free it with `free`."""
        self._reclaim()
        if view == "region" and not self._free_regions:
            raise VmemError("every region is taken: more sequences opened than num_regions")
        sequence = SequenceMemory(region=self._free_regions.pop() if view == "region" else None)
        self._sequences.add(sequence)
        return sequence

    def append(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Let the sequence own blocks for `num_tokens` tokens in all, the ones it has included.

        Raises:
            OutOfPages: the budget is used up; the sequence is as it was.
            MapError: the device refused; the sequence is as it was.
        """
        missing = self.layout.num_blocks(num_tokens) - len(sequence.block_ids)
        if missing <= 0:
            return
        if len(sequence.block_ids) + missing > self.region_blocks:
            raise VmemError(f"{num_tokens} tokens exceed the {self.region_blocks} blocks of a sequence")
        self._reclaim()
        block_ids = self._pool.allocate(missing)
        start = time.perf_counter()
        try:
            self._create_pages(block_ids)
        except VmemError:
            self._pool.free(block_ids)
            raise
        finally:
            self._exposed_s += time.perf_counter() - start
        sequence.block_ids += block_ids

    def ensure(self, sequences: Iterable[SequenceMemory]) -> None:
        """Map every block of these sequences that is not yet in its region. Call it before the step that reads them.

        Raises:
            MapError: the device refused; sequences before the failing one are mapped, the rest are as they were.
        """
        start = time.perf_counter()
        for sequence in sequences:
            missing = sequence.block_ids[sequence.num_mapped :]
            if sequence.region is None or not missing:
                continue
            first = self._region(sequence).address + sequence.num_mapped * self.layout.block_bytes
            self._backend.map(first, [self._handles[b] for b in missing])
            sequence.num_mapped = len(sequence.block_ids)
        self._exposed_s += time.perf_counter() - start

    def launched(self) -> None:
        """Note that a step which reads the mappings has been submitted: they may change only once it is done."""
        self._fence = self._backend.fence()

    def free(self, sequence: SequenceMemory) -> None:
        """Give blocks and region back as soon as the last launched step is done."""
        if sequence not in self._sequences:
            raise IntegrityError("free of a sequence that is not open")
        self._sequences.remove(sequence)
        self._retired.append((self._fence, sequence))
        self._reclaim()

    # ---- the two views ----

    def home_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer by block: `[num_blocks, block_tokens, num_heads, dim]`."""
        return self.layout.view(self._backend.tensor(self._home), layer, self.layout.block_tokens)

    def region_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer by region: `[num_regions, max_tokens, num_heads, dim]`, holes included."""
        tokens = self.region_blocks * self.layout.block_tokens
        return self.layout.view(self._backend.tensor(self._regions), layer, tokens)

    # ---- accounting ----

    def report(self) -> MemoryReport:
        active = self._pool.num_blocks - self._pool.num_free
        return MemoryReport(
            budget_bytes=self._home.num_bytes,
            physical_bytes=self._backend.memory_info().physical_bytes,
            active_bytes=active * self.layout.block_bytes,
            reserved_virtual_bytes=self._home.num_bytes + self._regions.num_bytes,
            free_blocks=self._pool.num_free,
            active_blocks=active,
            num_mappings=self._backend.num_mappings,
            exposed_us=self._exposed_s * 1e6,
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless blocks, regions, pages and mappings add up."""
        alive = [*self._sequences, *(sequence for _, sequence in self._retired)]
        self._pool.check_integrity(Counter(b for sequence in alive for b in sequence.block_ids))
        regions = [sequence.region for sequence in alive if sequence.region is not None] + self._free_regions
        num_regions = self._regions.num_bytes // (self.region_blocks * self.layout.block_bytes)
        if sorted(regions) != list(range(num_regions)):
            raise IntegrityError(f"regions {sorted(regions)} of {num_regions}")
        mapped = len(self._handles) + sum(sequence.num_mapped for sequence in alive)
        if mapped != self._backend.num_mappings:
            raise IntegrityError(f"{mapped} pages should be mapped, {self._backend.num_mappings} are")

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless every block is free and nothing is mapped but the pages' homes."""
        self._reclaim()
        self.check_integrity()
        if self._sequences or self._retired or self._pool.num_free != self._pool.num_blocks:
            raise IntegrityError(
                f"idle, but {len(self._sequences)} sequences are open, {len(self._retired)} retired, "
                f"{self._pool.num_blocks - self._pool.num_free} blocks in use"
            )

    def close(self) -> None:
        """Free everything. Raises `IntegrityError` if a sequence is still open."""
        self._reclaim()
        if self._sequences or self._retired:
            raise IntegrityError(f"closed with {len(self._sequences)} sequences open, {len(self._retired)} retired")
        self._destroy_pages(list(self._handles))
        for reserved in (self._home, self._regions):
            self._backend.release(reserved)
        self._backend.close()

    # ---- inside ----

    def _region(self, sequence: SequenceMemory) -> AddressRange:
        assert sequence.region is not None
        region_bytes = self.region_blocks * self.layout.block_bytes
        return AddressRange(self._regions.address + sequence.region * region_bytes, region_bytes)

    def _create_pages(self, block_ids: Iterable[int]) -> None:
        """Create and map home the pages of blocks that never had one; all of them or none."""
        done: list[int] = []
        for run in _consecutive_runs(b for b in block_ids if b not in self._handles):
            handles: list[int] = []
            try:
                for _ in run:
                    handles.append(self._backend.create(self.layout.block_bytes))
                self._backend.map(self._home_address(run[0]), handles)
            except VmemError:
                for handle in handles:
                    self._backend.destroy(handle)
                self._destroy_pages(done)
                raise
            self._handles.update(zip(run, handles, strict=True))
            done += run

    def _destroy_pages(self, block_ids: list[int]) -> None:
        for run in _consecutive_runs(sorted(block_ids)):
            size = self.layout.block_bytes
            self._backend.unmap(AddressRange(self._home_address(run[0]), len(run) * size))
            for block_id in run:
                self._backend.destroy(self._handles.pop(block_id))

    def _home_address(self, block_id: int) -> int:
        return self._home.address + block_id * self.layout.block_bytes

    def _reclaim(self) -> None:
        """Take back what retired sequences own, oldest first, as far as the device has passed their fences."""
        while self._retired and self._backend.completed(self._retired[0][0]):
            _, sequence = self._retired[0]
            if sequence.num_mapped:
                size = sequence.num_mapped * self.layout.block_bytes
                self._backend.unmap(AddressRange(self._region(sequence).address, size))
                sequence.num_mapped = 0
            self._retired.popleft()  # only now: had the unmap failed, it would be tried again
            if sequence.region is not None:
                self._free_regions.append(sequence.region)
            self._pool.free(sequence.block_ids)


def _consecutive_runs(block_ids: Iterable[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for block_id in block_ids:
        if run and block_id != run[-1] + 1:
            yield run
            run = []
        run.append(block_id)
    if run:
        yield run
