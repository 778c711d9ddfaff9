"""Adapter store: LoRA adapters in memory, loaded on the first request and evicted for others.

A thread of the store's own reads files, so that no step waits for them. Slots change between steps, in the engine's
thread. There is no count of users: the requests of the scheduler name the adapters in use, by id (`AdapterSource.id`).
"""

from __future__ import annotations

import bisect
import enum
import itertools
import json
import logging
import struct
import time
from collections.abc import Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import astuple
from operator import attrgetter
from pathlib import Path

from app.engine.faults import failure_of
from app.engine.lora.layers import LoRALayers, Updates, num_bytes
from app.engine.lora.source import AdapterSource, files_state, files_version
from app.engine.lora.weights import find_folder, read_config, read_weights
from app.engine.request import Request, SequenceGroup
from app.engine.scheduler import Scheduler
from app.engine.tensor_parallel.processes import RankOrder
from app.engine.tensor_parallel.ranks import RankGroup
from app.errors import EngineError, FolioError, ModelError, UnknownModelError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<BI")  # action, number of the read or slot; the source follows as JSON, if there is one


class _Action(enum.IntEnum):
    """An order to the peers, which read the same files as rank 0. A read that is to be inserted has its slot's number,
    any other a higher one."""

    READ = 1  # a source, in the background
    CHECK = 2  # whether the read has succeeded; answered with an error message or nothing
    INSERT = 3  # the read adapter into its slot; answered like CHECK
    DISCARD = 4  # the read adapter
    REMOVE = 5  # from a slot
    FORGET = 6  # the state of a source's files


