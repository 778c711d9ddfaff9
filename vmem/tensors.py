"""Cache tensors: the KV memory of a rank as kernels and block copies see it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from folio.vmem.backends.base import AddressRange, Backend
from folio.vmem.group import LayerGroup
from folio.vmem.layout import KVLayout

logger = logging.getLogger(__name__)


class CacheTensors:
    """Home and regions of every layer group as tensors. They own nothing; only mapped parts may be touched.

    Args:
        homes, regions: of each group the address ranges, one for each home of its layout; none for regions of states.
        region_tokens: of each group, tokens from one region to the next in `region_view`.
        max_tokens: of a sequence.
    """

    def __init__(
        self,
        backend: Backend,
        groups: Sequence[LayerGroup],
        homes: Sequence[Sequence[AddressRange]],
        regions: Sequence[Sequence[AddressRange]],
        region_tokens: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.groups = tuple(groups)
        self.homes, self.regions = homes, regions
        self.region_tokens, self.max_tokens = tuple(region_tokens), max_tokens
        self._homes = [[backend.tensor(reserved) for reserved in ranges] for ranges in homes]
        self._regions = [[backend.tensor(reserved) for reserved in ranges] for ranges in regions]
        self._place_of_layer = {
            layer: (g, i)
            for g, group in enumerate(groups)
            for i, layer in enumerate(group.layers)
            if not group.is_state
        }

    @property
    def state_group(self) -> int | None:
        """The layer group with recurrent states, if there is one."""
        return next((g for g, group in enumerate(self.groups) if group.is_state), None)

    def group_of(self, layer: int) -> int:
        """The layer group of a layer of the model."""
        return self._place_of_layer[layer][0]

    def home_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer by block: `[num_blocks, block_tokens, num_heads, dim]`. Block 0 is the anchor."""
        g, i = self._place_of_layer[layer]
        layout = self.groups[g].layout
        assert isinstance(layout, KVLayout)
        return layout.view(self._homes[g], i, layout.block_tokens)

    def region_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer by slot: `[num_regions, region_tokens, num_heads, dim]`, with holes. Slot 0 has only the
        anchor page. Empty in a group without regions."""
        g, i = self._place_of_layer[layer]
        if not self._regions[g]:
            keys, values = self.home_view(layer)
            return keys[:0], values[:0]
        layout = self.groups[g].layout
        assert isinstance(layout, KVLayout)
        return layout.view(self._regions[g], i, self.region_tokens[g])

    def state_view(self) -> torch.Tensor:
        """Recurrent states by block: `[num_blocks, block_bytes]` uint8, with holes."""
        g = self.state_group
        assert g is not None
        [home] = self._homes[g]
        return home.view(-1, self.groups[g].layout.home_bytes)

    def home_words(self, g: int) -> list[torch.Tensor]:
        """A group's homes as `[num_blocks, home_bytes / 8]` int64, which copies several times faster than bytes."""
        return [home.view(torch.int64).view(-1, self.groups[g].layout.home_bytes // 8) for home in self._homes[g]]


# (source, target, source rows, target rows): `target[target_rows[i]] = source[source_rows[i]]`, in the device's queue.
# Source and target are `[num_blocks, words]` int64 with adjacent words, rows `[n]` int64 on the device.
CopyBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

# Bytes gathered in one pass from each home: device memory taken beside the cache.
_STAGING_BYTES = 64 << 20


def _copy_by_index(
    source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor
) -> None:
    """`CopyBlocks` in plain torch, in two passes."""
    target.index_copy_(0, target_rows, source.index_select(0, source_rows))


class BlockContents(Protocol):
    """Copies of block contents, in the order of the calls and of the device's work."""

    def copy(self, g: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks of a layer group to others of it."""

    def save(self, key: int, g: int, block_ids: Sequence[int]) -> None:
        """Copy blocks of a layer group to host memory, under a new key.

        Raises:
            OutOfSwap, RuntimeError (from torch), MemoryError: there is no host memory.
        """

    def restore(self, key: int, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        """Write rows of a copy, row 0 being the first block saved, into blocks of its group, ahead of all later work of
        the device."""

    def discard(self, key: int) -> None:
        """Drop a copy, if there is one."""


class LocalContents:
    """The `BlockContents` of this process.

    On CUDA a step's stream only gathers and scatters; transfers from and to pinned memory run on a stream of their own,
    beside the next steps.

    Args:
        copy_blocks: copies, gathers and scatters blocks; by default torch's indexing, in two passes.
    """

    def __init__(self, tensors: CacheTensors, copy_blocks: CopyBlocks | None = None) -> None:
        self._tensors = tensors
        self._copy_blocks = copy_blocks or _copy_by_index
        self._stream: torch.cuda.Stream | None = None
        self._pins = True
        self._saved: dict[int, tuple[int, list[torch.Tensor]]] = {}  # key → group, of each home [num_rows, words]

    def copy(self, g: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        for blocks in self._tensors.home_words(g):
            rows = (torch.tensor(side, dtype=torch.int64, device=blocks.device) for side in (sources, targets))
            self._copy_blocks(blocks, blocks, *rows)

    def save(self, key: int, g: int, block_ids: Sequence[int]) -> None:
        self._saved[key] = (g, [self._copy_out(blocks, block_ids) for blocks in self._tensors.home_words(g)])

    def restore(self, key: int, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        if not rows:
            return
        g, copies = self._saved[key]
        for blocks, copy in zip(self._tensors.home_words(g), copies, strict=True):
            self._copy_in(blocks, copy, rows, block_ids)

    def discard(self, key: int) -> None:
        self._saved.pop(key, None)

    def _copy_out(self, blocks: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
        count, words = len(block_ids), blocks.shape[1]
        sources = torch.tensor(block_ids, dtype=torch.int64, device=blocks.device)
        rows = torch.arange(count, device=blocks.device)
        if blocks.device.type == "cpu":
            copy = torch.empty(count, words, dtype=torch.int64)
            self._copy_blocks(blocks, copy, sources, rows)
            return copy
        host = self._host_rows(count, words)
        stream = self._side_stream()
        for part in _parts(count, 8 * words):
            staged = torch.empty(len(sources[part]), words, dtype=torch.int64, device=blocks.device)
            self._copy_blocks(blocks, staged, sources[part], rows[: len(staged)])
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                host[part].copy_(staged, non_blocking=True)
            staged.record_stream(stream)
        return host

    def _host_rows(self, count: int, words: int) -> torch.Tensor:
        """Pinned memory `[count, words]` int64; where the system refuses it, ordinary memory, copied more slowly."""
        if self._pins:
            try:
                return torch.empty(count, words, dtype=torch.int64, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                logger.warning(
                    "%d bytes of host memory cannot be pinned (%s): from now on preempted sequences are swapped more "
                    "slowly; lower swap_bytes",
                    8 * count * words,
                    str(error).partition("\n")[0],
                )
        return torch.empty(count, words, dtype=torch.int64)

    def _copy_in(self, blocks: torch.Tensor, copy: torch.Tensor, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        targets = torch.tensor(block_ids, dtype=torch.int64, device=blocks.device)
        if blocks.device.type == "cpu":
            self._copy_blocks(copy, blocks, torch.tensor(rows, dtype=torch.int64), targets)
            return
        stream = self._side_stream()
        for part in _parts(len(rows), 8 * blocks.shape[1]):
            with torch.cuda.stream(stream):
                # Row by row: a gather on the host would be one more copy, and not from pinned memory.
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
