"""Desk: answers guests with notes of the register and text of Folio."""

# `serve.ingress` pickles the class and the FastAPI application at once. Names that they use are therefore defined above
# the class, and annotations are not strings (no `from __future__ import annotations`), which FastAPI could not resolve.
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from statistics import fmean
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.handle import DeploymentHandle

from folio import (
    ChatCompletion,
    ChatCompletionRequest,
    Folio,
    FolioError,
    ForkRequest,
    Message,
    OverloadedError,
    PinRequest,
    UnavailableError,
)

RULES = Message(
    role="system",
    content=(
        "You are the desk of a hotel. You look up keys of rooms, and say what is asked. Guests are in a hurry: you say "
        "which key it is, and nothing else. What you do not find in your notes you do not know."
    ),
)
PIN = "hotel desk"
# Drafts are long enough to be compared, and short enough that a guest does not notice the wait.
DRAFT_TOKENS, ANSWER_TOKENS = 6, 64

api = FastAPI(title="Hotel desk")


@api.exception_handler(FolioError)
async def failed(request: Request, error: FolioError) -> Response:
    """Answer with Folio's error, and with its `Retry-After`."""
    if isinstance(error, OverloadedError | UnavailableError):
        seconds = math.ceil(error.retry_after_s or 1)
        return JSONResponse({"detail": str(error)}, 503, {"Retry-After": str(seconds)})
    return JSONResponse({"detail": str(error)}, 502)


class Question(BaseModel):
    """`drafts`: number of beginnings of the answer to choose from."""

    question: Annotated[str, Field(max_length=100_000)]
    drafts: Annotated[int, Field(ge=1, le=8)] = 3


def mean_logprob(drafts: ChatCompletion, index: int) -> float:
    """The mean log probability of a draft's tokens."""
    [choice] = [choice for choice in drafts.choices if choice.index == index]
    tokens = choice.logprobs.content if choice.logprobs is not None else []
    return fmean(token.logprob for token in tokens) if tokens else -math.inf


@serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Desk:
    """
    Args:
        register: the deployment `KeyRegister`.
        folio: name of the Folio application.
        model: the model's name in Folio.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it before it sends requests
        self, register: DeploymentHandle[Any], folio: str, model: str
    ) -> None:
        self._register = register
        self._folio = Folio(folio)
        self._model = model
        await self._folio.ready()
        # The common prefix of all prompts stays in Folio's cache. Pinning it again has no effect.
        await self._folio.pin(PinRequest(name=PIN, messages=[RULES]))

    @api.post("/ask")
    async def ask(self, question: Question) -> Response:
        """The answer as plain text, streamed."""
        notes: Sequence[str] = await self._register.find.remote(question.question)
        messages = [RULES, Message(role="user", content=" ".join([*notes, question.question]))]
        drafts = await self._folio.chat(
            ChatCompletionRequest(
                model=self._model,
                messages=messages,
                n=question.drafts,
                temperature=0.7,
                logprobs=True,
                max_completion_tokens=DRAFT_TOKENS,
            )
        )
        # From here on errors can only cut the answer off: the status has been sent.
        return StreamingResponse(self._continue(drafts), media_type="text/plain")

    async def _continue(self, drafts: ChatCompletion) -> AsyncIterator[str]:
        """The likeliest draft and its continuation, a fork, which shares the computed tokens."""
        best = max(drafts.choices, key=lambda choice: mean_logprob(drafts, choice.index))
        yield best.message.content or ""
        if best.finish_reason != "length":
            return
        fork = ForkRequest(
            model=self._model, request_id=drafts.id, index=best.index, temperature=0.0, max_tokens=ANSWER_TOKENS
        )
        async with aclosing(self._folio.fork_stream(fork)) as chunks:  # a guest's disconnection cancels the fork
            async for chunk in chunks:
                yield chunk.choices[0].text