class AdapterStore:
    """Requests that wait for an adapter, before the scheduler's waiting queue, and at most `max_loaded` adapters,
    evicted least recently used first and never while in use.

    Requests without an adapter pass at once. The others are first come, first served within priority: behind a request
    that waits for a slot, later ones wait even if their adapter is loaded, because adapters in constant use could never
    be evicted. A request whose adapter is being read already has a slot and does not block others.

    For the engine's thread, where nothing else is stated.

    Args:
        configured: name → folder or Hub id of the adapters of the settings.
        layers: the model's, observed; `None` without adapters.
        ranks: the peers, which insert and remove the same adapters.
        scheduler: gets the requests whose adapter is loaded; adapters of its requests are in use.
        loaded: adapters loaded at run time, see `set_loaded`.

    Attributes:
        slots: id → slot of every adapter in memory, least recently used first.
        loading: id → slot of every adapter that is being read.
    """

    def __init__(
        self,
        configured: Mapping[str, str],
        layers: LoRALayers | None,
        max_loaded: int,
        ranks: RankGroup | None,
        scheduler: Scheduler,
        loaded: Collection[AdapterSource] = (),
    ) -> None:
        self._configured = tuple(AdapterSource(name, path) for name, path in configured.items())
        # Replaced and never changed, because other threads read them.
        self._sources: dict[str, AdapterSource] = {}  # by id
        self._ids: dict[str, str] = {}  # by name
        self._retired: dict[str, AdapterSource] = {}  # by id: unloaded, and perhaps in use
        self._own = RankAdapters(layers)
        self._ranks = ranks
        self._scheduler = scheduler
        self._held: list[SequenceGroup] = []  # by priority and arrival
        self._free = list(range(max_loaded))
        self._checks = itertools.count(max_loaded)  # numbers of reads that get no slot
        self.slots: dict[str, int] = {}
        self.loading: dict[str, int] = {}
        self.set_loaded(loaded)

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's device that adapters take."""
        return self._own.num_bytes

    @property
    def waiting_groups(self) -> list[Request]:
        """Requests that wait for an adapter. From any thread."""
        return [request for group in tuple(self._held) for request in tuple(group.members)]

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
        in_use = {request.group.adapter for request in self._scheduler.unfinished()}
        in_use |= {group.adapter for group in self._held if group.members} | self.loading.keys()
        for key in self._retired.keys() - in_use:
            source = self._retired.pop(key)
            if key in self.slots:
                self._remove(key)
            self._order(_Action.FORGET, 0, source)

    def begin_check(self, source: AdapterSource) -> tuple[int, Future[Updates]]:
        """Read an adapter on all ranks, only to see whether they can; returns the number for `end_check`, which must
        follow, and this rank's read."""
        number = next(self._checks)
        self._order(_Action.READ, number, source)
        return number, self._own.reading[number]

    def end_check(self, number: int, source: AdapterSource) -> FolioError | None:
        """Drop what was read; return the error of any rank."""
        reading = self._own.reading[number]
        error = self._read_error(reading, _Action.CHECK, number) if reading.done() else None
        self._order(_Action.DISCARD, number)
        if source.id not in self._sources:
            self._order(_Action.FORGET, 0, source)
        return None if error is None else _as_folio_error(source, error)

    def add(self, group: SequenceGroup) -> None:
        """Pass a group to the scheduler once its adapter is loaded. Raises `UnknownModelError` if there is no adapter
        with its id, or not any more."""
        if group.adapter is None:
            self._scheduler.add(group)
        else:
            self.id_of(group.adapter)
            bisect.insort(self._held, group, key=attrgetter("sort_key"))

    def advance(self) -> dict[str, FolioError]:
        """Pass on groups whose adapter is loaded, and begin to load others as slots allow. Return failed requests with
        their errors; they have left the queue, and the caller ends them."""
        self.release_retired()
        if not (self._held or self.loading):
            return {}
        failures = self._collect()
        held, self._held = self._held, []
        failed: dict[str, FolioError] = {}
        blocked = False
        for group in held:
            name = group.adapter
            assert name is not None
            if not group.members:  # cancelled
                continue
            request_id = group.members[0].request_id
            if (error := failures.get(name)) is not None:
                failed[request_id] = error
                continue
            try:
                is_ready = not blocked and self.ensure_loading(name)
            except BaseException as failure:  # noqa: BLE001 - raised again unless it is the request's
                failed[request_id] = failure_of(request_id, failure)
                continue
            if is_ready:
                self._scheduler.add(group)
            else:
                self._held.append(group)
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
            if self._free:
                self.loading[name] = slot = self._free.pop()
                self._order(_Action.READ, slot, self._source(name))
        return False

    def _collect(self) -> dict[str, FolioError]:
        """Insert adapters that have been read; return the failed ones with their errors. The next request for a failed
        one tries again."""
        failures: dict[str, FolioError] = {}
        for name, slot in list(self.loading.items()):
            if not self._own.reading[slot].done():
                continue
            del self.loading[name]
            error = self._insert(name, slot)
            if error is None:
                continue
            self._free.append(slot)
            failures[name] = _as_folio_error(self._source(name), error)
        return failures

    def _insert(self, name: str, slot: int) -> BaseException | None:
        """Put a read adapter into its slot on all ranks, or on none; return the error if that fails."""
        error = self._read_error(self._own.reading[slot], _Action.INSERT, slot)
        if error is not None:
            self._order(_Action.REMOVE, slot)
            self._order(_Action.DISCARD, slot)
            return error
        try:
            self._own.execute(_Action.INSERT, slot)
        except Exception as failure:  # noqa: BLE001 - returned; torch raises RuntimeError when memory is short
            self._order(_Action.REMOVE, slot)
            return failure
        self.slots[name] = slot
        return None

    def _read_error(self, reading: Future[Updates], action: _Action, number: int) -> BaseException | None:
        """The error of this rank's read, or of a peer that is given the action."""
        error = reading.exception()
        if error is None and self._ranks is not None:
            answers = self._ranks.ask_all(RankOrder.ADAPTER, _HEADER.pack(action, number))
            if errors := [answer.decode(errors="replace") for answer in answers if answer]:
                return ModelError(errors[0])
        return error

    def wait(self, timeout_s: float) -> bool:
        """Wait until one of the adapters being loaded has been read; false if none is."""
        futures = [self._own.reading[slot] for slot in self.loading.values()]
        if futures:
            wait(futures, timeout_s, FIRST_COMPLETED)
        return bool(futures)

    def close(self) -> None:
        """Drop all adapters, after the reads in progress."""
        self._own.close()
        for slot in self.slots.values():
            self._own.execute(_Action.REMOVE, slot)
        self.slots.clear()
        self.loading.clear()

    def _evict(self) -> None:
        in_use = {request.group.adapter for request in self._scheduler.unfinished()}
        name = next((name for name in self.slots if name not in in_use), None)
        if name is not None:
            self._remove(name)

    def unload_unused(self) -> None:
        """Free the memory of adapters that no request uses."""
        in_use = {request.group.adapter for request in self._scheduler.unfinished()}
        for name in [name for name in self.slots if name not in in_use]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        slot = self.slots.pop(name)
        self._order(_Action.REMOVE, slot)
        self._free.append(slot)
        logger.info("dropped adapter %r", name)

    def _source(self, name: str) -> AdapterSource:
        return self._sources.get(name) or self._retired[name]

    def _order(self, action: _Action, number: int, source: AdapterSource | None = None) -> None:
        self._own.execute(action, number, source)
        if self._ranks is not None:
            payload = b"" if source is None else json.dumps(astuple(source)).encode()
            self._ranks.command(RankOrder.ADAPTER, _HEADER.pack(action, number) + payload)


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


