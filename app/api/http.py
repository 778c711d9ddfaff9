"""HTTP API over a service object: routes, streams, errors. Independent of Ray and the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Annotated, Any, Protocol

from fastapi import Body, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from folio.app import VERSION
from folio.app.api.base import json_routes
from folio.app.api.batches.http import add_batches
from folio.app.api.batches.runner import BatchRunner
from folio.app.api.events import event_stream
from folio.app.api.openai.token_bodies import Tokens
from folio.app.api.operators.http import OperationService, add_models, add_operation
from folio.app.api.pooled.replies import EmbeddingList
from folio.app.api.reference.description import DESCRIPTION, ERRORS, EXAMPLES, RESPONSES, describe
from folio.app.api.reference.docs_page import add_docs_page
from folio.app.api.responses.http import StoredService, add_stored_responses
from folio.app.api.routes import ROUTES
from folio.app.api.unknown_fields import UnknownFields
from folio.app.config.http import UnknownFieldsMode
from folio.app.errors import FolioError
from folio.app.http import errors
from folio.app.http.error_json import error_json
from folio.app.http.errors import ErrorBody, HttpRefusal
from folio.app.http.operations import OPERATIONS, Operation
from folio.app.http.request_context import EdgeObserver, note_error, request_id

logger = logging.getLogger(__name__)

# Longer lists of tokens or numbers are serialised outside of the event loop.
_LOOP_VALUES = 10_000

_SESSION = Annotated[
    str | None,
    Header(
        max_length=256,
        description="A hint: requests of the same session go to the same replica where that costs little.",
    ),
]


class Service(OperationService, StoredService, Protocol):
    """The methods behind all routes, beside those of `folio.app.http.operations`. All raise `FolioError`."""


def build_api(
    service: Service,
    unknown_fields: UnknownFieldsMode = "ignore",
    observer: EdgeObserver | None = None,
    batches: BatchRunner | None = None,
) -> FastAPI:
    """Build the ASGI application. `folio.app.edge.guard.protect` adds keys, limits and the log.

    Args: `unknown_fields`, `observer`: see `UnknownFields`; `batches`: runs batches; `None`: their routes answer 404.
    """
    api = FastAPI(
        title="Folio",
        summary="OpenAI-compatible LLM server",
        description=DESCRIPTION,
        version=VERSION,
        openapi_url=None,  # `describe` adds it
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
        # Serve's span of the request is enough; FastAPI's would begin a second trace, with the query in its attributes.
        telemetry={"tracing": False},
    )
    api.router.route_class = json_routes(UnknownFields(unknown_fields, observer))
    for operation in OPERATIONS:
        _add_routes(api, service, operation)
    add_stored_responses(api, service)
    add_models(api, service)
    add_batches(api, batches)
    add_operation(api, service)
    _add_error_handlers(api)
    add_docs_page(api)
    describe(api, allow_unknown=unknown_fields == "ignore")
    return api


def _add_routes(api: FastAPI, service: Service, operation: Operation) -> None:
    """The routes of an operation: its answer to a body, whole or, with `stream`, as server-sent events."""
    route = ROUTES[operation.name]

    async def endpoint(request: Any, x_session_id: str | None = None) -> Response:
        arguments = (request, x_session_id) if route.takes_session else (request,)
        if route.streams and request.stream:
            return event_stream(request, getattr(service, f"{operation.name}_stream")(*arguments))
        answer: BaseModel = await getattr(service, operation.name)(*arguments)
        return await asyncio.to_thread(_json, answer) if _is_long(answer) else _json(answer)

    body: Any = Annotated[route.body, Body(openapi_examples=EXAMPLES.get(operation.name))]
    parameters = [Parameter("request", Parameter.KEYWORD_ONLY, annotation=body)]
    if route.takes_session:
        parameters.append(Parameter("x_session_id", Parameter.KEYWORD_ONLY, default=None, annotation=_SESSION))
    endpoint.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # FastAPI reads the types there
    for path in operation.paths:
        api.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            name=route.title,
            tags=[route.tag],
            description=route.description,
            response_model=route.answer,
            responses=RESPONSES.get(route.answer),
            include_in_schema=path == operation.path,
        )


def _add_error_handlers(api: FastAPI) -> None:
    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _refused(request, 400, errors.validation_error(error.errors(), error.body))

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        answer = errors.http_error(error.status_code, f"{error.detail}: {request.method} {request.url.path}")
        headers = _allowed(request) if error.status_code == 405 else error.headers
        return _refused(request, error.status_code, answer, headers)

    @api.exception_handler(HttpRefusal)
    async def refused(request: Request, error: HttpRefusal) -> Response:
        """A body that the route reads exceeds its bounds."""
        return _refused(request, error.status, error.answer, {n.decode(): value.decode() for n, value in error.headers})

    @api.exception_handler(FolioError)
    @api.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        status, answer = errors.error_response(error)
        if status == 503 and request.url.path.endswith("/ready"):
            pass  # logged elsewhere when it changes
        elif status == 503:  # expected while replicas are replaced, for many requests at once
            logger.warning("%s %s: %s", request.method, request.url.path, answer.error.message)
        elif status >= 500:
            logger.error("request %s failed: %s %s", request_id(), request.method, request.url.path, exc_info=error)
        return _refused(request, status, answer, errors.error_headers(error))


def _allowed(request: Request) -> dict[str, str]:
    """The methods of all routes of a path. Starlette gives those of the first route."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {"Allow": ", ".join(sorted({method for route in routes for method in route.methods}))}


def _is_long(answer: BaseModel) -> bool:
    if isinstance(answer, EmbeddingList):
        return sum(len(item.embedding) for item in answer.data) > _LOOP_VALUES
    return isinstance(answer, Tokens) and answer.count > _LOOP_VALUES


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _refused(request: Request, status: int, answer: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    note_error(answer.error.code)
    return Response(error_json(request.url.path, status, answer), status, headers, media_type="application/json")
