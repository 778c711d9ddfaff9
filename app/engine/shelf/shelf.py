"""Shelf: the models of one engine replica, on one device."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from app.config.shelf import ModelConfig
from app.engine.async_engine import AsyncEngine
from app.engine.lora.source import AdapterSource
from app.engine.shelf.shelved_model import ShelvedModel
from app.engine.shelf.status import ModelStatus
from app.engine.startup import PeerPrefixes
from app.engine.step_thread import StepThread
from app.engine.tensor_parallel.processes import Launch, spawn_ranks
from app.errors import RequestError, UnavailableError, UnknownModelError
from vmem import KVMemory

logger = logging.getLogger(__name__)


class Shelf:
    """Serves models that share one device, or one model that has it alone.

    A single model without `device_memory_bytes` is loaded by the constructor and stays: its engine has a thread and
    memory of its own. Otherwise one thread computes the steps of all engines, and a model is loaded at its first
    request.

    Args:
        models: at least one, with different names.
        device_memory_bytes: memory for weights, KV memory and workspace of all models.
        host_memory_bytes: host memory for weights of sleeping models.
        weights_dir: folder of weight files.
        launch, admit, prefixes_of_others, loaded: see `AsyncEngine`; for a single model.

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
        launch: Launch = spawn_ranks,
        admit: Callable[[KVMemory], None] | None = None,
        prefixes_of_others: PeerPrefixes | None = None,
        loaded: Collection[AdapterSource] = (),
    ) -> None:
        self._models = {config.name: ShelvedModel(config, self._note_change) for config in models}
        self._guard = threading.Lock()
        self._prefixes_of_others = prefixes_of_others
        self._closing = False
        self._thread: StepThread | None = None
        if len(models) == 1 and device_memory_bytes is None:
            model = self._models[models[0].name]
            model.set_loaded(AsyncEngine(models[0].engine, launch, admit, prefixes_of_others, loaded))
            model.state = "awake"
            return
        self._thread = StepThread(self._control)

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
        """Add a model, which is loaded at its first request. Raises `RequestError` if the name is in use."""
        with self._guard:
            if config.name in self._models:
                raise RequestError(f"there is a model {config.name!r} already", "name")
            if self._thread is None:
                raise RequestError(
                    "this server has one model with a device of its own: configure it by models in the YAML", "name"
                )
            self._models = {**self._models, config.name: ShelvedModel(config, self._note_change)}

    async def remove(self, name: str) -> None:
        """Remove a model; its requests end with `UnavailableError`. Raises `UnknownModelError`."""
        with self._guard:
            model = self.model(name)
            self._models = {other: kept for other, kept in self._models.items() if other != name}
        engine = model.engine
        model.set_failed(UnavailableError("it has been removed"))
        if engine is not None:
            await asyncio.to_thread(engine.close)

    def statuses(self) -> tuple[ModelStatus, ...]:
        """From any thread."""
        return tuple(model.status for model in self._models.values())

    @property
    def healthy(self) -> bool:
        """Whether requests are served. A model that has failed takes no other with it. Does not block."""
        if self._thread is None:
            return all(model.engine is not None and model.engine.healthy for model in self._models.values())
        return self._thread.is_alive

    def check(self) -> None:
        """Raise `UnavailableError` once the shelf serves no requests. Does not block."""
        if self._thread is None:
            for model in self._models.values():
                if model.engine is not None:
                    model.engine.check()
        elif not self._thread.is_alive:
            raise UnavailableError("the engine has stopped; send the request again")

    def close(self) -> None:
        """Fail the requests in flight and free all memory."""
        self._closing = True
        for model in self._models.values():
            if model.engine is not None:
                model.engine.close()
        if self._thread is not None:
            self._thread.close()

    def _note_change(self) -> None:
        if self._thread is not None:
            self._thread.wake()

    # ---- the thread ----

    def _control(self) -> float | None:
        """Load the models that requests wait for."""
        for model in self._models.values():
            if model.is_wanted and model.state == "new":
                model.state = "loading"
                threading.Thread(target=partial(self._load, model), name=f"folio-load-{model.name}").start()
        return None

    def _load(self, model: ShelvedModel) -> None:
        assert self._thread is not None
        began = time.monotonic()
        try:
            engine = AsyncEngine(
                model.config.engine,
                prefixes_of_others=self._prefixes_of_others,
                loaded=model.loaded_adapters,
                thread=self._thread,
            )
        except Exception as error:
            logger.exception("the model %r cannot be loaded", model.name)
            self._thread.call(partial(model.set_failed, error))
            return
        self._thread.call(partial(self._set_awake, model, engine, time.monotonic() - began))

    def _set_awake(self, model: ShelvedModel, engine: AsyncEngine, seconds: float) -> None:
        if self._closing or self._models.get(model.name) is not model:  # removed meanwhile
            engine.stop()
            return
        model.state, model.load_s, model.last_wake_s = "awake", seconds, seconds
        model.num_wakes += 1
        model.set_loaded(engine)
