"""Prefixes that stay: sequences nobody computes, held for the blocks they own (PagedAttention §4.4, shared prefix)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vmem.budget import PagePool
from vmem.errors import PinError
from vmem.group import GroupMemory
from vmem.prefix_summary import CachedPrefix
from vmem.prefix_tree import TokenChain, decode_tokens
from vmem.sequence import GroupTable, SequenceMemory


@dataclass(frozen=True, slots=True)
class PinReport:
    """One pinned prefix. `num_bytes` counts blocks that it shares with other pins as well."""

    name: str
    num_tokens: int
    num_bytes: int


class Pins:
    """Pinned prefixes by name. Only called under the memory's lock.

    Args:
        quota: share of the page budget that they may take. What the longest sequence needs is never theirs.
    """

    def __init__(self, pages: PagePool, groups: Sequence[GroupMemory], quota: float) -> None:
        self._pages = pages
        self._groups = groups
        self._quota = quota
        self._pins: dict[str, SequenceMemory] = {}
        self.num_pages = 0

    @property
    def names(self) -> Collection[str]:
        return self._pins.keys()

    @property
    def sequences(self) -> Collection[SequenceMemory]:
        return self._pins.values()

    def has(self, name: str, chain: TokenChain, num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens of the chain, whole units, are pinned under that name."""
        pinned = self._pins.get(name)
        if pinned is None or pinned.prefix.chain is None or pinned.num_tokens != num_tokens:
            return False
        num_units = num_tokens // chain.unit_tokens
        own = pinned.prefix.chain
        return own.keys == chain.keys and own.units[:num_units] == chain.units[:num_units]

    def check_quota(self, name: str, tables: Sequence[tuple[GroupMemory, GroupTable]], num_tokens: int) -> None:
        """Raise `PinError` unless a prefix of these tables may be pinned under that name."""
        self.check_request(name, 0)
        more = 0
        for group, table in tables:
            pinned = self._blocks(group)
            block_ids = set(table.block_ids[table.first : group.layout.num_blocks(num_tokens)])
            more += len(block_ids - pinned) * group.num_slices
        if self.num_pages + more > self._most:
            raise self._too_large(more, self.num_pages)

    def check_request(self, name: str, num_pages: int) -> None:
        """Raise `PinError` if the name is taken, or so many pages exceed the quota, whatever is pinned already."""
        if name in self._pins:
            raise PinError(f"another prefix named {name!r} is pinned already; unpin it first")
        if num_pages > self._most:
            raise self._too_large(num_pages, 0)

    def add(self, name: str, sequence: SequenceMemory) -> None:
        self._pins[name] = sequence
        self._count()

    def prefixes(self) -> list[CachedPrefix]:
        """What is pinned, the first first."""
        return [
            CachedPrefix(
                decode_tokens(b"".join(chain.units[: sequence.num_tokens // chain.unit_tokens])), chain.keys, 0, name
            )
            for name, sequence in self._pins.items()
            if (chain := sequence.prefix.chain) is not None
        ]

    def remove_pin(self, name: str) -> SequenceMemory:
        """The caller frees it. Raises `PinError` if there is none of that name."""
        if name not in self._pins:
            raise PinError(
                f"no prefix named {name!r} is pinned; there are {', '.join(map(repr, self._pins)) or 'none'}"
            )
        sequence = self._pins.pop(name)
        self._count()
        return sequence

    def report(self) -> tuple[PinReport, ...]:
        return tuple(
            PinReport(
                name,
                sequence.num_tokens,
                sum(
                    (len(table.block_ids) - table.first) * group.layout.block_bytes
                    for group, table in zip(self._groups, sequence.groups, strict=True)
                ),
            )
            for name, sequence in self._pins.items()
        )

    @property
    def _most(self) -> int:
        return max(min(int(self._quota * self._pages.budget), self._pages.budget - self._pages.fewest), 0)

    def _too_large(self, num_pages: int, num_pinned: int) -> PinError:
        page_bytes = self._pages.page_bytes
        return PinError(
            f"the prefix takes {num_pages * page_bytes} bytes; {num_pinned * page_bytes} of the "
            f"{self._most * page_bytes} that may be pinned are; raise pin_quota or kv_memory_bytes"
        )

    def _count(self) -> None:
        self.num_pages = sum(len(self._blocks(group)) * group.num_slices for group in self._groups)
        self._pages.num_pinned = self.num_pages

    def _blocks(self, group: GroupMemory) -> set[int]:
        tables = [sequence.groups[group.index] for sequence in self._pins.values()]
        return {block_id for table in tables for block_id in table.block_ids[table.first :]}
