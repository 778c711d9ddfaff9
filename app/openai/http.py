"""HTTP API over a service object: routes, streams, errors. Knows neither Ray nor the engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Protocol, cast

from fastapi import Body, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Match

from app import http_errors as errors
from app.config.http import UnknownFieldsMode
from app.error_json import AnthropicErrorBody, anthropic_error, error_json
from app.errors import FolioError, UnknownModelError, UnknownPinError
from app.http_errors import ErrorBody, HttpRefusal
from app.openai import description as examples
from app.openai.base import json_routes
from app.openai.batches.http import add_batches
from app.openai.batches.runner import BatchRunner
from app.openai.bodies import (
    AddModelRequest,
    BudgetRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizedText,
    DetokenizeRequest,
    ForkRequest,
    LoadAdapterRequest,
    PinRequest,
    TokenizeRequest,
    Tokens,
    UnloadAdapterRequest,
)
from app.openai.description import (
    ANTHROPIC_ERRORS,
    CHAT_STREAM,
    COMPLETION_STREAM,
    DESCRIPTION,
    ERRORS,
    MESSAGE_STREAM,
    RESPONSE_STREAM,
    describe,
)
from app.openai.docs_page import add_docs_page
from app.openai.messages.body import CountTokensRequest, MessagesRequest
from app.openai.messages.replies import MessageEvent, MessageObject, TokenCount
from app.openai.pooled.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from app.openai.pooled.replies import EmbeddingList, Ranking, ScoreList
from app.openai.replies import (
    BudgetReport,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Frames,
    LoadReport,
    ModelCard,
    ModelDeleted,
    ModelList,
    PinCard,
    PinDeleted,
    PinList,
    Version,
    on_one_line,
)
from app.openai.responses.body import ResponsesRequest
from app.openai.responses.replies import ErrorEvent, ResponseObject, StreamEvent
from app.openai.unknown_fields import UnknownFields
from app.request_context import EdgeObserver, current_context, note_error, request_id
from app.version import VERSION
from vmem import MemoryReport

logger = logging.getLogger(__name__)

_PROMETHEUS = "text/plain; version=1.0.0; charset=utf-8"
# Longer lists of tokens are serialised outside of the event loop.
_LOOP_TOKENS = 10_000

Session = Annotated[
    str | None,
    Header(
        max_length=256,
        description="A hint: requests of the same session go to the same replica where that costs little.",
    ),
]


class Service(Protocol):
    """The methods behind the routes. All raise `FolioError`."""

    async def models(self) -> ModelList: ...
    async def model(self, name: str) -> ModelCard: ...
    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion: ...
    def generate_stream(self, request: CompletionRequest, session: str | None = None) -> AsyncIterator[Completion]: ...
    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> ChatCompletion: ...
    def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncIterator[ChatCompletionChunk]: ...
    async def responses(self, request: ResponsesRequest, session: str | None = None) -> ResponseObject: ...
    def responses_stream(self, request: ResponsesRequest, session: str | None = None) -> AsyncIterator[StreamEvent]: ...
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
    async def load(self) -> LoadReport: ...
    async def reports(self) -> dict[str, MemoryReport]: ...
    async def change_budget(self, request: BudgetRequest) -> BudgetReport: ...
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


def build_api(
    service: Service,
    unknown_fields: UnknownFieldsMode = "ignore",
    observer: EdgeObserver | None = None,
    batches: BatchRunner | None = None,
) -> FastAPI:
    """Build the ASGI application. `app.edge.guard.protect` adds keys, limits and the log.

    Args:
        unknown_fields, observer: see `UnknownFields`.
        batches: runs batches; `None`: there are none.
    """
    api = FastAPI(
        title="Folio",
        summary="OpenAI-compatible LLM server",
        description=DESCRIPTION,
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
        # Serve's span of the request is enough; FastAPI's would begin a second trace, with the query in its attributes.
        telemetry={"tracing": False},
    )
    api.router.route_class = json_routes(UnknownFields(unknown_fields, observer))
    _add_generation(api, service)
    _add_messages(api, service)
    _add_pooling(api, service)
    _add_models(api, service)
    _add_adapters(api, service)
    _add_tokens(api, service)
    add_batches(api, batches)
    _add_operation(api, service)
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
            return await _stream(service.chat_stream(request, x_session_id))
        return _json(await service.chat(request, x_session_id))

    @api.post("/v1/completions", response_model=Completion, responses=COMPLETION_STREAM, tags=["generation"])
    async def completions(
        request: Annotated[CompletionRequest, Body(openapi_examples=examples.COMPLETION)], x_session_id: Session = None
    ) -> Response:
        """Continue a prompt, or several, whole or, with `stream`, as server-sent events."""
        if request.stream:
            return await _stream(service.generate_stream(request, x_session_id))
        return _json(await service.generate(request, x_session_id))

    @api.post("/v1/responses", response_model=ResponseObject, responses=RESPONSE_STREAM, tags=["generation"])
    async def responses(
        request: Annotated[ResponsesRequest, Body(openapi_examples=examples.RESPONSE)], x_session_id: Session = None
    ) -> Response:
        """Answer an input, whole or, with `stream`, as server-sent events. Nothing is stored."""
        if request.stream:
            return await _stream_events(service.responses_stream(request, x_session_id))
        return _json(await service.responses(request, x_session_id))

    @api.post("/v1/forks", response_model=Completion, responses=COMPLETION_STREAM, tags=["generation"])
    async def forks(request: ForkRequest) -> Response:
        """Continue an output of a running or recently finished request in `n` more ways, whole or, with `stream`, as
        server-sent events."""
        if request.stream:
            return await _stream(service.fork_stream(request))
        return _json(await service.fork(request))


def _add_messages(api: FastAPI, service: Service) -> None:
    streamed = ANTHROPIC_ERRORS | MESSAGE_STREAM

    @api.post("/v1/messages", response_model=MessageObject, responses=streamed, tags=["generation"])
    async def messages(
        request: Annotated[MessagesRequest, Body(openapi_examples=examples.MESSAGE)], x_session_id: Session = None
    ) -> Response:
        """Answer a conversation in Anthropic's API, whole or, with `stream`, as server-sent events."""
        if request.stream:
            return await _stream_messages(service.messages_stream(request, x_session_id))
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


