"""Routes whose requests batches may have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from folio.app.openai.bodies import CompletionRequest
from folio.app.openai.chat_body import ChatCompletionRequest
from folio.app.openai.operation.replies import LoadReport
from folio.app.openai.pooled.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from folio.app.openai.pooled.replies import EmbeddingList, Ranking, ScoreList
from folio.app.openai.replies import ChatCompletion, Completion
from folio.app.openai.responses.body import ResponsesRequest
from folio.app.openai.responses.replies import ResponseObject
from folio.app.openai.unknown_fields import UnknownFields

# Requests with a lower number go first: those of batches are last.
LAST_PRIORITY = 2**31 - 1


class BatchService(Protocol):
    """The part of `folio.app.openai.http.Service` that batches call."""

    async def generate(self, request: CompletionRequest) -> Completion: ...
    async def chat(self, request: ChatCompletionRequest) -> ChatCompletion: ...
    async def responses(self, request: ResponsesRequest) -> ResponseObject: ...
    async def embed(self, request: EmbeddingRequest) -> EmbeddingList: ...
    async def score(self, request: ScoreRequest) -> ScoreList: ...
    async def rerank(self, request: RerankRequest) -> Ranking: ...
    async def load(self) -> LoadReport: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route: the model of its body, and the call that answers it."""

    body: type[BaseModel]
    call: Callable[[BatchService, Any], Awaitable[BaseModel]]

    def read(self, given: dict[str, Any], unknown: UnknownFields) -> tuple[BaseModel, Sequence[str]]:
        """Validate a body, and give it the last priority. Returns it, and its unknown fields that were dropped.

        Raises:
            RequestValidationError: the body is not valid.
        """
        dropped: Sequence[str] = ()
        try:
            body = self.body.model_validate(given)
        except ValidationError as error:
            errors = [{**found, "loc": ("body", *found["loc"])} for found in error.errors(include_url=False)]
            body, dropped = unknown.resolve(self.body, given, errors)
        return body.model_copy(update={"priority": LAST_PRIORITY}), dropped


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatCompletionRequest, lambda service, body: service.chat(body)),
    "/v1/completions": Endpoint(CompletionRequest, lambda service, body: service.generate(body)),
    # Their answers are in the batch's file.
    "/v1/responses": Endpoint(
        ResponsesRequest, lambda service, body: service.responses(body.model_copy(update={"store": bool(body.store)}))
    ),
    "/v1/embeddings": Endpoint(EmbeddingRequest, lambda service, body: service.embed(body)),
    "/v1/score": Endpoint(ScoreRequest, lambda service, body: service.score(body)),
    "/v1/rerank": Endpoint(RerankRequest, lambda service, body: service.rerank(body)),
}
