"""Routes for operators: models, adapters, health, load, budget and pins."""

from __future__ import annotations

import logging
from typing import Annotated, Protocol

from fastapi import Body, FastAPI, Query, Request
from starlette.responses import PlainTextResponse, Response

from folio.app import VERSION
from folio.app.api.operators.bodies import (
    AddModelRequest,
    BudgetRequest,
    DrainRequest,
    LoadAdapterRequest,
    PinRequest,
    UnloadAdapterRequest,
)
from folio.app.api.operators.replies import (
    BudgetReport,
    DrainReport,
    LoadReport,
    ModelCard,
    ModelDeleted,
    ModelList,
    PinCard,
    PinDeleted,
    PinList,
    Version,
)
from folio.app.api.reference.description import EXAMPLES
from folio.app.errors import UnavailableError, UnknownModelError, UnknownPinError
from folio.app.http.request_context import current_context
from folio.vmem import MemoryReport

logger = logging.getLogger(__name__)

_PROMETHEUS = "text/plain; version=1.0.0; charset=utf-8"


class OperationService(Protocol):
    """The methods behind the routes. All raise `FolioError`."""

    async def models(self) -> ModelList: ...
    async def model(self, name: str) -> ModelCard: ...
    async def load(self) -> LoadReport: ...
    async def reports(self) -> dict[str, MemoryReport]: ...
    async def change_budget(self, request: BudgetRequest) -> BudgetReport: ...
    async def drain_replica(self, request: DrainRequest) -> DrainReport: ...
    async def add_model(self, request: AddModelRequest) -> ModelCard: ...
    async def remove_model(self, name: str) -> None: ...
    async def load_adapter(self, request: LoadAdapterRequest) -> None: ...
    async def unload_adapter(self, request: UnloadAdapterRequest) -> None: ...
    async def pins(self) -> PinList: ...
    async def pin(self, request: PinRequest) -> str: ...
    async def unpin(self, name: str, model: str | None = None) -> None: ...
    async def ready(self) -> None: ...
    async def metrics(self) -> str: ...
    async def load_metrics(self) -> str: ...


def add_models(api: FastAPI, service: OperationService) -> None:
    """Routes for models and adapters: the list, and changes of it."""
    _add_models(api, service)
    _add_adapters(api, service)


def add_operation(api: FastAPI, service: OperationService) -> None:
    """Routes for health, load, the budget, draining and pins."""
    _add_health(api, service)
    _add_load(api, service)
    _add_budget(api, service)
    _add_pins(api, service)


def _add_models(api: FastAPI, service: OperationService) -> None:
    @api.get("/v1/models", tags=["models"])
    async def list_models() -> ModelList:
        """The served models and their adapters."""
        return await service.models()

    @api.get("/v1/models/{name:path}", tags=["models"])
    async def get_model(name: str) -> ModelCard:
        """A model, or an adapter."""
        return await service.model(name)

    # For operators only, whatever `operator_paths` says: it must not have this path, where all callers list models.
    @api.post("/v1/models", tags=["operation"])
    async def add_model(request: AddModelRequest) -> ModelCard:
        """Add a model to those of every engine replica, or of none."""
        if (context := current_context()) is not None:
            context.check_operator("adding a model")
        return await service.add_model(request)

    @api.delete("/v1/models/{name:path}", tags=["operation"])
    async def remove_model(name: str, request: Request) -> ModelDeleted:
        """Remove a model that was added at run time, and its adapters. Requests for it end with an error."""
        if not request.scope["path"].endswith(name):  # Starlette drops a final newline
            raise UnknownModelError("no model has a newline in its name", "name")
        if (context := current_context()) is not None:
            context.check_operator("removing a model")
        await service.remove_model(name)
        return ModelDeleted(id=name)


def _add_adapters(api: FastAPI, service: OperationService) -> None:
    # For operators only, whatever `operator_paths` says: an adapter's name is a model's for all tenants.
    @api.post("/v1/load_lora_adapter", response_class=PlainTextResponse, tags=["operation"])
    async def load_adapter(request: LoadAdapterRequest) -> Response:
        """Load a LoRA adapter on every engine replica, or on none."""
        if (context := current_context()) is not None:
            context.check_operator("loading an adapter")
        await service.load_adapter(request)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    @api.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, tags=["operation"])
    async def unload_adapter(request: UnloadAdapterRequest) -> Response:
        """Unload a LoRA adapter from every engine replica. Requests that have begun go on with it."""
        if (context := current_context()) is not None:
            context.check_operator("unloading an adapter")
        await service.unload_adapter(request)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


