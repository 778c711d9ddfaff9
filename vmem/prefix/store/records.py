"""Records: the content of one unit's blocks in one layer group, as it is on disk.

| home 0: block, block, … | home 1: block, block, … | padding to 4 KiB
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch

from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_tree import PrefixNode
from folio.vmem.prefix.store.segment import ALIGNMENT, StoredUnit


class Records:
    """Copies between blocks at home, and buffers on the host that files are written from and read into.

    Attributes:
        num_blocks: of each layer group, the blocks of a unit.
        num_bytes: of each layer group, the bytes of a record.
        num_places: of each layer group, the places of a record's blocks, one for each block and home.
        on_host: the blocks are in the host's memory.
    """

    def __init__(self, memory: KVMemory) -> None:
        groups, tensors = memory.groups, memory.tensors
        unit_tokens = memory.prefixes.unit_tokens
        self.num_blocks = [1 if g.is_state else unit_tokens // g.layout.block_tokens for g in groups]
        self._words = [tensors.home_words(g) for g in range(len(groups))]
        self.num_places = [count * len(homes) for count, homes in zip(self.num_blocks, self._words, strict=True)]
        content = [
            count * sum(8 * words.shape[1] for words in homes)
            for count, homes in zip(self.num_blocks, self._words, strict=True)
        ]
        self.num_bytes = [-(-size // ALIGNMENT) * ALIGNMENT for size in content]
        self.on_host = self._words[0][0].device.type == "cpu"
        self._staging = self._pinned(max(self.num_bytes))

    def copy_out(self, g: int, block_ids: Sequence[int]) -> Callable[[], memoryview]:
        """Copy blocks, in the order of the device's work; returns a function that waits and returns the record, which
        the next call overwrites."""
        self._gather(g, block_ids, self._staging)
        done = None if self.on_host else torch.cuda.current_stream().record_event()

        def record() -> memoryview:
            if done is not None:
                done.synchronize()
            return self._staging.numpy().data.cast("B")[: self.num_bytes[g]]

        return record

    def copy_into(self, target: memoryview, g: int, block_ids: Sequence[int]) -> None:
        """Copy blocks into a record's place, after all work of the device so far."""
        if self.on_host:
            self._gather(g, block_ids, torch.frombuffer(target, dtype=torch.int64))
        else:
            target[:] = self.copy_out(g, block_ids)()

    def _gather(self, g: int, block_ids: Sequence[int], target: torch.Tensor) -> None:
        at = 0
        for place in self.places(g, block_ids):
            self.copy(target[at : at + len(place)], place)
            at += len(place)

    def copy_in(self, g: int, record: memoryview, block_ids: Sequence[int]) -> None:
        """Write blocks from a record, ahead of all later work of the device."""
        content, at = torch.frombuffer(record, dtype=torch.int64), 0
        for place in self.places(g, block_ids):
            self.copy(place, content[at : at + len(place)])
            at += len(place)

    def places(self, g: int, block_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Blocks as `[home_bytes / 8]` int64, in the order in which a record has them."""
        return (words[block_id] for words in self._words[g] for block_id in block_ids)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a place, in the order of the device's work."""
        if self.on_host:  # by numpy: torch would have its threads spin, which a step's need
            np.copyto(target.numpy(), source.numpy())
        else:
            target.copy_(source, non_blocking=True)

    def _pinned(self, num_bytes: int) -> torch.Tensor:
        """An aligned buffer; pinned if a device copies to it, and the system allows it."""
        if not self.on_host:
            with suppress(RuntimeError):
                return torch.zeros(num_bytes // 8, dtype=torch.int64, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.int64)


def stored_unit(memory: KVMemory, node: PrefixNode, g: int) -> StoredUnit:
    """What a unit's record in a layer group stands for."""
    assert node.parent is not None, "the root is no unit"
    root = memory.prefixes.chain(node.keys).root
    return StoredUnit(g, root, node.parent.digest or root, node.digest, node.tokens)
