"""Finds the model that a request names: by its own name, an adapter's or an alias."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, Self, TypeVar

from folio.app.api.input.served_models import ServedModel, ServedModels
from folio.app.http.request_context import current_context


class _NamesModel(Protocol):
    """A body that names its model."""

    @property
    def model(self) -> str | None: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


Named = TypeVar("Named", bound=_NamesModel)


class ModelNames:
    """Finds models by name, also those that another ingress has added a moment ago.

    Args:
        refresh: gets the newest models and adapters added at run time; `None`: none can be added.

    Attributes:
        models: those that this ingress knows.
    """

    def __init__(self, models: ServedModels, refresh: Callable[[], Awaitable[None]] | None) -> None:
        self.models = models
        self._refresh = refresh

    async def refresh(self) -> None:
        """Get the newest models and adapters. Without an answer `models` stay as they are."""
        if self._refresh is not None:
            await self._refresh()

    async def find(self, name: str) -> ServedModel:
        """The model of a served name, an adapter's included. Raises `UnknownModelError` if there is none."""
        if not self.models.knows(name):
            await self.refresh()
        return self.models.find(name)

    async def resolve(self, request: Named) -> tuple[Named, ServedModel]:
        """The request with the served name in place of an alias, and its model with the tokenizer loaded. Permissions,
        metrics and the answer go by the served name.

        Raises:
            UnknownModelError: there is no such model.
            ForbiddenError: the caller's API key does not allow it.
            ModelUnavailableError: its tokenizer cannot be loaded.
        """
        name = None if request.model is None else self.models.served_name(request.model)
        model = self.models.first if name is None else await self.find(name)
        if (context := current_context()) is not None:
            context.check_model(name or model.name)  # before anything is loaded for it
        await model.load()
        return (request if name == request.model else request.model_copy(update={"model": name})), model
