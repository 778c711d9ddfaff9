"""The KV memory of a rank as tensors: what kernels read and write, and what block copies copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vmem.backend import AddressRange, Backend
from vmem.group import LayerGroup
from vmem.layout import KVLayout


class CacheTensors:
    """Home and regions of every layer group as tensors. They own nothing: only what is mapped may be touched.

    Args:
        groups: the layer groups.
        homes, regions: of each group the address ranges, one for each home of its layout; a group of states has no
            regions.
        region_tokens: of each group, tokens from one region to the next in `region_view`.
    """

    def __init__(
        self,
        backend: Backend,
        groups: Sequence[LayerGroup],
        homes: Sequence[Sequence[AddressRange]],
        regions: Sequence[Sequence[AddressRange]],
        region_tokens: Sequence[int],
    ) -> None:
        self.groups = tuple(groups)
        self.homes, self.regions = homes, regions
        self.region_tokens = tuple(region_tokens)
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
        """The layer group that keeps recurrent states, if there is one."""
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
        """K and V of a layer by slot: `[num_regions, region_tokens, num_heads, dim]`, holes included. Of slot 0 only
        the first page is there, the anchor."""
        g, i = self._place_of_layer[layer]
        layout = self.groups[g].layout
        assert isinstance(layout, KVLayout)
        return layout.view(self._regions[g], i, self.region_tokens[g])

    def state_view(self) -> torch.Tensor:
        """Recurrent states by block: `[num_blocks, block_bytes]` uint8, holes included."""
        g = self.state_group
        assert g is not None
        [home] = self._homes[g]
        return home.view(-1, self.groups[g].layout.home_bytes)

    def home_words(self, g: int) -> list[torch.Tensor]:
        """A group's homes as `[num_blocks, home_bytes / 8]` int64: blocks copy several times faster so than by
        bytes."""
        return [home.view(torch.int64).view(-1, self.groups[g].layout.home_bytes // 8) for home in self._homes[g]]