class RankAdapters:
    """The adapters of one rank, which executes the orders of rank 0's `AdapterStore`.

    Attributes:
        reading: adapters that are being read, or have been and are in no slot, by number.
    """

    def __init__(self, layers: LoRALayers | None) -> None:
        self._layers = layers
        self._found: dict[str, tuple[Path, tuple[int, ...]]] = {}  # id → folder, and the state of its files
        self._thread = ThreadPoolExecutor(1, "folio-adapters")
        self.reading: dict[int, Future[Updates]] = {}
        self._sizes: dict[int, int] = {}  # slot → bytes

    @property
    def num_bytes(self) -> int:
        """Of the adapters in slots."""
        return sum(self._sizes.values())

    def handle_adapter_order(self, message: bytes) -> bytes:
        """Execute an order to a peer; return an error message or nothing."""
        code, number = _HEADER.unpack_from(message)
        action, payload = _Action(code), message[_HEADER.size :]
        if action in (_Action.CHECK, _Action.INSERT) and (error := self.reading[number].exception()) is not None:
            return str(error if isinstance(error, FolioError) else EngineError(repr(error))).encode()
        self.execute(action, number, AdapterSource(*json.loads(payload)) if payload else None)
        return b""

    def execute(self, action: _Action, number: int, source: AdapterSource | None = None) -> None:
        assert self._layers is not None
        match action:
            case _Action.READ:
                assert source is not None
                self.reading[number] = self._thread.submit(self.read, source)
            case _Action.CHECK:
                pass  # the read has succeeded
            case _Action.INSERT:
                updates = self.reading.pop(number).result()
                self._layers.insert(number, updates)
                self._sizes[number] = num_bytes(updates)
            case _Action.DISCARD:
                self.reading.pop(number, None)
            case _Action.REMOVE:
                self._layers.remove_adapter(number)
                self._sizes.pop(number, None)
            case _Action.FORGET:
                assert source is not None
                self._thread.submit(self._found.pop, source.id, None)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def read(self, source: AdapterSource) -> Updates:
        """The adapter's weights, on the model's device. For the reading thread.

        Raises:
            ModelError: the adapter is unavailable, does not fit the model, or its files have changed.
        """
        start = time.monotonic()
        name = source.name
        folder, state = self._find(source)
        layers = self._layers
        assert layers is not None
        weights = read_weights(
            name,
            folder,
            read_config(name, folder),
            layers.shapes,
            head=layers.head,
            dtype=layers.dtype,
            device=layers.device,
        )
        updates = layers.stack(weights)
        if _state(name, folder) != state:
            raise ModelError(f"adapter {name!r}: {str(folder)!r} has changed while it was read; load it again")
        seconds = time.monotonic() - start
        logger.info("loaded adapter %r: %.1f MiB in %.2f s", source.id, num_bytes(updates) / 2**20, seconds)
        return updates

    def _find(self, source: AdapterSource) -> tuple[Path, tuple[int, ...]]:
        """The adapter's folder and the state of its files, which must be those that the id stands for: the prefix cache
        identifies the adapter by its id."""
        name, known = source.name, self._found.get(source.id)
        folder = find_folder(name, source.path) if known is None else known[0]
        state = _state(name, folder)
        if known == (folder, state):
            return known
        remedy = "give it another name, or restart" if source.version is None else "load it again"
        if known is not None if source.version is None else files_version(folder) != source.version:
            raise ModelError(
                f"adapter {name!r}: {str(folder)!r} has changed since it was first loaded, and cached prefixes would "
                f"not match; {remedy}"
            )
        self._found[source.id] = folder, state
        return folder, state


def _state(name: str, folder: Path) -> tuple[int, ...]:
    try:
        return files_state(folder)
    except OSError as error:
        raise ModelError(f"adapter {name!r}: its file is missing: {error}") from error
