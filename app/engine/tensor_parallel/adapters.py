"""LoRA adapters on several ranks: each rank reads the files and keeps its shard; rank 0 decides when and in which
slot."""

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

_HEADER = struct.Struct("<BI")  # action, slot; the adapter's name follows


class _Action(enum.IntEnum):
    READ = 1  # in the background
    INSERT = 2  # the read adapter into a slot; answered
    DISCARD = 3  # the read adapter
    REMOVE = 4  # from a slot


class AdapterPeers:
    """`AdapterRanks` of rank 0's `AdapterStore`."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def read(self, name: str) -> None:
        self._order(_Action.READ, 0, name)

    def insert(self, slot: int, name: str) -> None:
        answers = self._ranks.ask_all(RankOrder.ADAPTER, _HEADER.pack(_Action.INSERT, slot) + name.encode())
        errors = [answer.decode(errors="replace") for answer in answers if answer]
        if errors:
            self.remove_adapter(slot)
            raise ModelError(errors[0])

    def discard_adapter(self, name: str) -> None:
        self._order(_Action.DISCARD, 0, name)

    def remove_adapter(self, slot: int) -> None:
        self._order(_Action.REMOVE, slot, "")

    def _order(self, action: _Action, slot: int, name: str) -> None:
        self._ranks.command(RankOrder.ADAPTER, _HEADER.pack(action, slot) + name.encode())


class PeerAdapters:
    """The adapters of a peer."""

    def __init__(self, sources: Mapping[str, str], layers: LoRALayers) -> None:
        self._layers = layers
        self._files = AdapterFiles(sources, layers)
        self._thread = ThreadPoolExecutor(1, "folio-adapters")
        self._reading: dict[str, Future[Updates]] = {}

    def handle_adapter_order(self, message: bytes) -> bytes:
        """Execute an order; return an error message or nothing."""
        action, slot = _HEADER.unpack_from(message)
        name = message[_HEADER.size :].decode()
        match action:
            case _Action.READ:
                self._reading[name] = self._thread.submit(self._files.read, name)
            case _Action.INSERT:
                future = self._reading.pop(name)
                error = future.exception()
                if error is not None:
                    return str(error if isinstance(error, FolioError) else EngineError(f"{name!r}: {error!r}")).encode()
                self._layers.insert(slot, future.result())
            case _Action.DISCARD:
                del self._reading[name]
            case _Action.REMOVE:
                self._layers.remove_adapter(slot)
            case _:
                raise ValueError(f"unknown adapter order {action}")
        return b""

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
