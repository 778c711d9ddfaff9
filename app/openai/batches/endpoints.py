"""Routes whose requests batches may have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from app.openai.bodies import ChatCompletionRequest, CompletionRequest
from app.openai.replies import ChatCompletion, Completion, LoadReport
from app.openai.responses.body import ResponsesRequest
from app.openai.responses.replies import ResponseObject

# Requests with a lower number go first: those of batches are last.
LAST_PRIORITY = 2**31 - 1


class BatchService(Protocol):
    """The part of `app.openai.http.Service` that batches call."""

    async def generate(self, request: CompletionRequest) -> Completion: ...
    async def chat(self, request: ChatCompletionRequest) -> ChatCompletion: ...
    async def responses(self, request: ResponsesRequest) -> ResponseObject: ...
    async def load(self) -> LoadReport: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route: the model of its body, and the call that answers it."""

    body: type[BaseModel]
    call: Callable[[BatchService, Any], Awaitable[BaseModel]]

    def read(self, given: dict[str, Any]) -> BaseModel:
        """Validate a body, and give it the last priority. Raises `ValidationError`."""
        body = self.body.model_validate(given)
        if "priority" in self.body.model_fields:
            body = body.model_copy(update={"priority": LAST_PRIORITY})
        return body


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatCompletionRequest, lambda service, body: service.chat(body)),
    "/v1/completions": Endpoint(CompletionRequest, lambda service, body: service.generate(body)),
    "/v1/responses": Endpoint(ResponsesRequest, lambda service, body: service.responses(body)),
}
