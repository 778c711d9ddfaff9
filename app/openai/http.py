"""HTTP API over a service object: routes, streams, errors. Knows neither Ray nor the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Protocol

from fastapi import Body, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from folio.app import http_errors as errors
from folio.app.config.http import UnknownFieldsMode
from folio.app.error_json import error_json
from folio.app.errors import FolioError
from folio.app.http_errors import ErrorBody, HttpRefusal
from folio.app.openai import description as examples
from folio.app.openai.base import json_routes
from folio.app.openai.batches.http import add_batches
from folio.app.openai.batches.runner import BatchRunner
from folio.app.openai.bodies import CompletionRequest, ForkRequest
from folio.app.openai.chat_body import ChatCompletionRequest
from folio.app.openai.description import (
    ANTHROPIC_ERRORS,
    CHAT_STREAM,
    COMPLETION_STREAM,
    DESCRIPTION,
    ERRORS,
    MESSAGE_STREAM,
    RESPONSE_STREAM,
    describe,
)
from folio.app.openai.docs_page import add_docs_page
from folio.app.openai.events import stream_chunks, stream_events, stream_messages
from folio.app.openai.messages.body import CountTokensRequest, MessagesRequest
from folio.app.openai.messages.replies import MessageEvent, MessageObject, TokenCount
from folio.app.openai.operation.http import OperationService, add_models, add_operation
from folio.app.openai.pooled.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from folio.app.openai.pooled.replies import EmbeddingList, Ranking, ScoreList
from folio.app.openai.replies import ChatCompletion, ChatCompletionChunk, Completion
from folio.app.openai.responses.body import ResponsesRequest
from folio.app.openai.responses.http import add_stored_responses
from folio.app.openai.responses.replies import ResponseObject, StreamEvent
from folio.app.openai.token_bodies import DetokenizedText, DetokenizeRequest, TokenizeRequest, Tokens
from folio.app.openai.unknown_fields import UnknownFields
from folio.app.request_context import EdgeObserver, note_error, request_id
from folio.app.version import VERSION

logger = logging.getLogger(__name__)

# Longer lists of tokens are serialised outside of the event loop.
_LOOP_TOKENS = 10_000

Session = Annotated[
    str | None,
    Header(
        max_length=256,
        description="A hint: requests of the same session go to the same replica where that costs little.",
    ),
]


class Service(OperationService, Protocol):
    """The methods behind all routes. All raise `FolioError`."""

    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion: ...
    def generate_stream(self, request: CompletionRequest, session: str | None = None) -> AsyncIterator[Completion]: ...
    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> ChatCompletion: ...
    def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncIterator[ChatCompletionChunk]: ...
    async def responses(self, request: ResponsesRequest, session: str | None = None) -> ResponseObject: ...
    def responses_stream(self, request: ResponsesRequest, session: str | None = None) -> AsyncIterator[StreamEvent]: ...
    async def response(self, response_id: str) -> ResponseObject: ...
    async def response_input(self, response_id: str) -> list[dict[str, Any]]: ...
    async def delete_response(self, response_id: str) -> None: ...
    async def fork(self, request: ForkRequest) -> Completion: ...
    def fork_stream(self, request: ForkRequest) -> AsyncIterator[Completion]: ...
    async def messages(self, request: MessagesRequest, session: str | None = None) -> MessageObject: ...
    def messages_stream(self, request: MessagesRequest, session: str | None = None) -> AsyncIterator[MessageEvent]: ...
    async def count_tokens(self, request: CountTokensRequest) -> TokenCount: ...
    async def embed(self, request: EmbeddingRequest) -> EmbeddingList: ...
    async def score(self, request: ScoreRequest) -> ScoreList: ...
    async def rerank(self, request: RerankRequest) -> Ranking: ...
    async def tokenize(self, request: TokenizeRequest) -> Tokens: ...
    async def detokenize(self, request: DetokenizeRequest) -> DetokenizedText: ...


def build_api(
    service: Service,
    unknown_fields: UnknownFieldsMode = "ignore",
    observer: EdgeObserver | None = None,
    batches: BatchRunner | None = None,
) -> FastAPI:
    """Build the ASGI application. `folio.app.edge.guard.protect` adds keys, limits and the log.

    Args:
        unknown_fields, observer: see `UnknownFields`.
        batches: runs batches; `None`: there are none.
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
    _add_generation(api, service)
    add_stored_responses(api, service)
    _add_messages(api, service)
    _add_pooling(api, service)
    add_models(api, service)
    _add_tokens(api, service)
    add_batches(api, batches)
    add_operation(api, service)
    _add_error_handlers(api)
    add_docs_page(api)
    describe(api, allow_unknown=unknown_fields == "ignore")
    return api


