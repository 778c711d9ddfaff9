"""Models and adapters added at run time, on a replica's shelf."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from folio.app.config.added_model import AddedModel
from folio.app.config.engine import DeviceName
from folio.app.config.shelf import ShelfConfig
from folio.app.engine.lora.source import AdapterSource
from folio.app.errors import ModelUnavailableError, UnavailableError
from folio.app.fleet.loaded import LoadedTable

if TYPE_CHECKING:
    from folio.app.shelf.shelf import Shelf
    from folio.app.shelf.shelved_model import ShelvedModel

logger = logging.getLogger(__name__)

# Longest wait for the requests of a removed model to end.
_REMOVAL_S = 5.0
# Longest wait for a table with the model or adapter of a request. A new registry gets the table from the ingresses,
# which send it about once a second.
_LEARN_S, _LEARN_POLL_S = 3.0, 0.05


class ShelfAdditions:
    """Keeps a shelf's additions equal to the newest table. In one event loop.

    Args:
        settings: the models that are there from the start.
        shelf: with the table's models and adapters. Owned by the caller.
        table: the table that the shelf has.
        newest: returns the newest table. `None`: the shelf has no additions.
        device: of all models.
    """

    def __init__(
        self,
        settings: ShelfConfig,
        shelf: Shelf,
        table: LoadedTable,
        newest: Callable[[], Awaitable[LoadedTable]] | None,
        device: DeviceName,
    ) -> None:
        self._settings, self._shelf, self._device = settings, shelf, device
        self._first = settings.first.name
        self._table, self._newest = table, newest
        self._set = table  # the last one whose adapters all engines have
        self._setting = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None
        self._removals: set[asyncio.Task[None]] = set()

    async def model(self, name: str, adapter: str | None = None) -> ShelvedModel:
        """The model of a request, the first one if the name is empty. If it or the adapter is not known here, the
        ingress, which knows them, has learnt of a change that this replica has missed; then this waits for the change.

        Raises:
            UnknownModelError: there is no such model, and no models or adapters are added at run time.
            ModelUnavailableError: no table has come with the model and the adapter; another replica may have it.
        """
        name, deadline = name or self._first, time.monotonic() + _LEARN_S
        while self._newest is not None and (missed := self._missed(name, adapter)) is not None:
            if time.monotonic() > deadline:
                raise ModelUnavailableError(f"the {missed} has not reached this replica; send the request again")
            self.refresh()
            assert self._refreshing is not None
            await asyncio.wait([self._refreshing])
            await asyncio.sleep(_LEARN_POLL_S)
        return self._shelf.model(name)

    def _missed(self, name: str, adapter: str | None) -> str | None:
        """The model or adapter of a request that this replica does not know, for errors; `None` if it knows them."""
        if name not in self._shelf.names:
            return f"model {name!r}"
        if adapter is None or adapter in self._shelf.model(name).config.engine.adapters:
            return None
        loaded = {source.name for source in self._set.sources if (source.model or self._first) == name}
        return None if adapter in loaded else f"adapter {adapter!r}"

    async def adopt(self, table: LoadedTable) -> None:
        """Set the models and adapters of a table, unless the shelf has a newer one.

        Raises:
            UnavailableError: the shelf serves no requests any more.
        """
        table = table.beside(self._settings.names)
        async with self._setting:
            if table.revision > self._table.revision:
                await self._set_models(table.models)
                self._table = table
                await self._set_adapters()
                self._set = table
                names = ", ".join((*(model.name for model in table.models), *table.ids.values()))
                logger.info("models and adapters added at run time: %s", names or "none")

    def refresh(self) -> None:
        """Take over a change that this replica has missed, in a task of this event loop."""
        if self._newest is not None and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._refresh(self._newest))

    async def _set_models(self, models: Sequence[AddedModel]) -> None:
        """Remove and add models, so that those added at run time are these."""
        kept = [model for model in self._table.models if model in models]
        for model in self._table.models:
            if model not in kept and model.name in self._shelf.names:
                removal = asyncio.create_task(self._shelf.remove(model.name))
                self._removals.add(removal)
                removal.add_done_callback(self._removals.discard)
                await asyncio.wait([removal], timeout=_REMOVAL_S)  # its name is free at once
        for model in models:
            if model not in kept and model.name not in self._shelf.names:
                self._shelf.add(model.on_device(self._device))

    async def _set_adapters(self) -> None:
        """Give every model the adapters loaded at run time for it. One whose engine has stopped gets them when
        it is loaded again. Raises as `adopt`."""
        names = self._shelf.names
        outcomes = await asyncio.gather(*map(self._set_adapters_of, names), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, UnavailableError):
                raise outcome
        self._shelf.check()

    async def _set_adapters_of(self, name: str) -> None:
        model = self._shelf.model(name)
        model.loaded_adapters = self._adapters_of(name)  # before the look at the engine, see `Control._load`
        if model.engine is not None:
            await model.engine.set_loaded(model.loaded_adapters)

    def _adapters_of(self, name: str) -> list[AdapterSource]:
        return [source for source in self._table.sources if (source.model or self._first) == name]

    async def _refresh(self, newest: Callable[[], Awaitable[LoadedTable]]) -> None:
        try:
            await self.adopt(await newest())
        except UnavailableError:
            return  # the engine has stopped; the health check says so
