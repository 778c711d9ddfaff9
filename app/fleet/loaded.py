"""Models and adapters added at run time: the table that all ingresses and replicas have, and the registry with the
newest one.

The registry is authoritative: it orders the changes and gives the newest table to every process that asks. It stores
nothing on disk. When its process dies, a new one gets the newest table from the copies of all ingresses and replicas. A
table with a higher revision replaces one with a lower revision everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from folio.app.config.added_model import AddedModel
from folio.app.engine.lora.source import AdapterSource

# Longest time of a change; then another one may begin, and the first can no longer be committed.
LEASE_S = 180.0
# Time in which a new registry allows no change: ingresses and replicas send it their copies about once a second.
SETTLING_S = 3.0


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """The adapters and models added at run time, after `revision` changes."""

    revision: int = 0
    sources: tuple[AdapterSource, ...] = ()
    models: tuple[AddedModel, ...] = ()

    @property
    def ids(self) -> Mapping[str, str]:
        """Name → id."""
        return {source.name: source.id for source in self.sources}

    def find(self, name: str) -> AdapterSource | None:
        return next((source for source in self.sources if source.name == name), None)

    def with_source(self, source: AdapterSource) -> LoadedTable:
        """The next table, with this adapter in place of any other of its name."""
        others = self.without(source.name)
        return replace(others, sources=(*others.sources, source))

    def without(self, name: str) -> LoadedTable:
        """The next table, without the adapter of this name."""
        kept = tuple(source for source in self.sources if source.name != name)
        return replace(self, revision=self.revision + 1, sources=kept)

    def beside(self, reserved: Collection[str]) -> LoadedTable:
        """This table without the names that a process has in its settings, which take precedence: after an update of
        the application, the table may be older than the settings."""
        return replace(
            self,
            sources=tuple(source for source in self.sources if source.name not in reserved),
            models=tuple(model for model in self.models if model.name not in reserved),
        )

    def find_model(self, name: str) -> AddedModel | None:
        return next((model for model in self.models if model.name == name), None)

    def with_model(self, model: AddedModel) -> LoadedTable:
        """The next table, with this model, whose name is new."""
        revision = self.revision + 1
        return replace(self, revision=revision, models=(*self.models, replace(model, revision=revision)))

    def without_model(self, name: str) -> LoadedTable:
        """The next table, without the model of this name and its adapters."""
        return LoadedTable(
            self.revision + 1,
            tuple(source for source in self.sources if source.model != name),
            tuple(model for model in self.models if model.name != name),
        )


class LoadedRegistry:
    """The newest table, and the change in progress, of which there is at most one."""

    def __init__(
        self, settling_s: float = SETTLING_S, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table, self._clock = LoadedTable(), clock
        self._lease_s = lease_s
        self._holder: str | None = None
        self._free_at = clock() + settling_s

    def newer(self, revision: int) -> tuple[int, LoadedTable | None]:
        """The revision, and the table if it is newer than the caller's."""
        return self._table.revision, self._table if self._table.revision > revision else None

    def restore(self, table: LoadedTable) -> None:
        """Take over a caller's table if it is newer."""
        if table.revision > self._table.revision:
            self._table = table

    def begin(self, change: str) -> LoadedTable | None:
        """Begin a change with this unique name; returns the table, or `None` if it must wait for another change."""
        now = self._clock()
        if now < self._free_at:
            return None
        self._holder, self._free_at = change, now + self._lease_s
        return self._table

    def commit(self, change: str, table: LoadedTable) -> bool:
        """Replace the table; false if the change has taken too long, or the table is not newer."""
        if self._holder != change or table.revision <= self._table.revision:
            return False
        self._table = table
        return True

    def end(self, change: str) -> None:
        """End a change, committed or not."""
        if self._holder == change:
            self._holder, self._free_at = None, 0.0
