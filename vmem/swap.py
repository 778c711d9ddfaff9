"""Host memory for the blocks of preempted sequences (PagedAttention §4.5, swapping)."""

from __future__ import annotations

from dataclasses import dataclass

from vmem.errors import OutOfSwap
from vmem.prefix import TokenChain
from vmem.sequence import ViewPolicy


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
        copies: of each layer group, the key of its copy (`BlockContents.save`).
    """

    sequences: tuple[SwappedSequence, ...]
    copies: tuple[int, ...]
    num_rows: tuple[int, ...]
    num_bytes: int


class SwapSpace:
    """The host memory that swapped blocks may take. Only called under the memory's lock.

    Args:
        budget_bytes: host memory at most.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0

    def claim(self, num_bytes: int) -> None:
        """Raises `OutOfSwap` when the budget has no room for so many bytes."""
        if self.used_bytes + num_bytes > self.budget_bytes:
            raise OutOfSwap(f"{num_bytes} bytes to swap, {self.budget_bytes - self.used_bytes} of swap space free")
        self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
