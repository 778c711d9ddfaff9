"""Adapter store: LoRA adapters in memory, loaded on the first request and evicted for others.

A thread of the store's own reads files, so that no step waits for them. Slots change between steps, in the engine's
thread. There is no count of users: the requests of the scheduler name the adapters in use, by id (`AdapterSource.id`).
Where several models share the device, an adapter is charged before it is read.
"""

from __future__ import annotations

import bisect
import itertools
import json
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import astuple
from functools import partial
from operator import attrgetter
from typing import Any

from folio.app.engine.device.charges import DeviceCharges
from folio.app.engine.lora.layers import LoRALayers, Updates
from folio.app.engine.lora.rank import HEADER, Action, RankAdapters
from folio.app.engine.lora.source import AdapterSource
from folio.app.engine.ranks.processes import RankOrder
from folio.app.engine.ranks.rank_group import RankGroup
from folio.app.engine.request.faults import failure_of
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.schedule.scheduler import Scheduler
from folio.app.errors import EngineError, FolioError, ModelError, ModelUnavailableError, UnknownModelError

logger = logging.getLogger(__name__)


class AdapterStore:
    """Requests that wait for an adapter, before the scheduler's waiting queue, and at most `max_loaded` adapters,
    evicted least recently used first and never while in use.

    Requests without an adapter pass at once. The others are first come, first served within priority: behind a request
    that waits for a slot, later ones wait even if their adapter is loaded, because adapters in constant use could never
    be evicted. A request whose adapter is being read already has a slot and does not block others.

    Called by the engine's thread, unless stated otherwise.

    Args:
        configured: name → folder or Hub id of the adapters of the settings.
        layers: the model's LoRA layers, observed; `None` without adapters.
        ranks: the peers, which insert and remove the same adapters.
        scheduler: gets the requests whose adapter is loaded; adapters of its requests are in use.
        loaded: adapters loaded at run time, see `set_loaded`.
        memory: charges to a device that other models share.

    Attributes:
        slots: id → slot of every adapter in memory, least recently used first.
        loading: id → slot of every adapter that is being read.
        memory: charges of adapters to a shared device; `None` if the device is not shared.
        restoring: adapters of requests that have begun, which `unload_all` dropped: no step is computed until they are
            loaded again.
        has_read: whether a read has ended since the last `advance`.
        on_read: called by another thread when a read ends.
    """

    def __init__(
        self,
        configured: Mapping[str, str],
        layers: LoRALayers | None,
        max_loaded: int,
        ranks: RankGroup | None,
        scheduler: Scheduler,
        loaded: Collection[AdapterSource] = (),
        memory: DeviceCharges | None = None,
    ) -> None:
        self._configured = tuple(AdapterSource(name, path) for name, path in configured.items())
        # Replaced and never changed, because other threads read them.
        self._sources: dict[str, AdapterSource] = {}  # by id
        self._ids: dict[str, str] = {}  # by name
        self._retired: dict[str, AdapterSource] = {}  # by id: unloaded, and perhaps in use
        self._own = RankAdapters(layers)
        self._ranks = ranks
        self._scheduler = scheduler
        self._held: list[Request] = []  # by priority and arrival
        self._free = list(range(max_loaded))
        self._checks = itertools.count(max_loaded)  # numbers of reads that get no slot
        self.slots: dict[str, int] = {}
        self.loading: dict[str, int] = {}
        self.memory = memory
        self.restoring: frozenset[str] = frozenset()
        self.has_read = False
        self.on_read: Callable[[], None] = lambda: None
        self._sizing: dict[str, Future[int]] = {}  # id → bytes
        self._short_of: str | None = None  # the first adapter that found no memory
        self.set_loaded(loaded)

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's device that adapters take."""
        return self._own.num_bytes

    @property
    def wanted_bytes(self) -> int:
        """Bytes of a shared device that adapters need beside those in memory, as far as their sizes are known: all that
        are to be restored, or the first one that found no memory."""
        if self.restoring and (missing := (self.restoring & self._in_use()) - self.slots.keys() - self.loading.keys()):
            return sum(map(self._known_bytes, missing))
        name = self._short_of
        if name is None or all(request.adapter != name for request in self.held_requests):
            return 0
        return self._known_bytes(name)

    @property
    def used_bytes(self) -> int:
        """Bytes of a shared device that adapters take while requests use them."""
        return sum(map(self._known_bytes, self.slots.keys() & self._in_use())) if self.slots else 0

    @property
    def held_requests(self) -> tuple[Request, ...]:
        """Requests that wait for an adapter, in order. From any thread."""
        return tuple(request for request in tuple(self._held) if request.sequences)  # the others are cancelled

    @property
    def waiting_sequences(self) -> list[Sequence]:
        """Sequences of requests that wait for an adapter. From any thread."""
        return [sequence for request in tuple(self._held) for sequence in tuple(request.sequences)]

    def id_of(self, adapter: str) -> str:
        """The id of an adapter given by its name or id. Raises `UnknownModelError`. From any thread."""
        ids = self._ids
        if (found := ids.get(adapter)) is not None:
            return found
        if adapter not in self._sources:
            known = ", ".join(sorted(ids)) or "none"
            raise UnknownModelError(f"there is no adapter {adapter!r}; this engine has {known}", "model")
        return adapter

    def set_loaded(self, loaded: Collection[AdapterSource]) -> None:
        """Replace the adapters that were loaded at run time. Requests that have begun keep theirs to their end."""
        sources = {source.id: source for source in (*self._configured, *loaded)}
        self._retired |= {key: source for key, source in self._sources.items() if key not in sources}
        for key in sources:
            self._retired.pop(key, None)
        self._sources, self._ids = sources, {source.name: source.id for source in sources.values()}
        self.release_retired()

    def release_retired(self) -> None:
        """Free the memory of unloaded adapters that no request uses any more."""
        if not self._retired:
            return
        in_use = {sequence.request.adapter for sequence in self._scheduler.unfinished()}
        in_use |= {request.adapter for request in self._held if request.sequences} | self.loading.keys()
        for key in self._retired.keys() - in_use:
            source = self._retired.pop(key)
            if key in self.slots:
                self._remove(key)
            self._sizing.pop(key, None)
            self._order(Action.FORGET, 0, source)

    def begin_check(self, source: AdapterSource) -> tuple[int, Future[Updates]]:
        """Read an adapter on all ranks, only to see whether they can; returns the number for `end_check`, which must
        follow, and this rank's read."""
        number = next(self._checks)
        self._order(Action.READ, number, source)
        return number, self._own.reading[number]

    def end_check(self, number: int, source: AdapterSource) -> FolioError | None:
        """Drop what was read; return the error of any rank."""
        reading = self._own.reading[number]
        error = self._read_error(reading, Action.CHECK, number) if reading.done() else None
        self._order(Action.DISCARD, number)
        if source.id not in self._sources:
            self._order(Action.FORGET, 0, source)
        return None if error is None else _as_folio_error(source, error)

    def add(self, request: Request) -> None:
        """Pass a request to the scheduler once its adapter is loaded. Raises `UnknownModelError` if no adapter has its
        id, or it was unloaded."""
        if request.adapter is None:
            self._scheduler.add(request)
        else:
            self.id_of(request.adapter)
            bisect.insort(self._held, request, key=attrgetter("sort_key"))

    def advance(self) -> dict[str, FolioError]:
        """Pass on requests whose adapter is loaded, and begin to load others as slots allow. Return failed requests
        with their errors; they have left the queue, and the caller ends them."""
        self.has_read = False
        self.release_retired()
        if not (self._held or self.loading or self.restoring):
            return {}
        failures = self._collect()
        failed: dict[str, FolioError] = {}
        if self.restoring:
            failed = self._restore(failures)
            if self.restoring:  # others could take their slots
                return failed
        held, self._held = self._held, []
        self._short_of = None
        blocked = False
        for request in held:
            name = request.adapter
            assert name is not None
            if not request.sequences:  # cancelled
                continue
            request_id = request.sequences[0].request_id
            if (error := failures.get(name)) is not None:
                failed[request_id] = error
                continue
            try:
                is_ready = not blocked and self.ensure_loading(name)
            except ModelUnavailableError as failure:
                failed[request_id] = failure
                continue
            except BaseException as failure:  # noqa: BLE001 - raised again unless the request caused it
                failed[request_id] = failure_of(request_id, failure)
                continue
            if is_ready:
                self._scheduler.add(request)
            else:
                self._held.append(request)
                blocked |= name not in self.loading
        return failed

    def ensure_loading(self, name: str) -> bool:
        """Whether the adapter is loaded. If not, begin to load it as soon as there is a slot."""
        if name in self.slots:
            self.slots[name] = self.slots.pop(name)
            return True
        if name not in self.loading:
            if not self._free:
                self._evict()
            if self._free and self._take_memory(name):
                self.loading[name] = slot = self._free.pop()
                self._order(Action.READ, slot, self._source(name))
                self._own.reading[slot].add_done_callback(self._note_read)
        return False

    def _note_read(self, _: Future[Updates] | Future[int]) -> None:
        self.has_read = True
        self.on_read()

    def _take_memory(self, name: str) -> bool:
        """Charge an adapter to the shared device; false while its size is not known, or the device has too little
        memory. Raises `ModelUnavailableError` if it can never fit, and the error of reading its size."""
        if self.memory is None:
            return True
        source, sizing = self._source(name), self._sizing.get(name)
        if sizing is None:
            self._sizing[name] = sizing = self._own.size_of(source)
            sizing.add_done_callback(self._note_read)
        if not sizing.done():
            return False
        if sizing.exception() is not None:
            del self._sizing[name]  # the next request reads it again
        num_bytes, most_bytes = sizing.result(), self.memory.room_bytes
        in_use = sum(map(self._known_bytes, (self._in_use() | self.loading.keys()) - {name}))
        if in_use + num_bytes > most_bytes:
            raise ModelUnavailableError(
                f"adapter {source.name!r} takes {num_bytes} bytes; beside the model's weights and its other adapters "
                f"in use there are at most {max(most_bytes - in_use, 0)}: raise device_memory_bytes"
            )
        if self.memory.charged_bytes + num_bytes > most_bytes:
            self.unload_unused()
        if self.memory.take(num_bytes):
            return True
        self._short_of = name  # the shelf makes room
        return False

    def _known_bytes(self, name: str) -> int:
        sizing = self._sizing.get(name)
        return 0 if sizing is None or not sizing.done() or sizing.exception() is not None else sizing.result()

    def _restore(self, failures: Mapping[str, FolioError]) -> dict[str, FolioError]:
        """Load the adapters of requests that have begun; return the requests whose adapter cannot be loaded."""
        users: dict[str, set[str]] = {}
        for sequence in self._scheduler.unfinished():
            if (name := sequence.request.adapter) is not None:
                users.setdefault(name, set()).add(sequence.request_id)
        failed: dict[str, FolioError] = {}
        missing = set()
        for name in self.restoring & users.keys():
            error = failures.get(name)
            try:
                if error is None and not self.ensure_loading(name):
                    missing.add(name)
            except ModelUnavailableError as failure:
                error = failure
            except BaseException as failure:  # noqa: BLE001 - raised again unless the requests caused it
                error = failure_of(min(users[name]), failure)
            if error is not None:
                failed |= dict.fromkeys(users[name], error)
        self.restoring = frozenset(missing)
        return failed

    def _collect(self) -> dict[str, FolioError]:
        """Insert adapters that have been read; return the failed ones with their errors. The next request retries a
        failed one."""
        failures: dict[str, FolioError] = {}
        for name, slot in list(self.loading.items()):
            if not self._own.reading[slot].done():
                continue
            del self.loading[name]
            error = self._insert(name, slot)
            if error is None:
                continue
            self._free_slot(name, slot)
            failures[name] = _as_folio_error(self._source(name), error)
        return failures

    def _insert(self, name: str, slot: int) -> BaseException | None:
        """Put a read adapter into its slot on all ranks, or on none; return the error if that fails."""
        error = self._read_error(self._own.reading[slot], Action.INSERT, slot)
        if error is not None:
            self._order(Action.REMOVE, slot)
            self._order(Action.DISCARD, slot)
            return error
        try:
            self._own.execute(Action.INSERT, slot)
        except Exception as failure:  # noqa: BLE001 - returned; torch raises RuntimeError when memory is short
            self._order(Action.REMOVE, slot)
            return failure
        self.slots[name] = slot
        return None

    def _read_error(self, reading: Future[Updates], action: Action, number: int) -> BaseException | None:
        """The error of this rank's read, or of a peer that is given the action."""
        error = reading.exception()
        if error is None and self._ranks is not None:
            answers = self._ranks.ask_all(RankOrder.ADAPTER, HEADER.pack(action, number))
            if errors := [answer.decode(errors="replace") for answer in answers if answer]:
                return ModelError(errors[0])
        return error

    def wait(self, timeout_s: float) -> bool:
        """Wait until one of the adapters being loaded, or its size, has been read; false if none is."""
        futures: list[Future[Any]] = [self._own.reading[slot] for slot in self.loading.values()]
        futures += (sizing for sizing in self._sizing.values() if not sizing.done())
        if futures:
            wait(futures, timeout_s, FIRST_COMPLETED)
        return bool(futures)

    def close(self) -> None:
        """Drop all adapters, after the reads in progress."""
        self._own.close()
        for slot in self.slots.values():
            self._own.execute(Action.REMOVE, slot)
        for name in (*self.slots, *self.loading):
            self._give_back(name)
        self.slots.clear()
        self.loading.clear()

    def _in_use(self) -> set[str]:
        """Adapters of requests that have left this store."""
        return {name for sequence in self._scheduler.unfinished() if (name := sequence.request.adapter) is not None}

    def _evict(self) -> None:
        in_use = self._in_use()
        name = next((name for name in self.slots if name not in in_use), None)
        if name is not None:
            self._remove(name)

    def unload_unused(self) -> None:
        """Free the memory of adapters that no request uses."""
        in_use = self._in_use()
        if unused := [name for name in self.slots if name not in in_use]:
            for name in unused:
                self._remove(name)
            self._own.trim()

    def unload_all(self) -> None:
        """Free the memory of all adapters, while no step is computed. Those of requests that have begun come back with
        `advance`."""
        self.restoring = frozenset(self._in_use())
        for name in list(self.slots):
            self._remove(name)
        for name, slot in list(self.loading.items()):
            del self.loading[name]
            reading = self._own.reading[slot]
            self._order(Action.DISCARD, slot)
            self._free.append(slot)
            reading.cancel()  # a read that has begun keeps its memory until it ends
            if self.memory is not None:
                reading.add_done_callback(partial(_give_back, self.memory, self._known_bytes(name)))
        self._own.trim()

    def _remove(self, name: str) -> None:
        slot = self.slots.pop(name)
        self._order(Action.REMOVE, slot)
        self._free_slot(name, slot)
        logger.info("dropped adapter %r", name)

    def _free_slot(self, name: str, slot: int) -> None:
        self._free.append(slot)
        self._give_back(name)

    def _give_back(self, name: str) -> None:
        if self.memory is not None:
            self.memory.give_back(self._known_bytes(name))

    def _source(self, name: str) -> AdapterSource:
        return self._sources.get(name) or self._retired[name]

    def _order(self, action: Action, number: int, source: AdapterSource | None = None) -> None:
        self._own.execute(action, number, source)
        if self._ranks is not None:
            payload = b"" if source is None else json.dumps(astuple(source)).encode()
            self._ranks.command(RankOrder.ADAPTER, HEADER.pack(action, number) + payload)


def _give_back(memory: DeviceCharges, num_bytes: int, _: Future[Updates]) -> None:
    """Callback of reads that are given up."""
    memory.give_back(num_bytes)


def _as_folio_error(source: AdapterSource, error: BaseException) -> FolioError:
    """The error of a failed load, logged."""
    if isinstance(error, FolioError):
        logger.warning("%s", error)
        return error
    logger.error("cannot load adapter %r", source.id, exc_info=error)  # probably out of device memory
    return EngineError(
        f"adapter {source.name!r} cannot be loaded: {error}; if memory is short, lower kv_memory_bytes or "
        "max_loaded_adapters"
    )
