"""Rows of running sequences: their block tables and regions as arrays, kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from folio.app.engine.layers.batch import Array, TableLayout
from folio.vmem import GroupTable, KVMemory, SequenceMemory

_NO_ENTRIES: Array = np.zeros(0, dtype=np.int64)


class SequenceRows:
    """Block tables and regions of the sequences that run, updated with the changes that the memory reports.

    A sequence has a row from its first step until it is freed or swapped out. The rows in use are the first ones: when
    one in the middle becomes free, the last one moves there.

    Args:
        num_rows: rows at first; doubled as often as needed.

    Attributes:
        layout: layout of the tables.
        tables: of each group `[num_rows, width]` int32, views of one array: blocks of sequences in the block table
            view, and of states. After the last block there are zeros; before the window the entries are undefined.
        regions: `[num_groups, num_rows]` int64, slots of the regions, -1 without one.
        version: changes whenever the sequences do, or the row or region of one.
    """

    def __init__(self, memory: KVMemory, num_rows: int) -> None:
        self._memory = memory
        self._rows: dict[SequenceMemory, int] = {}
        self._owners: list[SequenceMemory] = []  # by row
        self._places: dict[GroupTable, tuple[int, int]] = {}  # table → its group and row
        self._seen: list[SequenceMemory] = []
        self.version = 0
        self._allocate(num_rows)

    def _allocate(self, num_rows: int) -> None:
        groups = self._memory.groups
        self.layout = TableLayout(groups, self._memory.max_tokens, num_rows)
        self._entries = np.zeros(self.layout.size, dtype=np.int32)
        self.tables = [self._entries[span].reshape(shape) for span, shape in self.layout.spans()]
        self.regions = np.full((len(groups), num_rows), -1, dtype=np.int64)
        self._ends = [[0] * num_rows for _ in groups]  # of each row: there are zeros from there on
        self._untold: list[Array] = []  # entries that ranks have not been told of

    def follow(self, sequences: Sequence[SequenceMemory]) -> None:
        """Give these sequences rows, and take over what has changed in the memory since the last call."""
        starts, widths = self.layout.starts, self.layout.widths
        entries, blocks = [], []  # of tables with one more block, as nearly all are
        for table, first in self._memory.take_changes().items():
            if (place := self._places.get(table)) is None:
                continue
            g, row = place
            ends, block_ids = self._ends[g], table.block_ids
            if first and table.region is None and ends[row] <= first + 1 == len(block_ids):
                ends[row] = first + 1
                entries.append(starts[g] + row * widths[g] + first)
                blocks.append(block_ids[first])
            else:
                self._update(g, row, table, first)
        if entries:
            self._untold.append(np.array(entries))
            self._entries[self._untold[-1]] = blocks
        if sequences != self._seen:
            self._seen = list(sequences)
            self.version += 1
            closed = self._memory.closed(self._rows)
            self._replace(closed, [sequence for sequence in sequences if sequence not in self._rows])

    def rows_of(self, sequences: Sequence[SequenceMemory]) -> Array:
        """`[num_seqs]` int64."""
        return np.array([self._rows[sequence] for sequence in sequences], dtype=np.int64)

    def tell(self) -> tuple[Array, Array]:
        """Entries `[num_changes]` int64 that have changed since the last call, some twice, and their values, int32."""
        untold, self._untold = self._untold, []
        entries = np.concatenate(untold) if untold else _NO_ENTRIES
        return entries, self._entries[entries]

    def tell_again(self) -> None:
        """Make the next `tell` return the tables of all sequences, because ranks have lost theirs."""
        self._untold = []
        for sequence, row in self._rows.items():
            for g, table in enumerate(sequence.groups):
                if table.region is None:
                    self._note(g, row, table.first, self._ends[g][row])

    # ---- inside ----

    def _update(self, g: int, row: int, table: GroupTable, first: int) -> None:
        """Take over a table's entries from index `first` on, and with the first one its region."""
        if not first:
            self.regions[g, row] = -1 if table.region is None else table.region.slot
            self.version += 1
        if table.region is not None:  # its entries are not read
            return
        first, end, old_end = max(first, table.first), len(table.block_ids), self._ends[g][row]
        self.tables[g][row, first:end] = table.block_ids[first:]
        if old_end > end:
            self.tables[g][row, end:old_end] = 0
        self._ends[g][row] = end
        self._note(g, row, first, max(end, old_end))

    def _note(self, g: int, row: int, first: int, end: int) -> None:
        begin = self.layout.starts[g] + row * self.layout.widths[g]
        self._untold.append(np.arange(begin + first, begin + end))

    def _replace(self, closed: Sequence[SequenceMemory], new: Sequence[SequenceMemory]) -> None:
        """Take the rows of closed sequences away, and give new ones rows, so that no row is free between others."""
        free = sorted(self._rows.pop(sequence) for sequence in closed)
        for sequence in closed:
            for table in sequence.groups:
                del self._places[table]
        if (num_rows := len(self._rows) + len(new)) > self.layout.num_rows:
            self._grow(num_rows)
        for sequence in new:
            row = free.pop(0) if free else len(self._owners)
            self._set_row(sequence, row)
            for g, table in enumerate(sequence.groups):
                self._update(g, row, table, 0)
        for row in reversed(free):
            last = self._owners.pop()
            if row < len(self._owners):
                self._move(last, row)

    def _move(self, sequence: SequenceMemory, row: int) -> None:
        old = self._rows[sequence]
        self._set_row(sequence, row)
        self.version += 1
        for g in range(len(sequence.groups)):
            self.regions[g, row] = self.regions[g, old]
            self.tables[g][row] = self.tables[g][old]
            self._note(g, row, 0, max(self._ends[g][old], self._ends[g][row]))
            self._ends[g][row] = self._ends[g][old]

    def _set_row(self, sequence: SequenceMemory, row: int) -> None:
        self._rows[sequence] = row
        self._owners[row : row + 1] = [sequence]
        for g, table in enumerate(sequence.groups):
            self._places[table] = g, row

    def _grow(self, num_rows: int) -> None:
        """Allocate more rows, at least `num_rows`. Ranks must be told of all tables."""
        tables, regions, ends = self.tables, self.regions, self._ends
        size = self.layout.num_rows
        self._allocate(max(num_rows, 2 * size))
        self.regions[:, :size] = regions
        for g, table in enumerate(tables):
            self.tables[g][:size] = table
            self._ends[g][:size] = ends[g]
