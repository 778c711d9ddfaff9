"""The HTTP API over a service object: routes, streaming, errors. Knows neither Ray nor the engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Protocol

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from app.errors import FolioError
from app.openai import errors
from app.openai.bodies import ChatCompletionRequest, CompletionRequest
from app.openai.replies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorBody,
    ModelCard,
    ModelList,
)

logger = logging.getLogger(__name__)

# A hint: requests with the same header go to the same replica where that costs little.
Session = Annotated[str | None, Header(max_length=256)]


class Service(Protocol):
    """What the routes need. Every method raises `FolioError`s."""

    async def models(self) -> ModelList: ...
    async def model(self, name: str) -> ModelCard: ...
    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion: ...
    def generate_stream(self, request: CompletionRequest, session: str | None = None) -> AsyncIterator[Completion]: ...
    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> ChatCompletion: ...
    def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncIterator[ChatCompletionChunk]: ...
    async def ready(self) -> None: ...


def build_api(service: Service) -> FastAPI:
    """The ASGI application."""
    api = FastAPI(title="Folio", summary="OpenAI-compatible LLM server", version="0.1.0")
    error_answers: dict[int | str, dict[str, object]] = {
        status: {"model": ErrorBody} for status in (400, 404, 408, 429, 500, 503)
    }

    as_stream: dict[int | str, dict[str, object]] = {
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "With `stream`: events"}
    }

    @api.get("/health", responses=error_answers, response_class=Response)
    async def health() -> Response:
        await service.ready()
        return Response(status_code=200)

    @api.get("/v1/models", responses=error_answers)
    async def list_models() -> ModelList:
        return await service.models()

    @api.get("/v1/models/{name:path}", responses=error_answers)
    async def get_model(name: str) -> ModelCard:
        return await service.model(name)

    @api.post("/v1/completions", response_model=Completion, responses=error_answers | as_stream)
    async def completions(request: CompletionRequest, x_session_id: Session = None) -> Response:
        if request.stream:
            return await _stream(service.generate_stream(request, x_session_id))
        return _json(await service.generate(request, x_session_id))

    @api.post("/v1/chat/completions", response_model=ChatCompletion, responses=error_answers | as_stream)
    async def chat_completions(request: ChatCompletionRequest, x_session_id: Session = None) -> Response:
        if request.stream:
            return await _stream(service.chat_stream(request, x_session_id))
        return _json(await service.chat(request, x_session_id))

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _json(errors.validation_error(error.errors()), 400)

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        message = f"{error.detail}: {request.method} {request.url.path}"
        return _json(errors.body(message, kind, None, None), error.status_code)

    @api.exception_handler(FolioError)
    @api.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        status, answer = errors.error_response(error)
        if status >= 500:
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _json(answer, status, errors.error_headers(error))

    return api


def _json(answer: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(answer.model_dump(mode="json"), status, headers)


async def _stream(chunks: AsyncIterator[BaseModel]) -> Response:
    """Server-sent events. The first chunk is awaited here, so that a request refused at once gets its status."""
    first = await anext(chunks)

    async def events() -> AsyncIterator[str]:
        try:
            yield f"data: {first.model_dump_json()}\n\n"
            async for chunk in chunks:
                yield f"data: {chunk.model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"
        except Exception as error:  # the status is sent already: the error becomes an event
            logger.exception("a stream failed")
            yield f"data: {errors.error_response(error)[1].model_dump_json()}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