def _add_models(api: FastAPI, service: Service) -> None:
    @api.get("/v1/models", tags=["models"])
    async def list_models() -> ModelList:
        """The served models and their adapters."""
        return await service.models()

    @api.get("/v1/models/{name:path}", tags=["models"])
    async def get_model(name: str) -> ModelCard:
        """A model, or an adapter."""
        return await service.model(name)

    # Whatever `operator_paths` says, as for the budget: all callers may list models.
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


def _add_adapters(api: FastAPI, service: Service) -> None:
    # Whatever `operator_paths` says, as for the budget: an adapter's name is a model's for all tenants.
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


def _add_operation(api: FastAPI, service: Service) -> None:
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
        await service.ready()
        return Response(status_code=200)

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

    @api.put("/v1/budget", tags=["operation"])
    async def budget(request: Annotated[BudgetRequest, Body(openapi_examples=examples.BUDGET)]) -> BudgetReport:
        """Change the budget of every engine replica's KV cache."""
        # Whatever `operator_paths` says: a tenant must not take memory from the others.
        if (context := current_context()) is not None:
            context.check_operator("the budget")
        return await service.change_budget(request)

    @api.get("/v1/pins", tags=["operation"])
    async def pins() -> PinList:
        """The pinned prefixes."""
        return await service.pins()

    @api.post("/v1/pins", tags=["operation"])
    async def pin(request: Annotated[PinRequest, Body(openapi_examples=examples.PIN)]) -> PinCard:
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
            Query(max_length=256, description="Whose prefix it is; needed if several models have a pin of this name."),
        ] = None,
    ) -> PinDeleted:
        """Unpin a prefix."""
        if not request.scope["path"].endswith(name):  # Starlette drops a final newline
            raise UnknownPinError("no pin has a newline in its name", "name")
        await service.unpin(name, model)
        return PinDeleted(id=name)


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
        if status == 503:  # expected while replicas are replaced, for many requests at once
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


async def _stream(chunks: AsyncIterator[BaseModel]) -> Response:
    """Server-sent events of completions and chat completions: data only, with an end mark."""

    def failed(error: Exception) -> str:
        return f"data: {json.dumps(errors.error_response(error)[1].model_dump())}\n\n"

    return await _streamed(chunks, Frames().event, failed, "data: [DONE]\n\n")


async def _stream_events(events: AsyncIterator[StreamEvent]) -> Response:
    """Server-sent events of responses: with names, and without an end mark."""
    last_number = 0

    def written(event: StreamEvent) -> str:
        nonlocal last_number
        last_number = event.sequence_number
        return f"event: {event.type}\ndata: {on_one_line(event.model_dump_json())}\n\n"

    def failed(error: Exception) -> str:
        detail = errors.error_response(error)[1].error
        return written(
            ErrorEvent(sequence_number=last_number + 1, code=detail.code, message=detail.message, param=detail.param)
        )

    return await _streamed(events, written, failed, "")


async def _stream_messages(events: AsyncIterator[MessageEvent]) -> Response:
    """Server-sent events of Anthropic's messages: with names, and without an end mark."""

    def written(event: MessageEvent | AnthropicErrorBody) -> str:
        return f"event: {event.type}\ndata: {on_one_line(event.model_dump_json())}\n\n"

    def failed(error: Exception) -> str:
        return written(anthropic_error(*errors.error_response(error)))

    return await _streamed(events, written, failed, "")


def note_broken_stream(error: Exception) -> None:
    """Log an error of a stream whose status has been sent, with a traceback unless it was to be expected."""
    status, answer = errors.error_response(error)
    note_error(answer.error.code)
    unexpected = status >= 500 and status != 503
    level = logging.ERROR if unexpected else logging.INFO  # without the message, which may quote the request
    logger.log(
        level,
        "the stream of request %s failed: %s",
        request_id(),
        answer.error.code,
        exc_info=error if unexpected else None,
    )


async def _streamed(
    items: AsyncIterator[Any], write: Callable[[Any], str | bytes], failed: Callable[[Exception], str], end: str
) -> Response:
    """A streaming response. The first item is awaited here, so that a request refused at once gets its status."""
    first = await anext(items)

    async def events() -> AsyncIterator[str | bytes]:
        try:
            async with aclosing(cast(Any, items)):
                yield write(first)
                async for item in items:
                    yield write(item)
            yield end
        except Exception as error:  # noqa: BLE001  # the status has been sent: the error becomes an event
            note_broken_stream(error)
            yield failed(error)

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
