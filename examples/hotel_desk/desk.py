"""The desk: answers guests. It asks the register for notes, and Folio for words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.handle import DeploymentHandle

from app.client import (
    ChatCompletion,
    ChatCompletionRequest,
    Folio,
    FolioError,
    ForkRequest,
    Message,
    OverloadedError,
    PinRequest,
)

RULES = Message(role="system", content="You are the desk of a hotel. You look up keys of rooms, and say what is asked.")
# Long enough to tell good drafts from bad ones, short enough that a guest does not wait for them.
DRAFT_TOKENS, ANSWER_TOKENS = 6, 64

api = FastAPI(title="Hotel desk")


class Question(BaseModel):
    """`drafts`: how many beginnings of an answer to choose from."""

    question: str
    drafts: Annotated[int, Field(ge=1, le=8)] = 3


@serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Desk:
    """
    Args:
        register: the deployment `KeyRegister`.
        folio: name of the Folio application; or its handle, if it is part of this one.
        model: what Folio calls the model.
    """

    def __init__(self, register: DeploymentHandle[Any], folio: str | DeploymentHandle[Any], model: str) -> None:
        self._register = register
        self._folio = Folio(folio)
        self._model = model
        self._ready = False

    @api.post("/ask")
    async def ask(self, question: Question) -> Response:
        """The answer as plain text, as it is written."""
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
        # From here on errors can only cut the answer off: the status is on its way.
        return StreamingResponse(self._go_on(drafts), media_type="text/plain")

    async def _go_on(self, drafts: ChatCompletion) -> AsyncIterator[str]:
        """The likeliest draft, and what Folio makes of it: a fork shares all that is computed."""
        best = max(drafts.choices, key=lambda choice: mean_logprob(drafts, choice.index))
        yield best.message.content or ""
        if best.finish_reason != "length":
            return
        fork = ForkRequest(
            model=self._model, request_id=drafts.id, index=best.index, temperature=0.0, max_tokens=ANSWER_TOKENS
        )
        async with aclosing(self._folio.fork_stream(fork)) as chunks:  # a guest who leaves ends it
            async for chunk in chunks:
                yield chunk.choices[0].text