def _add_generation(api: FastAPI, service: Service) -> None:
    @api.post("/v1/chat/completions", response_model=ChatCompletion, responses=CHAT_STREAM, tags=["generation"])
    async def chat_completions(
        request: Annotated[ChatCompletionRequest, Body(openapi_examples=examples.CHAT)], x_session_id: Session = None
    ) -> Response:
        """Answer a conversation, whole or, with `stream`, as server-sent events."""
        if request.stream:
            return stream_chunks(service.chat_stream(request, x_session_id), shows_progress=request.include_progress)
        return _json(await service.chat(request, x_session_id))

    @api.post("/v1/completions", response_model=Completion, responses=COMPLETION_STREAM, tags=["generation"])
    async def completions(
        request: Annotated[CompletionRequest, Body(openapi_examples=examples.COMPLETION)], x_session_id: Session = None
    ) -> Response:
        """Continue a prompt, or several, whole or, with `stream`, as server-sent events."""
        if request.stream:
            return stream_chunks(
                service.generate_stream(request, x_session_id), shows_progress=request.include_progress
            )
        return _json(await service.generate(request, x_session_id))

    @api.post("/v1/responses", response_model=ResponseObject, responses=RESPONSE_STREAM, tags=["generation"])
    async def responses(
        request: Annotated[ResponsesRequest, Body(openapi_examples=examples.RESPONSE)], x_session_id: Session = None
    ) -> Response:
        """Answer an input, whole or, with `stream`, as server-sent events."""
        if request.stream:
            return stream_events(service.responses_stream(request, x_session_id))
        return _json(await service.responses(request, x_session_id))

    @api.post("/v1/forks", response_model=Completion, responses=COMPLETION_STREAM, tags=["generation"])
    async def forks(request: ForkRequest) -> Response:
        """Continue an output of a running or recently finished request in `n` more ways, whole or, with `stream`, as
        server-sent events."""
        if request.stream:
            return stream_chunks(service.fork_stream(request))
        return _json(await service.fork(request))


def _add_messages(api: FastAPI, service: Service) -> None:
    streamed = ANTHROPIC_ERRORS | MESSAGE_STREAM

    @api.post("/v1/messages", response_model=MessageObject, responses=streamed, tags=["generation"])
    async def messages(
        request: Annotated[MessagesRequest, Body(openapi_examples=examples.MESSAGE)], x_session_id: Session = None
    ) -> Response:
        """Answer a conversation in Anthropic's API, whole or, with `stream`, as server-sent events."""
        if request.stream:
            return stream_messages(service.messages_stream(request, x_session_id))
        return _json(await service.messages(request, x_session_id))

    @api.post("/v1/messages/count_tokens", responses=ANTHROPIC_ERRORS, tags=["tokens"])
    async def count_tokens(
        request: Annotated[CountTokensRequest, Body(openapi_examples=examples.COUNT)],
    ) -> TokenCount:
        """The number of tokens of a conversation in Anthropic's API."""
        return await service.count_tokens(request)


def _add_pooling(api: FastAPI, service: Service) -> None:
    @api.post("/v1/embeddings", response_model=EmbeddingList, tags=["embeddings and scores"])
    async def embeddings(request: Annotated[EmbeddingRequest, Body(openapi_examples=examples.EMBEDDING)]) -> Response:
        """The embeddings of texts or token ids."""
        answer = await service.embed(request)
        num_values = sum(len(item.embedding) for item in answer.data)
        return _json(answer) if num_values <= _LOOP_TOKENS else await asyncio.to_thread(_json, answer)

    @api.post("/score", include_in_schema=False)
    @api.post("/v1/score", response_model=ScoreList, tags=["embeddings and scores"])
    async def score(request: Annotated[ScoreRequest, Body(openapi_examples=examples.SCORE)]) -> Response:
        """The scores of pairs of texts."""
        return _json(await service.score(request))

    @api.post("/rerank", include_in_schema=False)
    @api.post("/v2/rerank", include_in_schema=False)
    @api.post("/v1/rerank", response_model=Ranking, tags=["embeddings and scores"])
    async def rerank(request: Annotated[RerankRequest, Body(openapi_examples=examples.RERANK)]) -> Response:
        """Documents in the order of their relevance to a query."""
        return _json(await service.rerank(request))


def _add_tokens(api: FastAPI, service: Service) -> None:
    # Answers may be long: they are serialised here, since FastAPI would validate every token again.
    @api.post("/tokenize", response_model=Tokens, tags=["tokens"])
    async def tokenize(request: Annotated[TokenizeRequest, Body(openapi_examples=examples.TOKENIZE)]) -> Response:
        """The tokens of a text or a conversation, and their number."""
        answer = await service.tokenize(request)
        return _json(answer) if answer.count <= _LOOP_TOKENS else await asyncio.to_thread(_json, answer)

    @api.post("/detokenize", response_model=DetokenizedText, tags=["tokens"])
    async def detokenize(request: DetokenizeRequest) -> Response:
        """The text of tokens."""
        return _json(await service.detokenize(request))


def _add_error_handlers(api: FastAPI) -> None:
    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        answer = errors.validation_error(error.errors(), error.body)
        return _refused(request, 400, answer)

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        answer = errors.http_error(error.status_code, f"{error.detail}: {request.method} {request.url.path}")
        headers = _allowed(request) if error.status_code == 405 else error.headers
        return _refused(request, error.status_code, answer, headers)

    @api.exception_handler(HttpRefusal)
    async def refused(request: Request, error: HttpRefusal) -> Response:
        """A body that the route reads exceeds its bounds."""
        headers = {name.decode(): value.decode() for name, value in error.headers}
        return _refused(request, error.status, error.answer, headers)

    @api.exception_handler(FolioError)
    @api.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        status, answer = errors.error_response(error)
        if status == 503 and request.url.path.endswith("/ready"):
            pass  # its changes are logged
        elif status == 503:  # expected while replicas are replaced, for many requests at once
            logger.warning("%s %s: %s", request.method, request.url.path, answer.error.message)
        elif status >= 500:
            logger.error("request %s failed: %s %s", request_id(), request.method, request.url.path, exc_info=error)
        return _refused(request, status, answer, errors.error_headers(error))


def _allowed(request: Request) -> dict[str, str]:
    """The methods of all routes of a path. Starlette gives those of the first route."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {"Allow": ", ".join(sorted({method for route in routes for method in route.methods}))}


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _refused(request: Request, status: int, answer: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    note_error(answer.error.code)
    return Response(error_json(request.url.path, status, answer), status, headers, media_type="application/json")
