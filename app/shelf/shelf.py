"""Shelf: the models of one engine replica, on one device."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from folio.app.config.shelf import ModelConfig
from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.driver import STOPPED
from folio.app.engine.lora.source import AdapterSource
from folio.app.engine.memory.gpu_memory import gpu_memory
from folio.app.engine.memory.memory_profile import TorchMemory
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from folio.app.engine.report import GpuMemory
from folio.app.engine.startup import PeerPrefixes
from folio.app.engine.step.parts import Admit
from folio.app.errors import RequestError, UnavailableError, UnknownModelError
from folio.app.shelf.control import Control
from folio.app.shelf.device import ShelfDevice
from folio.app.shelf.shelved_model import ShelvedModel
from folio.app.shelf.status import DeviceStatus, ModelStatus
from folio.vmem import BudgetAnswer

logger = logging.getLogger(__name__)

_STOPPING = "the server is stopping"


class Shelf:
    """Serves models that share one device, or one model that has it alone.

    A single model without `device_memory_bytes` is loaded by the constructor and stays: its engine has a thread and
    memory of its own. Otherwise a model is loaded at its first request.

    Args:
        models: with different names.
        device_memory_bytes: memory for weights, KV memory and workspace of all models.
        host_memory_bytes: host memory for weights of sleeping models.
        weights_dir, weights_dir_bytes: folder of weight files, and bound of its bytes.
        launch, admit: see `AsyncEngine`; for a single model.
        prefixes_of_others: see `AsyncEngine`.
        loaded: adapters loaded at run time, for the model that each of them names, or the first one. Those of a model
            that the settings no longer have are left out.

    Raises:
        ConfigError, ModelError, UnavailableError: a single model cannot be loaded.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        *,
        device_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        weights_dir: Path | None = None,
        weights_dir_bytes: int | None = None,
        launch: Launch = spawn_ranks,
        admit: Admit | None = None,
        prefixes_of_others: PeerPrefixes | None = None,
        loaded: Collection[AdapterSource] = (),
    ) -> None:
        self._models = {config.name: ShelvedModel(config, self._note_change) for config in models}
        for source in loaded:
            if (model := self._models.get(source.model or models[0].name)) is not None:
                model.loaded_adapters = [*model.loaded_adapters, source]
        self._guard = threading.Lock()  # of `_models`, which is replaced and never changed
        self._is_closed = False
        self._control: Control | None = None
        self._device: ShelfDevice | None = None
        if len(models) == 1 and device_memory_bytes is None:
            [model] = self._models.values()
            adapters = model.loaded_adapters
            model.set_loaded(AsyncEngine(model.config.engine, launch, admit, prefixes_of_others, adapters))
            return
        self._device = device = ShelfDevice(
            models, device_memory_bytes, host_memory_bytes, weights_dir, weights_dir_bytes
        )
        self._control = Control(device, lambda: tuple(self._models.values()), prefixes_of_others)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    def model(self, name: str) -> ShelvedModel:
        """Raises `UnknownModelError` if there is none of that name."""
        model = self._models.get(name)
        if model is None:
            raise UnknownModelError(f"the model {name!r} is not served here", "model")
        return model

    def add(self, config: ModelConfig) -> None:
        """Add a model, which is loaded at its first request.

        Raises:
            RequestError: the name is in use.
            UnavailableError: the shelf is closed.
        """
        with self._guard:
            if self._is_closed:
                raise UnavailableError(_STOPPING)
            if config.name in self._models:
                raise RequestError(f"there is a model {config.name!r} already", "name")
            if self._control is None:
                raise RequestError(
                    "this server was started with a single model, which cannot share its device; to add models, list "
                    "its model in the setting models",
                    "name",
                )
            assert self._device is not None
            self._device.add(config)
            self._models = {**self._models, config.name: ShelvedModel(config, self._note_change)}

    async def remove(self, name: str) -> None:
        """Remove a model; its requests end with `UnavailableError`. Raises `UnknownModelError`."""
        with self._guard:
            model = self.model(name)
            self._models = {other: kept for other, kept in self._models.items() if other != name}
        await asyncio.to_thread(self._close, model, "it has been removed")

    def statuses(self) -> tuple[ModelStatus, ...]:
        """From any thread."""
        return tuple(model.status for model in self._models.values())

    def device_status(self) -> DeviceStatus | None:
        """The shared memory; `None` for a single model that has its device alone. From any thread."""
        return None if self._device is None else self._device.status

    def gpu_memory(self) -> GpuMemory | None:
        """Memory of the CUDA device by part; `None` on a CPU. From any thread."""
        engines = [engine.driver.engine for engine in self._engines]
        if self._device is not None:
            uploads, pages = self._device.uploads, self._device.shared.pages
            is_on_cuda = uploads is not None
        else:
            uploads = pages = None
            is_on_cuda = any(engine.config.device == "cuda" for engine in engines)
        if not is_on_cuda:
            return None
        footprints = [engine.footprint for engine in engines]
        return gpu_memory(TorchMemory(), footprints, pages, 0 if uploads is None else uploads.pinned_bytes)

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """See `Engine.set_budget`. Raises `RequestError` if models share the device: it gives them their budgets."""
        if self._control is not None:
            raise RequestError(
                "the models of a replica get their budgets from device_memory_bytes: set that instead", "budget_bytes"
            )
        [engine] = self._engines
        return engine.set_budget(budget_bytes, revision)

    @property
    def healthy(self) -> bool:
        """Whether requests are served. A model that has failed takes no other with it, unless the device is lost. Does
        not block."""
        engines = self._engines
        if self._control is None:
            return bool(engines) and all(engine.healthy for engine in engines)
        return self._control.failure() is None and not any(e.driver.hangs or e.driver.stalled for e in engines)

    def check(self) -> None:
        """Raise `UnavailableError` once the shelf serves no requests; stop stalled engines. Does not block."""
        if self.healthy:
            return
        for engine in self._engines:
            if engine.driver.stalled:
                with suppress(UnavailableError):
                    engine.check()
        raise UnavailableError((None if self._control is None else self._control.failure()) or STOPPED)

    def engines(self) -> dict[str, AsyncEngine]:
        """The engines of the models that are loaded, by name. From any thread."""
        return {name: engine for name, model in self._models.items() if (engine := model.engine) is not None}

    @property
    def _engines(self) -> list[AsyncEngine]:
        return [engine for model in self._models.values() if (engine := model.engine) is not None]

    async def check_integrity(self) -> None:
        """Check between two steps that memory adds up. Raises `IntegrityError`."""
        if self._control is None:
            for engine in self._engines:
                await engine.check_integrity()
        else:
            await asyncio.wrap_future(self._control.check_integrity())

    def close(self) -> None:
        """Fail the requests in flight and free all memory. Waits for loads and wakes in progress."""
        with self._guard:
            models, self._models, self._is_closed = self._models, {}, True
        for model in models.values():
            self._close(model, _STOPPING)
        if self._control is not None:
            self._control.close()

    def _close(self, model: ShelvedModel, reason: str) -> None:
        """Close a model that is no longer one of the shelf's."""
        if self._control is not None:
            self._control.wait_for_moves(model)
        engine = model.engine
        model.set_failed(UnavailableError(reason), math.inf)
        if engine is not None:
            engine.close()
        self._note_change()

    def _note_change(self) -> None:
        if self._control is not None:
            self._control.note_change()
