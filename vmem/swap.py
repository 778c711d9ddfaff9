"""Host memory for the blocks of preempted sequences (PagedAttention §4.5, swapping)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vmem.copies import CopyBlocks
from vmem.errors import OutOfSwap
from vmem.group import GroupMemory
from vmem.prefix import TokenChain
from vmem.sequence import ViewPolicy

# Of each home so many bytes are gathered at once: on a device that much memory is taken beside the cache.
_STAGING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """One sequence's tables, with rows of the swapped copies in place of block ids; `None` before the window."""

    policy: ViewPolicy
    num_tokens: int
    expected_tokens: int
    chain: TokenChain | None
    num_units: int
    rows: tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class SwappedGroup:
    """The sequences of one request in host memory: `KVMemory.swap_in` brings them back, `discard` gives them up.

    Attributes:
        copies: of each layer group and home, `[num_rows, home_bytes / 8]` int64.
    """

    sequences: tuple[SwappedSequence, ...]
    copies: tuple[tuple[torch.Tensor, ...], ...]
    num_rows: tuple[int, ...]
    num_bytes: int


class SwapSpace:
    """Copies blocks to host memory and back, many at once. Only called under the memory's lock.

    On CUDA a step's stream only gathers and scatters; the way over the bus runs on a stream of its own, beside the next
    steps, from and to pinned memory.

    Args:
        budget_bytes: host memory at most.
        copy_blocks: how blocks are gathered and scattered.
    """

    def __init__(self, budget_bytes: int, copy_blocks: CopyBlocks) -> None:
        self.budget_bytes = budget_bytes
        self._copy_blocks = copy_blocks
        self.used_bytes = 0
        self._stream: torch.cuda.Stream | None = None

    def claim(self, num_bytes: int) -> None:
        """Raises `OutOfSwap` when the budget has no room for so many bytes."""
        if self.used_bytes + num_bytes > self.budget_bytes:
            raise OutOfSwap(f"{num_bytes} bytes to swap, {self.budget_bytes - self.used_bytes} of swap space free")
        self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes

    def copy_out(self, group: GroupMemory, block_ids: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Contents of these blocks, `[len(block_ids), home_bytes / 8]` int64 for each home."""
        return tuple(self._copy_out(blocks, block_ids) for blocks in group.home_words())

    def copy_in(
        self, group: GroupMemory, copies: Sequence[torch.Tensor], rows: Sequence[int], block_ids: Sequence[int]
    ) -> None:
        """Write rows of the copies into these blocks, before whatever the device does next."""
        if not rows:
            return
        for blocks, copy in zip(group.home_words(), copies, strict=True):
            self._copy_in(blocks, copy, rows, block_ids)

    def _copy_out(self, blocks: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
        count, words = len(block_ids), blocks.shape[1]
        sources = torch.tensor(block_ids, dtype=torch.int64, device=blocks.device)
        rows = torch.arange(count, device=blocks.device)
        if blocks.device.type == "cpu":
            copy = torch.empty(count, words, dtype=torch.int64)
            self._copy_blocks(blocks, copy, sources, rows)
            return copy
        host = torch.empty(count, words, dtype=torch.int64, pin_memory=True)
        stream = self._side_stream()
        for part in _parts(count, 8 * words):
            staged = torch.empty(len(sources[part]), words, dtype=torch.int64, device=blocks.device)
            self._copy_blocks(blocks, staged, sources[part], rows[: len(staged)])
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                host[part].copy_(staged, non_blocking=True)
            staged.record_stream(stream)
        return host

    def _copy_in(self, blocks: torch.Tensor, copy: torch.Tensor, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        targets = torch.tensor(block_ids, dtype=torch.int64, device=blocks.device)
        if blocks.device.type == "cpu":
            self._copy_blocks(copy, blocks, torch.tensor(rows, dtype=torch.int64), targets)
            return
        stream = self._side_stream()
        for part in _parts(len(rows), 8 * blocks.shape[1]):
            with torch.cuda.stream(stream):
                # Row by row, because a gather on the host would be a copy more and not from pinned memory.
                staged = torch.empty(len(rows[part]), blocks.shape[1], dtype=torch.int64, device=blocks.device)
                for i, row in enumerate(rows[part]):
                    staged[i].copy_(copy[row], non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            self._copy_blocks(staged, blocks, torch.arange(len(staged), device=blocks.device), targets[part])
            staged.record_stream(torch.cuda.current_stream())

    def _side_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream


def _parts(count: int, row_bytes: int) -> list[slice]:
    step = max(1, _STAGING_BYTES // row_bytes)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
