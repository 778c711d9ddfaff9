"""Models and adapters added at run time: each process's copy of the registry's table, and the changes by ingresses.

The registry is a `SharedTable`. A change is on all replicas or on none:

1. Begin the change at the registry, after other changes.
2. Check the model or adapter on every replica, which keeps nothing of it.
3. Commit the new table at the registry.
4. Set the new table on every replica. If a replica does not confirm it, commit and set the old sources again.

A process that has missed a change, such as a replica that starts, gets the table from the registry about once a second.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from folio.app.config.shelf import ModelConfig
from folio.app.engine.lora.source import AdapterSource
from folio.app.errors import FolioError, NoReplicaError, RequestError, UnavailableError, UnknownModelError
from folio.app.fleet.loaded import LoadedRegistry, LoadedTable
from folio.app.fleet.messages import CheckedModel
from folio.app.serving.calls import ReplicaClient
from folio.app.serving.shared_table import SharedTable

logger = logging.getLogger(__name__)

BEAT_S = 1.0
ANSWER_TIMEOUT_S = 2.0
# Timeout of a starting replica's first call: the registry may have to start, too.
FIRST_ANSWER_S = 15.0
# Timeouts of checking an adapter's or model's files, and of setting a table, on every replica.
CHECK_TIMEOUT_S, SET_TIMEOUT_S = 120.0, 10.0
# Longest wait for another change.
CHANGE_WAIT_S, _CHANGE_POLL_S = 20.0, 0.1


class TableCopy:
    """A process's copy of the registry's table.

    Args:
        app_name: the application whose replicas share the registry.
        on_change: called with each new table.
    """

    def __init__(self, app_name: str, on_change: Callable[[LoadedTable], None] = lambda _: None) -> None:
        what, without = "models and adapters", "this process learns later of those added at run time"
        self._registry = SharedTable(LoadedRegistry, f"folio-loaded:{app_name}", what, without, ANSWER_TIMEOUT_S)
        self._on_change = on_change
        self.table = LoadedTable()

    def fetch(self) -> LoadedTable:
        """The table, for a process that starts, from a thread that may wait; empty if there is no answer."""
        try:
            _, newer = self._registry.fetch("newer", self.table.revision, timeout_s=FIRST_ANSWER_S)
        except UnavailableError as error:
            logger.warning("starting without the models and adapters added at run time, which come later: %s", error)
        else:
            self.adopt(newer)
        return self.table

    async def refresh(self) -> LoadedTable:
        """The registry's table, or this process's copy if the registry does not answer."""
        with suppress(UnavailableError):
            await self.sync()
        return self.table

    async def sync(self) -> LoadedTable:
        """Exchange the newest table with the registry. Raises `UnavailableError` if it does not answer."""
        revision, newer = await self.call("newer", self.table.revision)
        self.adopt(newer)
        if revision < self.table.revision:
            await self.call("restore", self.table)
        return self.table

    def adopt(self, table: LoadedTable | None) -> None:
        """Take over a table if it is newer."""
        if table is not None and table.revision > self.table.revision:
            self.table = table
            self._on_change(table)

    async def call(self, method: str, *args: Any) -> Any:
        """Call the registry. Raises `UnavailableError` if it does not answer."""
        return await self._registry.call(method, *args)


class LoadedTables:
    """The models and adapters added at run time, as an ingress knows and changes them.

    Args:
        reserved: names of the models, adapters and aliases of the settings.
    """

    def __init__(self, copy: TableCopy, replicas: ReplicaClient, reserved: Collection[str]) -> None:
        self._copy = copy
        self._replicas = replicas
        self._reserved = frozenset(reserved)
        self._changing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Keep the copy of the table new, in a task of this event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._beat(), name="folio-loaded")

    async def refresh(self) -> None:
        """Get the newest table. Without an answer the old one remains."""
        await self._copy.refresh()

    async def load(self, name: str, path: str, *, in_place: bool, model: str) -> None:
        """Load an adapter on every replica, or on none. Idempotent.

        Args:
            path: its folder, below `adapter_dir`.
            model: the name of its model.
            in_place: it may replace another one of its name.

        Raises:
            RequestError: the name is taken, or the adapter cannot be served.
            UnknownModelError: there is no such folder.
            EngineError: a replica failed.
            UnavailableError: a replica or the registry has not answered, or other changes took too long.
        """
        if name in self._reserved:
            raise RequestError(f"{name!r} is a name of the settings; choose another one", "lora_name")
        async with self._change() as (change, table):
            if table.find_model(name) is not None:
                raise RequestError(f"{name!r} is the name of a model; choose another one", "lora_name")
            source = await self._checked("check_adapter", "lora_path", name, path, model)
            known = table.find(name)
            if known == source:
                return
            if known is not None and not in_place:
                raise RequestError(
                    f"the adapter {name!r} is already loaded, {_difference(known, source)}; unload it, or send "
                    "load_inplace: true",
                    "lora_name",
                )
            await self._switch(change, table, table.with_source(source))

    async def unload(self, name: str) -> None:
        """Unload an adapter on every replica, or on none: new requests for it are refused, and running ones go on.

        Raises:
            RequestError: the adapter belongs to the settings.
            UnknownModelError: there is no such adapter.
            EngineError, UnavailableError: see `load`.
        """
        if name in self._reserved:
            raise RequestError(f"{name!r} belongs to the settings and cannot be unloaded", "lora_name")
        async with self._change() as (change, table):
            if table.find(name) is None:
                raise UnknownModelError(f"no adapter {name!r} has been loaded", "lora_name")
            await self._switch(change, table, table.without(name))

    async def add_model(self, model: ModelConfig) -> ModelConfig:
        """Add a model on every replica, or on none; nothing of it is loaded. Idempotent.

        Args:
            model: with its folder, below `models_dir`.

        Returns:
            the model, with its folder's path.

        Raises:
            RequestError: the name is taken, or the folder's model cannot be served.
            EngineError, UnavailableError: see `load`.
        """
        if model.name in self._reserved:
            raise RequestError(f"{model.name!r} is a name of the settings; choose another one", "name")
        async with self._change() as (change, table):
            if table.find(model.name) is not None:
                raise RequestError(f"{model.name!r} is the name of an adapter; choose another one", "name")
            checked: CheckedModel = await self._checked("check_model", "path", model)
            known = table.find_model(model.name)
            if known is not None and replace(known, revision=0) != checked.config:
                differs = (
                    "or with other settings" if known.version == checked.config.version else "and its files differ"
                )
                raise RequestError(
                    f"there is a model {model.name!r} already, from {known.engine.model!r} {differs}; remove it first",
                    "name",
                )
            if known is None:
                await self._switch(change, table, table.with_model(checked.config))
            return checked.config

    async def remove_model(self, name: str) -> None:
        """Remove a model and its adapters on every replica, or on none; requests for it end with `UnavailableError`.

        Raises:
            RequestError: the model belongs to the settings.
            UnknownModelError: there is no such model.
            EngineError, UnavailableError: see `load`.
        """
        if name in self._reserved:
            raise RequestError(f"{name!r} belongs to the settings and cannot be removed", "name")
        async with self._change() as (change, table):
            if table.find_model(name) is None:
                raise UnknownModelError(f"no model {name!r} has been added", "name")
            await self._switch(change, table, table.without_model(name))

    async def _beat(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(BEAT_S)

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[tuple[str, LoadedTable]]:
        """Begin a change once no other is in progress; gives its name and the newest table."""
        change = uuid.uuid4().hex
        try:
            async with asyncio.timeout(CHANGE_WAIT_S):
                await self._changing.acquire()
        except TimeoutError:
            raise _busy_error() from None
        try:
            yield change, await self._begin(change)
        finally:
            self._changing.release()
            await self._end(change)  # also after a cancellation during `_begin`: the registry may have begun it

    async def _begin(self, change: str) -> LoadedTable:
        await self._copy.sync()
        deadline = asyncio.get_running_loop().time() + CHANGE_WAIT_S
        while (table := await self._copy.call("begin", change)) is None:
            if asyncio.get_running_loop().time() > deadline:
                raise _busy_error()
            await asyncio.sleep(_CHANGE_POLL_S)
        self._copy.adopt(table)
        return self._copy.table

    async def _end(self, change: str) -> None:
        try:
            await self._copy.call("end", change)
        except UnavailableError as error:  # the registry has died, and the change with it, or `LEASE_S` ends it
            logger.warning("could not end the change of models or adapters %s: %s", change, error)

    async def _checked(self, method: str, param: str, *args: Any) -> Any:
        """The one answer of all replicas to a check. Raises `RequestError`, about `param`, if they differ."""
        answers = await self._replicas.call_each(method, *args, timeout_s=CHECK_TIMEOUT_S)
        _raise_error(answers)
        if any(answer != answers[0] for answer in answers):
            raise RequestError("the files are not the same for all replicas", param)
        return answers[0]

    async def _switch(self, change: str, old: LoadedTable, new: LoadedTable) -> None:
        await self._commit(change, new)
        try:
            _raise_error(await self._replicas.call_each("set_loaded", new, timeout_s=SET_TIMEOUT_S))
        except FolioError:
            undone = replace(old, revision=new.revision + 1)
            await self._commit(change, undone)
            await self._replicas.call_each("set_loaded", undone, timeout_s=SET_TIMEOUT_S)
            raise

    async def _commit(self, change: str, table: LoadedTable) -> None:
        if not await self._copy.call("commit", change, table):
            raise UnavailableError("the change took too long, and another one has begun; send the request again")
        self._copy.adopt(table)


def _raise_error(answers: list[Any]) -> None:
    """Raise an error if the replicas' answers have any, preferably a `RequestError`."""
    if not answers:
        raise NoReplicaError("there is no engine replica; send the request again")
    errors = [answer for answer in answers if isinstance(answer, FolioError)]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, RequestError))


def _difference(known: AdapterSource, source: AdapterSource) -> str:
    return f"from {known.path!r}" if known.path != source.path else "and its files have changed since"


def _busy_error() -> UnavailableError:
    return UnavailableError("another change of models or adapters is in progress; send the request again", 1.0)
