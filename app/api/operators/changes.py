"""Changes of the models and adapters while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from folio.app.api.input.model_names import ModelNames
from folio.app.api.operators.bodies import AddModelRequest, LoadAdapterRequest, UnloadAdapterRequest
from folio.app.config.added_model import added_engine, check_added
from folio.app.config.shelf import SLO, ModelConfig, ShelfConfig
from folio.app.errors import ConfigError, ForbiddenError, ModelError, RequestError


class Tables(Protocol):
    """The models and adapters added at run time. A change is made on all engine replicas or on none. See
    `folio.app.serving.loaded.LoadedTables`."""

    async def load(self, name: str, path: str, *, in_place: bool, model: str) -> None: ...
    async def unload(self, name: str) -> None: ...
    async def add_model(self, model: ModelConfig) -> ModelConfig: ...
    async def remove_model(self, name: str) -> None: ...


class ModelChanges:
    """Checks requests for changes, and carries them out on all engine replicas or on none. Every method raises as the
    method of `Tables`, and `ForbiddenError` if the settings allow no such change.

    Args:
        settings: the models that are served from the start.
        tables: `None`: nothing can be added at run time.
        check_open: raises `UnavailableError` while the server is draining.
    """

    def __init__(
        self, settings: ShelfConfig, names: ModelNames, tables: Tables | None, check_open: Callable[[], None]
    ) -> None:
        self._settings, self._names, self._tables, self._check_open = settings, names, tables, check_open

    async def load_adapter(self, request: LoadAdapterRequest) -> None:
        """Load a LoRA adapter."""
        tables, models = self._of_adapters(), self._names.models
        name = models.first.name if request.base_model_name is None else request.base_model_name
        model = await self._names.find(name)
        if model.name != name or model.config.engine.adapter_dir is None:
            raise RequestError(
                f"base_model_name is {name!r}, for which no adapters can be loaded at run time: its setting "
                "engine.adapter_dir is not set",
                "base_model_name",
            )
        in_place = bool(request.load_inplace)
        await tables.load(request.lora_name, request.lora_path, in_place=in_place, model=model.name)

    async def unload_adapter(self, request: UnloadAdapterRequest) -> None:
        """Unload a LoRA adapter."""
        await self._of_adapters().unload(request.lora_name)

    async def add_model(self, request: AddModelRequest) -> None:
        """Add a model, which the first request for it loads."""
        tables, shelf = self._of_models(), self._settings
        try:
            config = ModelConfig(
                name=request.name,
                engine=added_engine(shelf, request.path, request.max_model_len, request.dtype, request.quantization),
                keep=request.keep,
                weight=request.weight,
                slo=SLO(ttft_s=request.slo.ttft_s, tpot_s=request.slo.tpot_s),
                tool_call_parser=request.tool_call_parser,
                reasoning_parser=request.reasoning_parser,
            )
        except ConfigError as error:
            raise RequestError(str(error)) from error
        # Checked here first: this process needs the tokenizer.
        config, _ = await asyncio.to_thread(check_added, config, shelf)
        try:
            await asyncio.to_thread(self._names.models.check_tokenizer, config)
        except ModelError as error:
            raise RequestError(f"path is {request.path!r}: {error}", "path") from error
        await tables.add_model(config)

    async def remove_model(self, name: str) -> None:
        """Remove a model that was added at run time."""
        await self._of_models().remove_model(name)

    def _of_adapters(self) -> Tables:
        if self._tables is None or not any(model.config.engine.adapter_dir for model in self._names.models):
            raise ForbiddenError(
                "adapters cannot be loaded at run time here: the setting engine.adapter_dir is not set"
            )
        self._check_open()
        return self._tables

    def _of_models(self) -> Tables:
        if self._tables is None or self._settings.models_dir is None:
            raise ForbiddenError("models cannot be added at run time here: the setting models_dir is not set")
        self._check_open()
        return self._tables