class _Readiness:
    """Logs changes of the answer of `/ready`: probes ask for it more than once a second."""

    def __init__(self) -> None:
        self._has_been_ready = False
        self._reason: str | None = None

    def note(self, reason: str | None) -> None:
        """Note an answer: `None` for ready, or the reason why not."""
        if reason != self._reason:
            level = logging.WARNING if reason is not None and self._has_been_ready else logging.INFO
            logger.log(level, "%s", "ready" if reason is None else f"not ready: {reason}")
        self._reason = reason
        self._has_been_ready |= reason is None


def _add_health(api: FastAPI, service: OperationService) -> None:
    readiness = _Readiness()

    @api.head("/health", include_in_schema=False)
    @api.get("/health", response_class=Response, tags=["operation"])
    async def health() -> Response:
        """Whether this server process runs. It does not depend on the engine replicas, which a restart of this process
        would not help."""
        return Response(status_code=200)

    @api.head("/ping", include_in_schema=False)
    @api.post("/ping", response_class=Response, tags=["operation"])
    @api.get("/ping", response_class=Response, tags=["operation"])
    async def ping() -> Response:
        """`/health` under the name that SageMaker asks for."""
        return await health()

    @api.get("/version", tags=["operation"])
    async def version() -> Version:
        """The version of this server."""
        return Version(version=VERSION)

    @api.head("/ready", include_in_schema=False)
    @api.get("/ready", response_class=Response, tags=["operation"])
    async def ready() -> Response:
        """Whether requests are accepted: an engine replica answers, and the server is not draining."""
        try:
            await service.ready()
        except UnavailableError as error:
            readiness.note(str(error))
            raise
        readiness.note(None)
        return Response(status_code=200)


def _add_load(api: FastAPI, service: OperationService) -> None:
    @api.get("/metrics", response_class=PlainTextResponse, tags=["operation"])
    async def metrics() -> Response:
        """Metrics of all replicas in Prometheus' text format; see docs/reference/metrics.md."""
        return Response(await service.metrics(), media_type=_PROMETHEUS)

    @api.get("/metrics/load", response_class=PlainTextResponse, tags=["operation"])
    async def load_metrics() -> Response:
        """Queue depth and use of the KV cache at this moment, under vLLM's names, for endpoint pickers of gateways."""
        return Response(await service.load_metrics(), media_type=_PROMETHEUS)

    @api.get("/v1/load", tags=["operation"])
    async def load() -> LoadReport:
        """Load and memory of every engine replica."""
        return await service.load()

    @api.get("/v1/load/memory", tags=["operation"])
    async def memory() -> dict[str, MemoryReport]:
        """The KV memory of every engine replica in detail, by the replica's name."""
        return await service.reports()


def _add_budget(api: FastAPI, service: OperationService) -> None:
    @api.put("/v1/budget", tags=["operation"])
    async def budget(request: Annotated[BudgetRequest, Body(openapi_examples=EXAMPLES["budget"])]) -> BudgetReport:
        """Change the budget of every engine replica's KV cache."""
        # For operators only, whatever `operator_paths` says: a tenant must not take memory from the others.
        if (context := current_context()) is not None:
            context.check_operator("the budget")
        return await service.change_budget(request)

    @api.put("/v1/drain", tags=["operation"])
    async def drain(request: Annotated[DrainRequest, Body(openapi_examples=EXAMPLES["drain"])]) -> DrainReport:
        """Move the requests of an engine replica to the others."""
        if (context := current_context()) is not None:
            context.check_operator("draining")
        return await service.drain_replica(request)


def _add_pins(api: FastAPI, service: OperationService) -> None:
    @api.get("/v1/pins", tags=["operation"])
    async def pins() -> PinList:
        """The pinned prefixes."""
        return await service.pins()

    @api.post("/v1/pins", tags=["operation"])
    async def pin(request: Annotated[PinRequest, Body(openapi_examples=EXAMPLES["pin"])]) -> PinCard:
        """Compute a prefix on every engine replica and pin it in the prefix cache."""
        model = await service.pin(request)
        for card in (await service.pins()).data:
            if (card.id, card.model) == (request.name, model):
                return card
        raise UnknownPinError(f"{request.name!r} was unpinned meanwhile; pin it again", "name")

    @api.delete("/v1/pins/{name:path}", tags=["operation"])
    async def unpin(
        name: str,
        request: Request,
        model: Annotated[
            str | None,
            Query(max_length=256, description="The pin's model; needed if several models have a pin of this name."),
        ] = None,
    ) -> PinDeleted:
        """Unpin a prefix."""
        if not request.scope["path"].endswith(name):  # Starlette drops a final newline
            raise UnknownPinError("no pin has a newline in its name", "name")
        await service.unpin(name, model)
        return PinDeleted(id=name)
