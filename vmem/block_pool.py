"""Which blocks are free, which of those have pages, and how many owners each of the others has."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from vmem.errors import IntegrityError


class BlockPool:
    """Reference counts and states of the blocks with these ids (PagedAttention §4.3).

    cold ──attach──> loose ──take──> owned ──free──> loose   free, and no region shows it
      ^                │             ^       ├─────> tied    free, and a region still shows it (deferred reclamation);
      └────detach──────┘             │       │               loose again when the last such place is hidden
                                     │       └─────> kept    free, and its content may be wanted again (prefix cache);
                                     └───revive─────────┘    loose or tied when that is forgotten

    Low ids go first: neighbours are mapped by one call and merge into one mapping. A block that is being attached,
    detached, or shown ahead of need is *moving* and belongs to nobody. Only called under its memory's lock.
    """

    def __init__(self, block_ids: range) -> None:
        self.block_ids = block_ids
        self._references = [0] * block_ids.stop
        self._places = [0] * block_ids.stop  # in how many places of regions it is shown
        self._cold = list(block_ids)  # a heap; ascending order is one
        self._loose: OrderedDict[int, None] = OrderedDict()  # the longest free first
        self._lowest_loose: list[int] = []  # heap over the same ids; entries that left `_loose` are skipped
        self._in_heap = [False] * block_ids.stop
        self._tied: OrderedDict[int, None] = OrderedDict()  # the longest free first
        self._eager: set[int] = set()  # tied blocks that were mapped ahead for whoever comes next
        self._kept: OrderedDict[int, None] = OrderedDict()  # the longest free first
        self.indexed_blocks: set[int] = set()  # blocks whose content has a name, free or owned
        self._moving: set[int] = set()
        self._freed_at = [0.0] * block_ids.stop
        self._fence = [0] * block_ids.stop
        self._num_owned = 0

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def num_owned(self) -> int:
        return self._num_owned

    @property
    def num_unbacked(self) -> int:
        return len(self._cold)

    @property
    def num_free(self) -> int:
        return len(self._loose)

    @property
    def num_free_mapped(self) -> int:
        return len(self._tied)

    @property
    def num_eager(self) -> int:
        return len(self._eager)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content may be wanted again."""
        return len(self._kept)

    def reference_count(self, block_id: int) -> int:
        return self._references[block_id]

    def num_region_mappings(self, block_id: int) -> int:
        """In how many places of regions the block is shown."""
        return self._places[block_id]

    def is_allocatable(self, block_id: int) -> bool:
        """Free, with pages, and of no content, so that `take` would take it."""
        return block_id in self._tied or block_id in self._loose

    def is_cached(self, block_id: int) -> bool:
        """Free, but its content may be wanted again."""
        return block_id in self._kept

    # ---- content ----

    def mark_indexed(self, block_id: int) -> None:
        """The content of this owned block has a name now: when it is free, others may want it."""
        assert self._references[block_id], f"block {block_id} has content, but nobody owns it"
        self.indexed_blocks.add(block_id)

    def unmark_indexed(self, block_id: int) -> None:
        """Its content has no name any more; if it is free, it is for anybody."""
        self.indexed_blocks.remove(block_id)
        if block_id in self._kept:
            del self._kept[block_id]
            self._file(block_id)
            queue = self._tied if self._places[block_id] else self._loose
            queue.move_to_end(block_id, last=False)  # nobody has chosen it for longer than the others

    def acquire_cached(self, block_ids: Iterable[int]) -> None:
        """Own these blocks for their content, whether others own them or not."""
        for block_id in block_ids:
            if self._references[block_id]:
                self._references[block_id] += 1
            else:
                del self._kept[block_id]
                self._own(block_id)

    def oldest_cached(self) -> int | None:
        """The free block whose content nobody has wanted for longest."""
        return next(iter(self._kept), None)

    def freed_at(self, block_id: int) -> float:
        return self._freed_at[block_id]

    # ---- owners ----

    def allocate_block(self, block_id: int) -> None:
        """Own this free block, with one reference."""
        if block_id in self._tied:
            del self._tied[block_id]
            self._eager.discard(block_id)
        elif block_id in self._loose:
            del self._loose[block_id]
        else:
            raise IntegrityError(f"take of block {block_id}, which is not free")
        self._own(block_id)

    def allocate_free(self, count: int) -> list[int]:
        """Own up to `count` free blocks that no region shows, lowest ids first."""
        taken: list[int] = []
        while len(taken) < count and self._loose:
            block_id = heapq.heappop(self._lowest_loose)
            self._in_heap[block_id] = False
            if block_id in self._loose:
                del self._loose[block_id]
                self._own(block_id)
                taken.append(block_id)
        return taken

    def allocate_free_mapped(self, count: int) -> list[int]:
        """Own up to `count` free blocks that regions still show, the longest free first. Those places are stale now."""
        taken: list[int] = []
        while len(taken) < count and self._tied:
            block_id, _ = self._tied.popitem(last=False)
            self._eager.discard(block_id)
            self._own(block_id)
            taken.append(block_id)
        return taken

    def add_references(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; each needs a `free` of its own."""
        for block_id in block_ids:
            if not self._references[block_id]:
                raise IntegrityError(f"share of block {block_id}, which nobody owns")
            self._references[block_id] += 1

    def free(self, block_ids: Iterable[int], *, fence: int, now: float) -> None:
        """Drop one reference of each block; a block without any is free again.

        Args:
            fence: of the last step that may read it; 0 if that has not changed since it was taken.
            now: the time, in seconds of a monotonic clock.
        """
        for block_id in block_ids:
            if not self._references[block_id]:
                raise IntegrityError(f"free of block {block_id}, which is free already")
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            self._num_owned -= 1
            self._freed_at[block_id] = now
            self._fence[block_id] = max(self._fence[block_id], fence)
            if block_id in self.indexed_blocks:
                self._kept[block_id] = None
            else:
                self._file(block_id)

    # ---- regions ----

    def note_region_mapped(self, block_ids: Iterable[int]) -> None:
        """Note that each of these owned blocks is shown in one more place of a region."""
        for block_id in block_ids:
            assert self._references[block_id], f"block {block_id} is shown, but nobody owns it"
            self._places[block_id] += 1

    def begin_show(self, count: int, *, steals: bool = False) -> list[int]:
        """Up to `count` free blocks that are about to be shown for whoever comes: loose ones, and if that `steals`,
        those that other places still show."""
        block_ids = self.allocate_free(count)
        if steals:
            block_ids += self.allocate_free_mapped(count - len(block_ids))
        for block_id in block_ids:
            self._references[block_id] = 0
        self._num_owned -= len(block_ids)
        self._moving.update(block_ids)
        return block_ids

    def end_show(self, block_ids: Sequence[int], now: float, *, failed: bool) -> None:
        """They are shown in one place more and free, or loose as before."""
        for block_id in block_ids:
            self._moving.remove(block_id)
            self._freed_at[block_id] = now
            if failed:
                self._file(block_id)
            else:
                self._places[block_id] += 1
                self._tied[block_id] = None
                self._eager.add(block_id)

    def note_region_unmapped(self, block_ids: Iterable[int]) -> None:
        """Note that each of these blocks is shown in one place less."""
        for block_id in block_ids:
            if not self._places[block_id]:
                raise IntegrityError(f"block {block_id} is hidden where it was not shown")
            self._places[block_id] -= 1
            if not self._places[block_id] and block_id in self._tied:
                del self._tied[block_id]
                self._eager.discard(block_id)
                self._make_loose(block_id)
                self._loose.move_to_end(block_id, last=False)  # nobody chose it for as long as it was tied

    # ---- pages ----

    def begin_attach(self, count: int) -> list[int]:
        """Up to `count` cold blocks, lowest ids first, that are about to get pages."""
        block_ids = [heapq.heappop(self._cold) for _ in range(min(count, len(self._cold)))]
        self._moving.update(block_ids)
        return block_ids

    def detachable(self, count: int, *, freed_before: float) -> tuple[list[int], int]:
        """Up to `count` loose blocks whose pages could go, the longest free first, and the latest of their fences.
        Those freed after `freed_before` stay."""
        block_ids: list[int] = []
        for block_id in self._loose:
            if len(block_ids) == count or self._freed_at[block_id] > freed_before:
                break
            block_ids.append(block_id)
        return sorted(block_ids), max((self._fence[b] for b in block_ids), default=0)

    def begin_detach(self, block_ids: Sequence[int]) -> None:
        """These loose blocks are about to lose their pages."""
        for block_id in block_ids:
            del self._loose[block_id]
        self._moving.update(block_ids)

    def end_move(self, block_ids: Sequence[int], *, has_pages: bool) -> None:
        """The blocks now have pages, or have none."""
        for block_id in block_ids:
            self._moving.remove(block_id)
            if has_pages:
                self._make_loose(block_id)
            else:
                heapq.heappush(self._cold, block_id)

    def end_attach(self, block_ids: Sequence[int], now: float) -> None:
        """The blocks have pages now, and count as free from this moment."""
        for block_id in block_ids:
            self._freed_at[block_id] = now
        self.end_move(block_ids, has_pages=True)

    def oldest_free_since(self) -> float | None:
        """When the block that has been free for longest, and is shown nowhere, was freed."""
        return self._freed_at[next(iter(self._loose))] if self._loose else None

    def check_integrity(self, owned: Counter[int], shown: Counter[int]) -> None:
        """Raise `IntegrityError` unless references are those of `owned`, places those of `shown`, and every block has
        exactly one state."""
        for name, counts, expected in (("references", self._references, owned), ("places", self._places, shown)):
            counted = Counter({b: n for b, n in enumerate(counts) if n})
            if counted != expected:
                raise IntegrityError(f"{name}: {dict(counted - expected)} too many, {dict(expected - counted)} too few")
        states = [*self._cold, *self._loose, *self._tied, *self._kept, *self._moving, *owned]
        if sorted(states) != list(self.block_ids):
            raise IntegrityError(
                f"{len(states)} states for {len(self.block_ids)} blocks: {Counter(states).most_common(3)}"
            )
        if len(owned) != self._num_owned:
            raise IntegrityError(f"{len(owned)} blocks are owned, {self._num_owned} counted")
        if any(not self._places[b] for b in self._tied) or any(self._places[b] for b in (*self._loose, *self._cold)):
            raise IntegrityError("a free block is filed where its places do not belong")
        if not self._kept.keys() <= self.indexed_blocks or self.indexed_blocks - set(owned) - self._kept.keys():
            raise IntegrityError("a free block with content is filed as one without, or the reverse")
        if not self._eager <= self._tied.keys() or not self._loose.keys() <= set(self._lowest_loose):
            raise IntegrityError("the queues of free blocks contradict each other")

    def _own(self, block_id: int) -> None:
        self._references[block_id] = 1
        self._num_owned += 1

    def _file(self, block_id: int) -> None:
        """A free block without content is tied or loose."""
        if self._places[block_id]:
            self._tied[block_id] = None
        else:
            self._make_loose(block_id)

    def _make_loose(self, block_id: int) -> None:
        self._loose[block_id] = None
        if not self._in_heap[block_id]:
            self._in_heap[block_id] = True
            heapq.heappush(self._lowest_loose, block_id)
