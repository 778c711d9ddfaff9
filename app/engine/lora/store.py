"""Adapter store: LoRA adapters in memory, loaded on the first request and evicted for others.

A thread of the store's own reads files, so that no step waits for them. Slots change between steps, in the engine's
thread. There is no count of users: the requests of the scheduler name the adapters in use.
"""

from __future__ import annotations

import bisect
import enum
import logging
import struct
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from operator import attrgetter
from pathlib import Path

from app.engine.faults import failure_of
from app.engine.lora.layers import LoRALayers, Updates, num_bytes
from app.engine.lora.weights import WEIGHTS_FILE, find_folder, read_config, read_weights
from app.engine.request import Request, SequenceGroup
from app.engine.scheduler import Scheduler
from app.engine.tensor_parallel.processes import RankOrder
from app.engine.tensor_parallel.ranks import RankGroup
from app.errors import EngineError, FolioError, ModelError, UnknownModelError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<BI")  # action, slot; the adapter's name follows


class _Action(enum.IntEnum):
    """An order to the peers, which read the same files as rank 0."""

    READ = 1  # in the background
    INSERT = 2  # the read adapter into a slot; answered with an error message or nothing
    DISCARD = 3  # the read adapter
    REMOVE = 4  # from a slot


class AdapterStore:
    """Requests that wait for an adapter, before the scheduler's waiting queue, and at most `max_loaded` adapters,
    evicted least recently used first and never while in use.

    Requests without an adapter pass at once. The others are first come, first served within priority: behind a request
    that waits for a slot, later ones wait even if their adapter is loaded, because adapters in constant use could never
    be evicted. A request whose adapter is being read already has a slot and does not block others.

    For the engine's thread, where nothing else is stated.

    Args:
        sources: name → folder or Hub id.
        layers: the model's, observed; `None` without adapters.
        ranks: the peers, which insert and remove the same adapters.
        scheduler: gets the requests whose adapter is loaded; adapters of its requests are in use.

    Attributes:
        slots: name → slot of every loaded adapter, least recently used first.
        loading: name → slot of every adapter that is being read.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        layers: LoRALayers | None,
        max_loaded: int,
        ranks: RankGroup | None,
        scheduler: Scheduler,
    ) -> None:
        self._sources = dict(sources)
        self._own = RankAdapters(sources, layers)
        self._ranks = ranks
        self._scheduler = scheduler
        self._held: list[SequenceGroup] = []  # by priority and arrival
        self._free = list(range(max_loaded))
        self.slots: dict[str, int] = {}
        self.loading: dict[str, int] = {}

    @property
    def waiting_groups(self) -> list[Request]:
        """Requests that wait for an adapter. From any thread."""
        return [request for group in tuple(self._held) for request in tuple(group.members)]

    def check_adapter(self, name: str | None) -> None:
        """Raise `UnknownModelError` for an unknown adapter; `None` is always known. From any thread."""
        if name is not None and name not in self._sources:
            known = ", ".join(sorted(self._sources)) or "none"
            raise UnknownModelError(f"there is no adapter {name!r}; this engine has {known}", "model")

    def add(self, group: SequenceGroup) -> None:
        """Pass a group to the scheduler once its adapter is loaded."""
        if group.adapter is None:
            self._scheduler.add(group)
        else:
            bisect.insort(self._held, group, key=attrgetter("sort_key"))

    def advance(self) -> dict[str, FolioError]:
        """Pass on groups whose adapter is loaded, and begin to load others as slots allow. Return failed requests with
        their errors; they have left the queue, and the caller ends them."""
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
                self._order(_Action.READ, 0, name)
                self.loading[name] = self._free.pop()
        return False

    def _collect(self) -> dict[str, FolioError]:
        """Insert adapters that have been read; return the failed ones with their errors. The next request for a failed
        one tries again."""
        failures: dict[str, FolioError] = {}
        for name, slot in list(self.loading.items()):
            if not self._own.reading[name].done():
                continue
            del self.loading[name]
            error = self._insert(name, slot)
            if error is None:
                continue
            self._free.append(slot)
            if isinstance(error, FolioError):
                logger.warning("%s", error)
                failures[name] = error
            else:  # probably out of device memory
                logger.error("cannot load adapter %r", name, exc_info=error)
                failures[name] = EngineError(
                    f"adapter {name!r} cannot be loaded: {error}; if memory is short, lower kv_memory_bytes or "
                    "max_loaded_adapters"
                )
        return failures

    def _insert(self, name: str, slot: int) -> BaseException | None:
        """Put a read adapter into its slot on all ranks, or on none; return the error if that fails."""
        error = self._own.reading[name].exception()
        if error is None and self._ranks is not None:
            answers = self._ranks.ask_all(RankOrder.ADAPTER, _HEADER.pack(_Action.INSERT, slot) + name.encode())
            if errors := [answer.decode(errors="replace") for answer in answers if answer]:
                error = ModelError(errors[0])
                self._order(_Action.REMOVE, slot)
        if error is not None:
            self._order(_Action.DISCARD, 0, name)
            return error
        try:
            self._own.execute(_Action.INSERT, slot, name)
        except Exception as failure:  # noqa: BLE001 - returned; torch raises RuntimeError when memory is short
            self._order(_Action.REMOVE, slot)
            return failure
        self.slots[name] = slot
        return None

    def wait(self, timeout_s: float) -> bool:
        """Wait until one of the adapters being loaded has been read; false if none is."""
        futures = [self._own.reading[name] for name in self.loading]
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
        if name is None:
            return
        slot = self.slots.pop(name)
        self._order(_Action.REMOVE, slot)
        self._free.append(slot)
        logger.info("dropped adapter %r", name)

    def _order(self, action: _Action, slot: int, name: str = "") -> None:
        self._own.execute(action, slot, name)
        if self._ranks is not None:
            self._ranks.command(RankOrder.ADAPTER, _HEADER.pack(action, slot) + name.encode())


class RankAdapters:
    """The adapters of one rank, which executes the orders of rank 0's `AdapterStore`.

    Attributes:
        reading: adapters that are being read, or have been and are in no slot.
    """

    def __init__(self, sources: Mapping[str, str], layers: LoRALayers | None) -> None:
        self._sources = sources
        self._layers = layers
        self._folders: dict[str, tuple[Path, tuple[int, int]]] = {}
        self._thread = ThreadPoolExecutor(1, "folio-adapters")
        self.reading: dict[str, Future[Updates]] = {}

    def handle_adapter_order(self, message: bytes) -> bytes:
        """Execute an order to a peer; return an error message or nothing."""
        action, slot = _HEADER.unpack_from(message)
        name = message[_HEADER.size :].decode()
        if action == _Action.INSERT and (error := self.reading[name].exception()) is not None:
            return str(error if isinstance(error, FolioError) else EngineError(f"{name!r}: {error!r}")).encode()
        self.execute(_Action(action), slot, name)
        return b""

    def execute(self, action: _Action, slot: int, name: str = "") -> None:
        assert self._layers is not None
        match action:
            case _Action.READ:
                self.reading[name] = self._thread.submit(self.read, name)
            case _Action.INSERT:
                self._layers.insert(slot, self.reading.pop(name).result())
            case _Action.DISCARD:
                self.reading.pop(name, None)
            case _Action.REMOVE:
                self._layers.remove_adapter(slot)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def read(self, name: str) -> Updates:
        """The adapter's weights, on the model's device. For the reading thread.

        Raises:
            ModelError: the adapter is unavailable, does not fit the model, or has changed since the first read.
        """
        start = time.monotonic()
        folder = self._find(name)
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
        seconds = time.monotonic() - start
        logger.info("loaded adapter %r: %.1f MiB in %.2f s", name, num_bytes(updates) / 2**20, seconds)
        return updates

    def _find(self, name: str) -> Path:
        """The adapter's folder, which must not change: the prefix cache identifies an adapter by its name."""
        if name not in self._folders:
            folder = find_folder(name, self._sources[name])
            self._folders[name] = folder, _version(folder)
        folder, version = self._folders[name]
        try:
            changed = _version(folder) != version
        except OSError as error:
            raise ModelError(f"adapter {name!r}: its file is missing: {error}") from error
        if changed:
            raise ModelError(
                f"adapter {name!r}: {str(folder)!r} has changed since it was first loaded, and cached prefixes would "
                "not match; give it another name, or restart"
            )
        return folder


def _version(folder: Path) -> tuple[int, int]:
    stat = (folder / WEIGHTS_FILE).stat()
    return stat.st_mtime_ns, stat.st_size
