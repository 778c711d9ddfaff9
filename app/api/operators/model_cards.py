"""Cards of the models, with their states and contexts at the engine replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from folio.app.api.input.model_names import ModelNames
from folio.app.api.input.served_models import Seen, ServedModel, seen_models
from folio.app.api.operators.replies import ModelCard, ModelList
from folio.app.api.replicas import STATUS_TIMEOUT_S, Replicas
from folio.app.errors import FolioError
from folio.app.models.builtin import BUILTIN, BUILTIN_DESCRIPTION

# Context lengths of several models are asked for again after this time.
_CONTEXT_FRESH_S = 10.0


class ModelCards:
    """The models and adapters as clients see them.

    Args:
        is_shared: the models share a device: each has a state, and its context depends on the others.
    """

    def __init__(self, names: ModelNames, replicas: Replicas, *, is_shared: bool) -> None:
        self._names, self._replicas, self._is_shared = names, replicas, is_shared
        self._seeing: asyncio.Task[dict[str, Seen]] | None = None
        self._seen_at = 0.0

    async def all(self) -> ModelList:
        """The newest models and adapters."""
        await self._names.refresh()
        seen = await self._seen()
        by_name = self._names.models.by_name
        return ModelList(data=[await self._card(name, model, seen) for name, model in by_name.items()])

    async def of(self, name: str) -> ModelCard:
        """The card of a model, an adapter or an alias. Raises `UnknownModelError`."""
        name = self._names.models.served_name(name)
        return await self._card(name, await self._names.find(name), await self._seen())

    def refresh_contexts(self) -> None:
        """Ask in the background for the models' contexts: they change as models are loaded, added and removed."""
        is_fresh = time.monotonic() - self._seen_at < _CONTEXT_FRESH_S
        if self._is_shared and not is_fresh and (self._seeing is None or self._seeing.done()):
            self._seeing = asyncio.create_task(self._seen())
            self._seeing.add_done_callback(lambda seeing: seeing.cancelled() or seeing.exception())

    async def _seen(self) -> dict[str, Seen]:
        """Each model at the replicas that answer; empty for a single model, which is always awake."""
        if not self._is_shared:
            return {}
        self._seen_at = time.monotonic()
        answers = await self._replicas.call_each("hosted_models", timeout_s=STATUS_TIMEOUT_S)
        seen = seen_models(answer for answer in answers if not isinstance(answer, FolioError))
        self._names.models.note(seen)
        return seen

    async def _card(self, name: str, model: ServedModel, seen: Mapping[str, Seen]) -> ModelCard:
        is_adapter, of_replicas = name != model.name, seen.get(model.name)
        if self._is_shared:  # a list must not load a model
            max_model_len = None if of_replicas is None else of_replicas.max_model_len
        else:
            max_model_len = await model.max_model_len()
        return ModelCard(
            id=name,
            created=model.created,
            max_model_len=max_model_len,
            parent=model.name if is_adapter else None,
            description=BUILTIN_DESCRIPTION if model.config.engine.model == BUILTIN and not is_adapter else None,
            state=None if of_replicas is None else of_replicas.state,
            sampling=None if model.sampling is None else dict(model.sampling),
        )
