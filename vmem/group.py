"""Layer group: its blocks, their homes, and its regions."""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from folio.vmem.backends.base import AddressRange, Backend, adjacent_runs, retry_undo
from folio.vmem.blocks.block_pool import BlockPool
from folio.vmem.blocks.eviction import EvictionQueue
from folio.vmem.errors import IntegrityError, VmemError
from folio.vmem.layout import KVLayout, StateLayout
from folio.vmem.mapping.region import HOLE, Region

# Adoption compares this many parked regions only: the choice must not cost what it saves.
_ADOPTION_CANDIDATES = 4

Span = tuple[int, list[int]]  # address, handles of the pages from there on
_Change = Callable[[int, list[int]], None]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that cache the same tokens: all of them, those of a window, or a state of fixed size.

    Attributes:
        layers: their indices in the model, in the layout's order.
        layout: strides of these layers.
        window_tokens: how many tokens a query sees, its own included; `None`: all.
    """

    layers: tuple[int, ...]
    layout: KVLayout | StateLayout
    window_tokens: int | None = None

    @property
    def is_state(self) -> bool:
        return isinstance(self.layout, StateLayout)

    @property
    def reads_home_only(self) -> bool:
        """Whether no sequence has a region here: a state has one place, and a region maps whole handles only."""
        return self.is_state or self.layout.extent_blocks > 1

    def most_pages(self, num_tokens: int, step_tokens: int) -> int:
        """Pages a sequence of `num_tokens` tokens owns at most, when a step computes up to `step_tokens` of them."""
        num_blocks = self.layout.num_blocks(num_tokens)
        if self.is_state:
            num_blocks *= 2  # the previous step's state is kept until it is copied
        elif self.window_tokens is not None:
            num_blocks = min(num_blocks, self.layout.num_blocks(self.window_tokens - 1 + step_tokens) + 1)
        return num_blocks * self.layout.num_slices


def most_pages(groups: Iterable[LayerGroup], num_tokens: int, step_tokens: int) -> int:
    """The most pages that one sequence of `num_tokens` tokens owns, all layer groups together."""
    return sum(group.most_pages(num_tokens, step_tokens) for group in groups)


def longest_sequence(groups: Sequence[LayerGroup], num_pages: int, step_tokens: int) -> int:
    """The most tokens of one sequence that fit into so many pages, up to 2³⁰."""
    return bisect.bisect_left(
        range(1, 1 << 30), True, key=lambda num_tokens: most_pages(groups, num_tokens, step_tokens) > num_pages
    )


class GroupMemory:
    """Addresses, handles and regions of one layer group.

    The *anchor page* is mapped for good in every page of block 0 and in the first page of slot 0. So no tensor over
    home or regions begins with a hole, which Triton would refuse, and padding rows have a place to write to.

    A block is mapped at home when something will read or write it there, and stays so until its pages are detached. In
    a group without regions that is always so.

    `map_pages` and `unmap_pages` change all spans or none, and no bookkeeping; they run without the memory's lock.
    Everything else is called with it.

    Args:
        index: of the group among all.
        anchor: handle of the anchor page, which stays the caller's.
        num_extents: the most extents that can have pages; their numbers are `1 … num_extents`. Extent e is the blocks
            `e · extent_blocks … (e + 1) · extent_blocks - 1`: usually one block.
        num_regions: the most regions; their slots are `1 … num_regions`.
        region_blocks: places of a region; 0: no sequence has a region.
        cached: decides which cached blocks are evicted first.

    Attributes:
        handles: extent → its handles, one a slice.
        at_home: extents that are mapped at home.
        parked: regions without a holder, those parked longest first.
        held: regions with a holder.
        wanted: held regions in which the mapper should map up to `Region.wanted`.
        expired: held regions that map blocks before `Region.first`.

    Raises:
        MapError: the device refuses; nothing is left behind.
    """

    def __init__(
        self,
        backend: Backend,
        index: int,
        spec: LayerGroup,
        *,
        anchor: int,
        num_extents: int,
        num_regions: int,
        region_blocks: int,
        cached: EvictionQueue,
    ) -> None:
        self.index = index
        self.spec = spec
        self.layout = spec.layout
        self.num_regions = num_regions
        self.region_blocks = region_blocks
        self.extent_blocks = size = spec.layout.extent_blocks
        self.pool = BlockPool(range(size, (num_extents + 1) * size), cached, size)
        self.handles: dict[int, tuple[int, ...]] = {}
        self.at_home: set[int] = set()
        self.parked: OrderedDict[Region, None] = OrderedDict()
        self.held: set[Region] = set()
        self.wanted: OrderedDict[Region, None] = OrderedDict()
        self.expired: OrderedDict[Region, None] = OrderedDict()
        self._free_slots: list[int] = []  # below `_next_slot`; slots from there on were never used
        self._next_slot = 1
        self._backend = backend
        self._handle_bytes = spec.layout.handle_bytes
        self._extent_home_bytes = size * spec.layout.home_bytes
        self.homes: list[AddressRange] = []
        self.ranges: list[AddressRange] = []
        self._anchored: list[AddressRange] = []
        try:
            for _ in range(spec.layout.num_homes):
                self.homes.append(backend.reserve((num_extents + 1) * self._extent_home_bytes))
                self._anchor(self.homes[-1].address, anchor, self._extent_home_bytes // self._handle_bytes)
                if region_blocks:
                    self.ranges.append(backend.reserve((num_regions + 1) * region_blocks * self._handle_bytes))
                    self._anchor(self.ranges[-1].address, anchor, 1)
        except VmemError:
            self.release()
            raise

    def _anchor(self, address: int, handle: int, count: int) -> None:
        self._backend.map(address, [handle] * count)
        self._anchored.append(AddressRange(address, count * self._handle_bytes))

    @property
    def num_slices(self) -> int:
        return self.layout.num_slices

    def blocks_in(self, num_pages: int) -> int:
        """Blocks that so many pages are enough for, in whole extents."""
        return max(num_pages, 0) // self.layout.extent_pages * self.extent_blocks

    @property
    def region_tokens(self) -> int:
        """Tokens that one region can map."""
        return self.region_blocks * self.layout.block_tokens

    @property
    def reserved_bytes(self) -> int:
        return sum(reserved.num_bytes for reserved in (*self.homes, *self.ranges))

    def release(self) -> None:
        """Unmap the anchor page, release the addresses; nothing else may be mapped. Raises `MapError`; call again."""
        while self._anchored:
            self._backend.unmap(self._anchored[-1])
            self._anchored.pop()
        while self.homes:
            self._backend.release(self.homes[-1])
            self.homes = self.homes[:-1]
        while self.ranges:
            self._backend.release(self.ranges[-1])
            self.ranges = self.ranges[:-1]

    # ---- regions ----

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots) or self._next_slot <= self.num_regions

    def new_region(self) -> Region:
        """Create a region without mappings, neither parked nor held."""
        if self._free_slots:
            return Region(self._free_slots.pop())
        self._next_slot += 1
        return Region(self._next_slot - 1)

    def adopt(self, prefix: Sequence[int], num_blocks: int, *, evicts: bool) -> Region | None:
        """Hold the parked region that saves a sequence of `num_blocks` blocks, the first ones `prefix`, the most
        mapping, or a new one if none saves any. `None` if all regions are held.

        Args:
            evicts: the sequence will take blocks whose cached content is evicted.
        """
        best, most = None, 0
        for region in self._candidates(prefix, num_blocks, evicts):
            saved = region.matching(prefix)
            if saved == len(prefix):
                while saved < num_blocks and self.can_allocate_in_place(region.at(saved), evicts=evicts):
                    saved += 1
            if saved > most or best is None:
                best, most = region, saved
            if saved == num_blocks:
                break
        if (best is None or not most) and self.has_free_slot:
            best = self.new_region()
        elif best is not None:
            del self.parked[best]
        if best is not None:
            self.held.add(best)
        return best

    def can_allocate_in_place(self, block_id: int, *, evicts: bool) -> bool:
        """Whether the holder of a place can allocate the block that the place maps."""
        if block_id == HOLE:
            return False
        cached = self.pool.cached
        return self.pool.is_allocatable(block_id) or (
            evicts and block_id in cached and cached.is_first_choice(block_id)
        )

    def _candidates(self, prefix: Sequence[int], num_blocks: int, evicts: bool) -> list[Region]:
        """The most promising parked regions: for a prefix those that begin alike, else those that begin with a block
        that is free, the shortest ones that are long enough, then the longest of the others. If content must be
        evicted, the regions parked longest."""
        free = [region for region in self.parked if not region.busy]
        if prefix:
            alike = [region for region in free if region.at(0) == prefix[0]]
            return sorted(alike or free[:1], key=lambda region: -region.num_mapped)[:_ADOPTION_CANDIDATES]

        def order(region: Region) -> tuple[bool, bool, int]:
            is_short, length = region.num_mapped < num_blocks, region.num_mapped
            return not self.pool.is_allocatable(region.at(0)), is_short, -length if is_short else length

        return sorted(free, key=(lambda region: order(region)[:1]) if evicts else order)[:_ADOPTION_CANDIDATES]

    def park(self, region: Region, *, fence: int, now: float) -> None:
        """End the hold of a region; its mappings stay."""
        self.held.remove(region)
        self.wanted.pop(region, None)
        self.expired.pop(region, None)
        region.blocks = None
        region.first = region.checked = region.wanted = 0
        region.fence = fence
        region.touched = now
        if region.num_mapped:
            self.parked[region] = None
        else:
            self._free_slots.append(region.slot)

    def discard_if_empty(self, region: Region) -> None:
        """Free the slot of a parked region without mappings."""
        if not region.num_mapped and region in self.parked:
            del self.parked[region]
            self._free_slots.append(region.slot)

    # ---- transactions of backend calls ----

    def map_pages(self, spans: Sequence[Span]) -> None:
        self._change(spans, self._backend.map, self._unmap)

    def unmap_pages(self, spans: Sequence[Span]) -> None:
        self._change(spans, self._unmap, self._backend.map)

    def extents_of(self, block_ids: Iterable[int]) -> list[int]:
        """The extents of these blocks, ascending."""
        if self.extent_blocks == 1:
            return sorted(block_ids)
        return sorted({block_id // self.extent_blocks for block_id in block_ids})

    def not_at_home(self, block_ids: Iterable[int]) -> list[int]:
        """The extents of these blocks, ascending, that are not mapped at home."""
        size, at_home = self.extent_blocks, self.at_home
        return sorted({block_id // size for block_id in block_ids if block_id // size not in at_home})

    @property
    def num_homeless_pages(self) -> int:
        """Pages that can still come to be mapped at home."""
        return (len(self.handles) - len(self.at_home)) * self.layout.extent_pages

    def home_spans(self, extents: Sequence[int], handles: Sequence[tuple[int, ...]]) -> list[Span]:
        """Handles of these extents (ascending) at home, neighbours together."""
        count = self.num_slices // self.layout.num_homes
        return [
            (
                home.address + extents[start] * self._extent_home_bytes,
                [handle for each in handles[start:end] for handle in each[i * count : (i + 1) * count]],
            )
            for start, end in adjacent_runs(extents)
            for i, home in enumerate(self.homes)
        ]

    def place_spans(self, region: Region, start: int, block_ids: Sequence[int]) -> list[Span]:
        """Pages of these blocks in the region's places from `start` on. Blocks of regions are extents."""
        return [
            (address, [self.handles[b][i] for b in block_ids])
            for i, address in enumerate(self.place_addresses(region, start))
        ]

    def place_addresses(self, region: Region, place: int) -> list[int]:
        offset = (region.slot * self.region_blocks + place) * self._handle_bytes
        return [reserved.address + offset for reserved in self.ranges]

    def _unmap(self, address: int, handles: list[int]) -> None:
        self._backend.unmap(AddressRange(address, len(handles) * self._handle_bytes))

    def _change(self, spans: Sequence[Span], change: _Change, undo: _Change) -> None:
        """Change every span; when one fails, undo the others, the last first."""
        with ExitStack() as undone:
            for address, handles in spans:
                change(address, handles)
                undone.callback(retry_undo, partial(undo, address, handles))
            undone.pop_all()

    # ---- accounting ----

    def check_integrity(self, owned: Counter[int]) -> int:
        """Raise `IntegrityError` unless blocks and regions add up; returns how many handles should be mapped."""
        regions = [*self.held, *self.parked]
        mapped = Counter(b for region in regions for b in region.mapped_blocks if b != HOLE)
        self.pool.check_integrity(owned, mapped)
        slots = sorted([*(region.slot for region in regions), *self._free_slots])
        if slots != list(range(1, self._next_slot)) or len(slots) > self.num_regions:
            raise IntegrityError(f"slots {slots} of 1 to {self._next_slot - 1}, {self.num_regions} at most")
        for region in regions:
            if region.num_mapped != sum(b != HOLE for b in region.mapped_blocks) or region.busy:
                raise IntegrityError(f"region {region.slot} counts {region.num_mapped} of {region.mapped_blocks}")
            if region.blocks is not None and any(
                region.at(p) != region.blocks[p] for p in range(region.first, region.checked)
            ):
                raise IntegrityError(f"region {region.slot} maps {region.mapped_blocks} instead of {region.blocks}")
        attached = len(self.pool.block_ids) - self.pool.num_unbacked
        if len(self.handles) * self.extent_blocks != attached:
            raise IntegrityError(f"{attached} blocks should have pages, {len(self.handles)} extents do")
        expected = self.handles.keys() if not self.region_blocks else self.at_home & self.handles.keys()
        if self.at_home != expected:
            raise IntegrityError(f"extents {sorted(self.at_home ^ expected)} are mapped at home without pages, or not")
        anchored = sum(span.num_bytes for span in self._anchored) // self._handle_bytes
        return anchored + self.num_slices * (len(self.at_home) + sum(mapped.values()))


def reserve_groups(
    backend: Backend,
    groups: Sequence[LayerGroup],
    num_pages: int,
    num_regions: int,
    max_tokens: int,
    new_queue: Callable[[], EvictionQueue],
) -> tuple[int, list[GroupMemory]]:
    """Create the anchor page and reserve the memory of all layer groups, or neither, for up to `num_pages` pages in
    each. States have no regions, and blocks that share handles have none."""
    anchor = backend.create(groups[0].layout.handle_bytes)
    reserved: list[GroupMemory] = []
    try:
        for group in groups:
            reserved.append(
                GroupMemory(
                    backend,
                    len(reserved),
                    group,
                    anchor=anchor,
                    num_extents=num_pages // group.layout.extent_pages,
                    num_regions=num_regions,
                    region_blocks=0 if group.reads_home_only else group.layout.num_blocks(max_tokens),
                    cached=new_queue(),
                )
            )
    except VmemError:
        for made in reserved:
            made.release()
        backend.destroy(anchor)
        raise
    return anchor, reserved
