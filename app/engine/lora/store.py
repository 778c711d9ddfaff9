"""Which adapters are in memory: loaded when a request first asks, and dropped for others that are wanted.

Files are read by a thread of the store's own, so that no step waits for them; slots change hands between steps, in the
engine's thread. There are no counts of users: whoever asks for a slot says which adapters cannot be spared.

From an adapter's name to weights that layers can use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app.engine.lora.layers import LoRALayers, Updates, num_bytes
from app.engine.lora.weights import WEIGHTS_FILE, find_folder, read_config, read_weights
from app.errors import EngineError, FolioError, ModelError, UnknownModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What adapters take.

    Attributes:
        loaded: name → bytes on the device.
        num_loads, num_evictions: since the start.
    """

    loaded: Mapping[str, int]
    num_loads: int = 0
    num_evictions: int = 0


class AdapterRanks(Protocol):
    """The other ranks, which read the same files."""

    def read(self, name: str) -> None:
        """Begin to read an adapter; `insert` or `forget` follows."""
        ...

    def insert(self, slot: int, name: str) -> None:
        """Put it into a slot. Raises `ModelError` if that cannot be done; nobody has it there then."""
        ...

    def discard_adapter(self, name: str) -> None: ...

    def remove_adapter(self, slot: int) -> None: ...


class AdapterStore:
    """At most `max_loaded` adapters at once; the one that was unused for longest goes first, those in use never.

    Everything but `check` and `report` belongs to the engine's thread.

    Args:
        sources: name → folder or Hub id.
        layers: the model's, observed.
        peers: `None` without other ranks.

    Attributes:
        slots: name → slot of every adapter that a step can use.
        report: as it is now. From any thread.
    """

    def __init__(
        self, sources: Mapping[str, str], layers: LoRALayers, max_loaded: int, peers: AdapterRanks | None
    ) -> None:
        self._sources = dict(sources)
        self._layers = layers
        self._peers = peers
        self._free = list(range(max_loaded))
        self.slots: dict[str, int] = {}  # the longest unused first
        self._loading: dict[str, tuple[int, Future[Updates]]] = {}
        self._files = AdapterFiles(sources, layers)  # only the store's thread uses it
        self._thread = ThreadPoolExecutor(1, "folio-adapters")
        self.report = AdapterReport({})

    def check_known(self, name: str) -> None:
        """Raise `UnknownModelError` unless there is such an adapter. From any thread."""
        if name not in self._sources:
            known = ", ".join(sorted(self._sources))
            raise UnknownModelError(f"there is no adapter {name!r}; this engine has {known}", "model")

    def ensure_loading(self, name: str, spared: Callable[[], Collection[str]]) -> bool:
        """Whether a step can use the adapter. If not, and if there is a slot for it, it is being loaded from now on.

        Args:
            spared: adapters that must not go.
        """
        if name in self.slots:
            self.slots[name] = self.slots.pop(name)
            return True
        if name not in self._loading:
            if not self._free:
                self._evict(spared())
            if self._free:
                future = self._thread.submit(self._files.read, name)
                self._loading[name] = self._free.pop(), future
                if self._peers is not None:
                    self._peers.read(name)
        return False

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    def is_loading(self, name: str) -> bool:
        """Whether it has a slot, and is being read."""
        return name in self._loading

    def collect(self) -> dict[str, FolioError]:
        """Take in what has been read since; returns the adapters that could not be, and why. They are forgotten with
        that: the next request for one tries again."""
        failures: dict[str, FolioError] = {}
        for name, (slot, future) in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[name]
            error = self._insert(name, slot, future)
            if error is None:
                continue
            self._free.append(slot)
            if isinstance(error, FolioError):
                logger.warning("%s", error)
                failures[name] = error
            else:  # the device's memory, most likely
                logger.error("cannot load adapter %r", name, exc_info=error)
                failures[name] = EngineError(
                    f"adapter {name!r} cannot be loaded: {error}; if memory is short, lower kv_memory_bytes or "
                    "max_loaded_adapters"
                )
        return failures

    def _insert(self, name: str, slot: int, future: Future[Updates]) -> BaseException | None:
        """Put what was read into its slot; returns what is in the way."""
        error = future.exception()
        if error is not None:
            if self._peers is not None:
                self._peers.discard_adapter(name)
            return error
        if self._peers is not None:
            try:
                self._peers.insert(slot, name)
            except ModelError as refusal:
                return refusal
        updates = future.result()
        try:
            self._layers.insert(slot, updates)
        except Exception as failure:  # noqa: BLE001 - returned; RuntimeError is torch's word for no memory
            self._layers.remove_adapter(slot)
            return failure
        self.slots[name] = slot
        self._note({name: num_bytes(updates)}, num_loads=1)
        return None

    def wait(self, timeout_s: float) -> bool:
        """Wait until an adapter that is being loaded has been read; false if there is none to wait for."""
        futures = [future for _, future in self._loading.values()]
        if futures:
            wait(futures, timeout_s, FIRST_COMPLETED)
        return bool(futures)

    def close(self) -> None:
        """Drop all adapters. What is being read is waited for."""
        self._thread.shutdown(cancel_futures=True)
        for slot in self.slots.values():
            self._layers.remove_adapter(slot)
        self.slots.clear()
        self._loading.clear()

    def _evict(self, spared: Collection[str]) -> None:
        name = next((name for name in self.slots if name not in spared), None)
        if name is None:
            return
        slot = self.slots.pop(name)
        self._layers.remove_adapter(slot)
        if self._peers is not None:
            self._peers.remove_adapter(slot)
        self._free.append(slot)
        self._note({}, num_evictions=1)
        logger.info("dropped adapter %r", name)

    def _note(self, new: Mapping[str, int], *, num_loads: int = 0, num_evictions: int = 0) -> None:
        """A report is replaced, never changed: other threads read it."""
        old = self.report
        loaded = {name: size for name, size in {**old.loaded, **new}.items() if name in self.slots}
        self.report = AdapterReport(loaded, old.num_loads + num_loads, old.num_evictions + num_evictions)


class AdapterFiles:
    """Reads adapters for one model. Only one thread uses it.

    Args:
        sources: name → folder or Hub id.
        layers: the model's, observed.
    """

    def __init__(self, sources: Mapping[str, str], layers: LoRALayers) -> None:
        self._sources = sources
        self._layers = layers
        self._folders: dict[str, tuple[Path, tuple[int, int]]] = {}

    def read(self, name: str) -> Updates:
        """The adapter's weights, on the model's device.

        Raises:
            ModelError: it is not to be had, does not fit the model, or is another one than before.
        """
        start = time.monotonic()
        folder = self._find(name)
        layers = self._layers
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
        """Its folder, the same as the first time: the prefix cache knows an adapter by its name."""
        if name not in self._folders:
            folder = find_folder(name, self._sources[name])
            self._folders[name] = folder, _version(folder)
        folder, version = self._folders[name]
        try:
            changed = _version(folder) != version
        except OSError as error:
            raise ModelError(f"adapter {name!r}: its file is gone: {error}") from error
        if changed:
            raise ModelError(
                f"adapter {name!r}: {str(folder)!r} has changed since it was first loaded, and what is cached would "
                "not fit any more; give it another name, or restart"
            )
        return folder


def _version(folder: Path) -> tuple[int, int]:
    stat = (folder / WEIGHTS_FILE).stat()
    return stat.st_mtime_ns, stat.st_size
