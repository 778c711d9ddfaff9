"""Adapters of one rank: reads them, and puts them into the slots that rank 0 chooses."""

from __future__ import annotations

import enum
import json
import logging
import struct
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from folio.app.engine.lora.layers import LoRALayers, Updates, num_bytes
from folio.app.engine.lora.source import AdapterSource, files_version
from folio.app.engine.lora.weights import find_folder, read_config, read_weights, stored_numbers
from folio.app.errors import EngineError, FolioError, ModelError
from folio.app.models.weights.file_digests import FileDigests

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<BI")  # action, number of the read or slot; the source follows as JSON, if there is one


class Action(enum.IntEnum):
    """An order to the peers, which read the same files as rank 0. A read that is to be inserted has its slot's number,
    any other a higher one."""

    READ = 1  # a source, in the background
    CHECK = 2  # whether the read has succeeded; answered with an error message or nothing
    INSERT = 3  # the read adapter into its slot; answered like CHECK
    DISCARD = 4  # the read adapter
    REMOVE = 5  # from a slot
    FORGET = 6  # the state of a source's files


class RankAdapters:
    """The adapters of one rank, which executes the orders of rank 0's `AdapterStore`.

    Attributes:
        reading: adapters that are being read, or have been and are in no slot, by number.
    """

    def __init__(self, layers: LoRALayers | None) -> None:
        self._layers = layers
        self._digests = FileDigests()
        self._found: dict[str, tuple[Path, str]] = {}  # id → folder, and the version of its files
        self._thread = ThreadPoolExecutor(1, "folio-adapters")
        self.reading: dict[int, Future[Updates]] = {}
        self._sizes: dict[int, int] = {}  # slot → bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in slots."""
        return sum(self._sizes.values())

    def handle_adapter_order(self, message: bytes) -> bytes:
        """Execute an order to a peer; return an error message or nothing."""
        code, number = HEADER.unpack_from(message)
        action, payload = Action(code), message[HEADER.size :]
        if action in (Action.CHECK, Action.INSERT) and (error := self.reading[number].exception()) is not None:
            return str(error if isinstance(error, FolioError) else EngineError(repr(error))).encode()
        self.execute(action, number, AdapterSource(*json.loads(payload)) if payload else None)
        return b""

    def execute(self, action: Action, number: int, source: AdapterSource | None = None) -> None:
        assert self._layers is not None
        match action:
            case Action.READ:
                assert source is not None
                self.reading[number] = self._thread.submit(self.read, source)
            case Action.CHECK:
                pass  # the read has succeeded
            case Action.INSERT:
                updates = self.reading.pop(number).result()
                self._layers.insert(number, updates)
                self._sizes[number] = num_bytes(updates)
            case Action.DISCARD:
                self.reading.pop(number, None)
            case Action.REMOVE:
                self._layers.remove_adapter(number)
                self._sizes.pop(number, None)
            case Action.FORGET:
                assert source is not None
                self._thread.submit(self._found.pop, source.id, None)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def trim(self) -> None:
        """Give memory of dropped adapters, which torch keeps, back to a CUDA device, for its other models."""
        if self._layers is not None and self._layers.device.type == "cuda":
            torch.cuda.empty_cache()

    def size_of(self, source: AdapterSource) -> Future[int]:
        """Bytes that the adapter will take, from the header of its file. The future raises as `read`."""
        return self._thread.submit(self._size, source)

    def _size(self, source: AdapterSource) -> int:
        assert self._layers is not None
        return stored_numbers(source.name, self._find(source)[0]) * self._layers.dtype.itemsize

    def read(self, source: AdapterSource) -> Updates:
        """The adapter's weights, on the model's device. Called by the reading thread.

        Raises:
            ModelError: the adapter is unavailable, does not fit the model, or its files have changed.
        """
        start = time.monotonic()
        name = source.name
        folder, version = self._find(source)
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
        if self._version(name, folder) != version:
            raise ModelError(f"adapter {name!r}: {str(folder)!r} has changed while it was read; load it again")
        seconds = time.monotonic() - start
        logger.info("loaded adapter %r: %.1f MiB in %.2f s", source.id, num_bytes(updates) / 2**20, seconds)
        return updates

    def _find(self, source: AdapterSource) -> tuple[Path, str]:
        """The adapter's folder and the version of its files, which must be those that the id stands for: the prefix
        cache identifies the adapter by its id."""
        name, known = source.name, self._found.get(source.id)
        folder = find_folder(name, source.path) if known is None else known[0]
        version = self._version(name, folder)
        first = source.version or (version if known is None else known[1])
        if version != first:
            remedy = "give it another name, or restart" if source.version is None else "load it again"
            raise ModelError(
                f"adapter {name!r}: {str(folder)!r} has changed since it was first loaded, and cached prefixes would "
                f"not match; {remedy}"
            )
        self._found[source.id] = folder, version
        return folder, version

    def _version(self, name: str, folder: Path) -> str:
        try:
            return files_version(folder, self._digests)
        except OSError as error:
            raise ModelError(f"adapter {name!r}: its file is missing: {error}") from error
