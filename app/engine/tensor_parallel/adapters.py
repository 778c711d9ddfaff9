"""Adapters on several ranks: each reads the files and keeps its part; rank 0 says when, and into which slot."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from app.engine.lora.layers import LoRALayers, Updates
from app.engine.lora.store import AdapterFiles
from app.engine.tensor_parallel.messages import RankOrder
from app.engine.tensor_parallel.ranks import RankGroup
from app.errors import EngineError, FolioError, ModelError

_HEADER = struct.Struct("<BI")  # what to do, slot; the adapter's name follows


class _Do(enum.IntEnum):
    READ = 1  # in the background
    INSERT = 2  # what was read, which is waited for; answered
    FORGET = 3  # what was read
    REMOVE = 4


class AdapterPeers:
    """The peers as rank 0's `AdapterStore` sees them."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def read(self, name: str) -> None:
        """Have them begin to read an adapter."""
        self._tell(_Do.READ, 0, name)

    def insert(self, slot: int, name: str) -> None:
        """Have them put what they read into a slot. Raises `ModelError` if one of them could not read it: then no peer
        has it."""
        answers = self._ranks.ask_all(RankOrder.ADAPTER, _HEADER.pack(_Do.INSERT, slot) + name.encode())
        refusals = [answer.decode(errors="replace") for answer in answers if answer]
        if refusals:
            self.remove_adapter(slot)
            raise ModelError(refusals[0])

    def discard_adapter(self, name: str) -> None:
        """Have them drop what they read."""
        self._tell(_Do.FORGET, 0, name)

    def remove_adapter(self, slot: int) -> None:
        self._tell(_Do.REMOVE, slot, "")

    def _tell(self, what: _Do, slot: int, name: str) -> None:
        self._ranks.command(RankOrder.ADAPTER, _HEADER.pack(what, slot) + name.encode())


class PeerAdapters:
    """The adapters of a peer."""

    def __init__(self, sources: Mapping[str, str], layers: LoRALayers) -> None:
        self._layers = layers
        self._files = AdapterFiles(sources, layers)
        self._thread = ThreadPoolExecutor(1, "folio-adapters")
        self._reading: dict[str, Future[Updates]] = {}

    def handle_adapter_order(self, message: bytes) -> bytes:
        """What went wrong, or nothing."""
        what, slot = _HEADER.unpack_from(message)
        name = message[_HEADER.size :].decode()
        match what:
            case _Do.READ:
                self._reading[name] = self._thread.submit(self._files.read, name)
            case _Do.INSERT:
                future = self._reading.pop(name)
                error = future.exception()
                if error is not None:
                    return str(error if isinstance(error, FolioError) else EngineError(f"{name!r}: {error!r}")).encode()
                self._layers.insert(slot, future.result())
            case _Do.FORGET:
                del self._reading[name]
            case _Do.REMOVE:
                self._layers.remove_adapter(slot)
            case _:
                raise ValueError(f"unknown order about adapters: {what}")
        return b""

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
