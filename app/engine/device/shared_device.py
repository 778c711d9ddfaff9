"""Shared device: pages and weights of a device that several engines of one process share."""

from __future__ import annotations

from dataclasses import dataclass

from folio.app.models.weights.store import WeightStore
from folio.vmem import DevicePages


@dataclass(frozen=True, slots=True, eq=False)
class SharedDevice:
    """Memory of a device that several engines share.

    Attributes:
        pages: physical memory of all weights and KV caches.
        weights: holds the models' weights, unmapped while their model sleeps; their bytes are charged to `pages`.
    """

    pages: DevicePages
    weights: WeightStore
