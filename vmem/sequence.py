"""Sequence: its block tables, regions and place in the prefix tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from folio.vmem.mapping.region import Region
from folio.vmem.prefix.prefix_tree import PrefixCursor

View = Literal["region", "block_table"]
ViewPolicy = Literal["auto", "region", "block_table"]


@dataclass(slots=True, eq=False)
class GroupTable:
    """One sequence's blocks in one layer group.

    Attributes:
        block_ids: the block table: logical block index → block id.
        first: blocks before it have left the window; their entries are void.
        region: where the blocks are mapped in order; `None` if they are read through the block table.
        at_home: blocks `first … at_home - 1` are known to be mapped at home.
    """

    block_ids: list[int] = field(default_factory=list)
    first: int = 0
    region: Region | None = None
    at_home: int = 0

    @property
    def owned(self) -> list[int]:
        return self.block_ids[self.first :]

    @property
    def num_owned(self) -> int:
        return len(self.block_ids) - self.first


@dataclass(slots=True, eq=False)
class SequenceMemory:
    """One sequence's memory. Created and changed by `KVMemory` only.

    Attributes:
        policy: the view that was requested; `view` is the present one.
        groups: one table for each layer group.
        num_tokens: tokens that the blocks were allocated for.
        expected_tokens: expected length soon; decides which region is adopted.
        prefix: place in the prefix tree.
        writable_tokens: tokens that have blocks, exclusively owned from the last token on; 0 if not known.
        readable_tokens: tokens known to be mapped in the view in use; 0 if not known.
    """

    policy: ViewPolicy
    groups: tuple[GroupTable, ...]
    num_tokens: int = 0
    expected_tokens: int = 0
    prefix: PrefixCursor = field(default_factory=PrefixCursor)
    writable_tokens: int = 0
    readable_tokens: int = 0

    @property
    def view(self) -> View:
        return "block_table" if all(table.region is None for table in self.groups) else "region"


class TableChanges:
    """Block tables of open sequences that have changed since the last `take`, so that a step reads no other one. With
    the lock held."""

    def __init__(self) -> None:
        self._first: dict[GroupTable, int] = {}

    def note(self, table: GroupTable, first: int) -> None:
        """Note that entries from index `first` on have changed; 0 if the table's region has."""
        self._first[table] = min(first, self._first.get(table, first))

    def forget(self, table: GroupTable) -> None:
        """Drop the changes of a sequence that is freed."""
        self._first.pop(table, None)

    def take(self) -> dict[GroupTable, int]:
        """Changed table → the first index that has changed."""
        taken, self._first = self._first, {}
        return taken


class StepDemand(NamedTuple):
    """A step computes the tokens `start … end - 1` of a sequence, over everything cached before them."""

    sequence: SequenceMemory
    start: int
    end: int
