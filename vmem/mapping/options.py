"""Mapping options: the settings of the mapper's policy."""

from dataclasses import dataclass

from folio.vmem.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingOptions:
    """How mappings and pages follow the load.

    Attributes:
        background: run the mapper's thread. Without it nothing is mapped ahead and no memory is given back: for
            simulations, which must be repeatable.
        overlap: map the next step's blocks while this one computes (vAttention §6.2.1).
        deferred_reclamation: park the regions of finished sequences with their mappings (vAttention §6.2.2).
        eager_allocation: keep regions mapped ahead for the next prompts (vAttention §6.2.2).
        reclaim_threshold: share of the budget below which free pages without region mappings are replenished.
        idle_release_s: free pages go back to the machine after this long.
        cache_release_s: cached content without a hit is evicted, and its pages released, after this long.
        max_mappings: the most mapped pages, counted once per address, of all memories of one `MappingCount`; beyond it
            sequences are demoted.
    """

    background: bool = True
    overlap: bool = True
    deferred_reclamation: bool = True
    eager_allocation: bool = True
    reclaim_threshold: float = 0.1
    idle_release_s: float = 0.5
    cache_release_s: float = 60.0
    max_mappings: int = 50_000

    def __post_init__(self) -> None:
        if not 0 <= self.reclaim_threshold <= 1:
            raise LayoutError(f"reclaim_threshold {self.reclaim_threshold} must be between 0 and 1")
        if not (self.idle_release_s >= 0 and self.cache_release_s >= 0 and self.max_mappings >= 1):
            raise LayoutError(
                f"idle_release_s {self.idle_release_s}, cache_release_s {self.cache_release_s} must not be negative, "
                f"max_mappings {self.max_mappings} must be positive"
            )
