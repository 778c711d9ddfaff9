"""Pinned prefixes: sequences that no step computes, kept for the blocks they own (PagedAttention §4.4)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from folio.vmem.budget import PagePool
from folio.vmem.errors import PinError
from folio.vmem.group import GroupMemory
from folio.vmem.lock import MemoryLock
from folio.vmem.prefix.prefix_summary import CachedPrefix
from folio.vmem.prefix.token_chain import TokenChain, decode_tokens
from folio.vmem.sequence import SequenceMemory


@dataclass(frozen=True, slots=True)
class PinReport:
    """One pinned prefix. `num_bytes` includes blocks shared with other pins."""

    name: str
    num_tokens: int
    num_bytes: int


@dataclass(eq=False)
class Pins:
    """Pinned prefixes by name; `KVMemory.pin` and `KVMemory.unpin` change them.

    Args:
        quota: share of the page budget that pins may take. The longest sequence must always fit beside them.
    """

    _lock: MemoryLock
    _pages: PagePool
    _groups: Sequence[GroupMemory]
    _quota: float
    _pins: dict[str, SequenceMemory] = field(default_factory=dict)

    def check_pin(self, name: str, chain: TokenChain, token_ids: Sequence[int]) -> None:
        """Raise `PinError` if this prefix can never be pinned under that name. From any thread.

        Args:
            chain: of the sequence to be pinned; is extended.
        """
        chain.extend(token_ids)
        with self._lock:
            if self.is_pinned(name, chain, len(token_ids)):
                return
            num_pages = 0
            if all(group.spec.window_tokens is None for group in self._groups):
                num_pages = sum(group.layout.num_blocks(len(token_ids)) * group.num_slices for group in self._groups)
            self._check(name, num_pages)

    def pinned_prefixes(self) -> list[CachedPrefix]:
        """The pinned prefixes, the earliest pin first. From any thread."""
        with self._lock:
            return self.prefixes()

    # ---- with the lock held ----

    def prefixes(self) -> list[CachedPrefix]:
        """See `pinned_prefixes`."""
        return [
            CachedPrefix(
                decode_tokens(b"".join(chain.units[: sequence.num_tokens // chain.unit_tokens])),
                chain.keys,
                0,
                name,
            )
            for name, sequence in self._pins.items()
            if (chain := sequence.prefix.chain) is not None
        ]

    @property
    def sequences(self) -> Collection[SequenceMemory]:
        return self._pins.values()

    def is_pinned(self, name: str, chain: TokenChain, num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens of the chain, in whole units, are pinned under that name."""
        pinned = self._pins.get(name)
        if pinned is None or pinned.prefix.chain is None or pinned.num_tokens != num_tokens:
            return False
        num_units = num_tokens // chain.unit_tokens
        own = pinned.prefix.chain
        return own.keys == chain.keys and own.units[:num_units] == chain.units[:num_units]

    def check_quota(self, name: str, sequence: SequenceMemory, num_tokens: int) -> None:
        """Raise `PinError` unless the sequence's first `num_tokens` tokens may be pinned under that name now."""
        num_pages = 0
        for group, table in zip(self._groups, sequence.groups, strict=True):
            block_ids = table.block_ids[table.first : group.layout.num_blocks(num_tokens)]
            num_pages += len(set(block_ids) - self._blocks(group)) * group.num_slices
        self._check(name, num_pages, self._pages.num_pinned)

    def add(self, name: str, sequence: SequenceMemory) -> None:
        self._pins[name] = sequence
        self._count()

    def remove_pin(self, name: str) -> SequenceMemory:
        """Remove a pin; the caller frees its sequence. Raises `PinError` if there is no such pin."""
        if name not in self._pins:
            raise PinError(f"no prefix named {name!r} is pinned; pinned: {', '.join(map(repr, self._pins)) or 'none'}")
        sequence = self._pins.pop(name)
        self._count()
        return sequence

    def remove_all(self) -> list[SequenceMemory]:
        return [self.remove_pin(name) for name in list(self._pins)]

    def report(self) -> tuple[PinReport, ...]:
        return tuple(
            PinReport(
                name,
                sequence.num_tokens,
                sum(
                    table.num_owned * group.layout.block_bytes
                    for group, table in zip(self._groups, sequence.groups, strict=True)
                ),
            )
            for name, sequence in self._pins.items()
        )

    def _check(self, name: str, num_pages: int, num_pinned: int = 0) -> None:
        """Raise `PinError` if the name is taken, or so many pages exceed the quota."""
        if name in self._pins:
            raise PinError(f"another prefix named {name!r} is pinned already; unpin it first")
        nominal = self._pages.nominal
        most = max(min(int(self._quota * nominal), nominal - self._pages.longest), 0)
        if num_pinned + num_pages > most:
            page_bytes = self._pages.page_bytes
            raise PinError(
                f"the prefix takes {num_pages * page_bytes} bytes; of the {most * page_bytes} that may be pinned, "
                f"{num_pinned * page_bytes} are in use: unpin a prefix, or raise pin_quota or kv_memory_bytes"
            )

    def _count(self) -> None:
        self._pages.num_pinned = sum(len(self._blocks(group)) * group.num_slices for group in self._groups)

    def _blocks(self, group: GroupMemory) -> set[int]:
        return {b for sequence in self._pins.values() for b in sequence.groups[group.index].owned}
