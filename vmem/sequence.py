"""What a sequence owns, and what a step asks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from vmem.prefix_tree import PrefixCursor
from vmem.region import Region

View = Literal["region", "block_table"]
ViewPolicy = Literal["auto", "region", "block_table"]


@dataclass(slots=True, eq=False)
class GroupTable:
    """What a sequence owns in one layer group.

    Attributes:
        block_ids: the block table: logical block index → block id.
        first: blocks before it have left the window; they belong to others, and their entries mean nothing.
        region: where they are shown in order, `None` if they are read through the block table.
    """

    block_ids: list[int] = field(default_factory=list)
    first: int = 0
    region: Region | None = None


@dataclass(slots=True, eq=False)
class SequenceMemory:
    """What one sequence owns. Made by `KVMemory.open` and `fork`, changed by `KVMemory` only.

    Attributes:
        policy: what was asked for; `view` is what it came to.
        groups: one table for each layer group.
        num_tokens: tokens there is room for as far as anybody asked.
        expected_tokens: how long it will probably be soon; its region is chosen for that.
        prefix: where it is in the tree of cached prefixes.
        ready_tokens: tokens it can have without another look at its blocks: they are there, and its own from the last
            token on. 0 where that is not known.
        shown_tokens: tokens that it can be read up to without another look at its region; 0 where that is not known.
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
        for table in self.groups:
            if table.region is not None:
                return "region"
        return "block_table"


class StepDemand(NamedTuple):
    """A step computes the tokens `start … end - 1` of a sequence, over everything cached before them."""

    sequence: SequenceMemory
    start: int
    end: int
