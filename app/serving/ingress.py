"""The ingress: HTTP and typed handle calls in, tokenised requests to the engine replicas out."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from app.engine.model_loader import load_tokenizer
from app.errors import EngineError, FolioError, UnavailableError, UnknownModelError
from app.openai.bodies import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    Completion,
    CompletionChoice,
    CompletionRequest,
    ModelCard,
    ModelList,
    PinRequest,
    PromptTokensDetails,
    Usage,
)
from app.openai.http import build_api
from app.openai.prompts import encode_chat, encode_completion, encode_pin
from app.serving.messages import GenerateRequest, Piece
from vmem import BudgetAnswer, MemoryReport

READY_TIMEOUT_S = 10
# What awaiting a call of a replica raises when the call failed, the replica is gone, or none can be had.
_FAILURES = (RayTaskError, RayActorError, DeploymentUnavailableError)


@serve.ingress()
class Ingress:
    """Serves one model under one name.

    Over HTTP it speaks the OpenAI API; another Ray application calls the same methods through its
    `DeploymentHandle`, with the same bodies: `generate`, `chat`, `generate_stream`, `chat_stream`; and `report`,
    `set_budget`, `pin`, `unpin`. Requests of one `session` go to the same replica where that costs little.

    Args:
        model: whose tokenizer to load.
        model_name: what clients call it.
        engine: handle of the engine replicas.
    """

    def __init__(self, model: str, model_name: str, engine: DeploymentHandle[Any]) -> None:
        self._tokenizer = load_tokenizer(model)
        self._model_name = model_name
        self._engine = engine
        self._created = int(time.time())
        self._max_model_len: int | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self)

    async def ready(self) -> None:
        """Returns when an engine replica answers that it is well."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await _call(self._engine.facts.remote())
        except TimeoutError:
            raise EngineError(f"no engine replica answered within {READY_TIMEOUT_S} s") from None

    async def models(self) -> ModelList:
        return ModelList(data=[await self.model(self._model_name)])

    async def model(self, name: str) -> ModelCard:
        self._check_model(name)
        return ModelCard(id=name, created=self._created, max_model_len=await self._facts())

    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion:
        """A completion, whole."""
        self._check_model(request.model)
        prompt = await asyncio.to_thread(encode_completion, self._tokenizer, request)
        call = _call_of("cmpl", prompt, request, request.max_tokens, session)
        piece: Piece = await _call(self._engine.generate.remote(call))
        choice = CompletionChoice(text=piece.text, finish_reason=piece.finish_reason)
        return self._completion(call.request_id, [choice], _usage(prompt, piece.num_tokens, piece.num_cached_tokens))

    async def generate_stream(
        self, request: CompletionRequest, session: str | None = None
    ) -> AsyncIterator[Completion]:
        """A completion, piece by piece."""
        self._check_model(request.model)
        prompt = await asyncio.to_thread(encode_completion, self._tokenizer, request)
        call = _call_of("cmpl", prompt, request, request.max_tokens, session)
        num_tokens = num_cached_tokens = 0
        async for piece in self._pieces(call):
            num_tokens += piece.num_tokens
            num_cached_tokens = piece.num_cached_tokens
            choice = CompletionChoice(text=piece.text, finish_reason=piece.finish_reason)
            yield self._completion(call.request_id, [choice], None)
        if request.include_usage:
            yield self._completion(call.request_id, [], _usage(prompt, num_tokens, num_cached_tokens))

    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> ChatCompletion:
        """A chat completion, whole."""
        self._check_model(request.model)
        prompt = await asyncio.to_thread(encode_chat, self._tokenizer, request)
        call = _call_of("chatcmpl", prompt, request, request.most_tokens, session)
        piece: Piece = await _call(self._engine.generate.remote(call))
        choice = ChatChoice(message=AssistantMessage(content=piece.text), finish_reason=piece.finish_reason)
        return ChatCompletion(
            id=call.request_id,
            created=int(time.time()),
            model=self._model_name,
            choices=[choice],
            usage=_usage(prompt, piece.num_tokens, piece.num_cached_tokens),
        )

    async def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncIterator[ChatCompletionChunk]:
        """A chat completion, piece by piece; the first chunk carries the role."""
        self._check_model(request.model)
        prompt = await asyncio.to_thread(encode_chat, self._tokenizer, request)
        call = _call_of("chatcmpl", prompt, request, request.most_tokens, session)
        num_tokens = num_cached_tokens = 0
        role: Any = "assistant"
        async for piece in self._pieces(call):
            num_tokens += piece.num_tokens
            num_cached_tokens = piece.num_cached_tokens
            delta = ChatDelta(role=role, content=piece.text)
            role = None
            choice = ChatChunkChoice(delta=delta, finish_reason=piece.finish_reason)
            yield self._chat_chunk(call.request_id, [choice], None)
        if request.include_usage:
            yield self._chat_chunk(call.request_id, [], _usage(prompt, num_tokens, num_cached_tokens))

    async def report(self) -> MemoryReport:
        """KV memory of one engine replica."""
        report: MemoryReport = await _call(self._engine.report.remote())
        return report

    async def set_budget(self, budget_bytes: int, revision: int) -> list[BudgetAnswer]:
        """Change how much memory the KV cache of every engine replica may take, while they serve.

        Returns:
            each replica's answer: "applied", "deferred" (its memory shrinks as soon as requests allow), or "stale".

        Raises:
            RequestError: the budget is out of bounds; a replica that has other bounds may have accepted it.
        """
        answers: list[BudgetAnswer] = await _call(
            self._engine.broadcast("set_budget", budget_bytes, revision).results_async()
        )
        return answers

    async def pin(self, request: PinRequest) -> None:
        """Compute a prefix on every engine replica and keep it in the prefix cache; returns when all have.

        Raises:
            RequestError: the prompt is too short to be shared, or the name is taken; a replica may have it all the
                same, and keeps it until `unpin`.
            EngineError: a replica has no room for it within its quota.
        """
        prefix = await asyncio.to_thread(encode_pin, self._tokenizer, request)
        await _call(self._engine.broadcast("pin", request.name, prefix, request.cache_salt).results_async())

    async def unpin(self, name: str) -> None:
        """Let a pinned prefix go. Raises `RequestError` if none of that name is pinned."""
        await _call(self._engine.broadcast("unpin", name).results_async())

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise UnknownModelError(f"the model {name!r} does not exist; this server has {self._model_name!r}", "model")

    async def _facts(self) -> int:
        if self._max_model_len is None:
            self._max_model_len = (await _call(self._engine.facts.remote())).max_model_len
        return self._max_model_len

    async def _pieces(self, request: GenerateRequest) -> AsyncIterator[Piece]:
        response: Any = self._engine.options(stream=True).generate_stream.remote(request)
        finished = False
        try:
            async for piece in response:
                finished = piece.finish_reason is not None
                yield piece
        except _FAILURES as error:
            raise _unwrap(error) from error
        finally:
            if not finished:  # dropping the generator would not stop the replica
                response.cancel()

    def _completion(self, request_id: str, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(id=request_id, created=int(time.time()), model=self._model_name, choices=choices, usage=usage)

    def _chat_chunk(self, request_id: str, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=request_id, created=int(time.time()), model=self._model_name, choices=choices, usage=usage
        )


def _call_of(
    kind: str,
    prompt: list[int],
    request: CompletionRequest | ChatCompletionRequest,
    max_tokens: int | None,
    session: str | None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{kind}-{uuid.uuid4().hex}",
        prompt_token_ids=prompt,
        params=request.sampling_params(max_tokens),
        priority=request.priority,
        cache_salt=request.cache_salt,
        session=session,
    )


def _usage(prompt: list[int], num_tokens: int, num_cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=len(prompt),
        completion_tokens=num_tokens,
        total_tokens=len(prompt) + num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
    )


async def _call(response: Any) -> Any:
    """Await a call of a replica, or of all. When this task is cancelled Serve cancels the call."""
    try:
        return await response
    except _FAILURES as error:
        raise _unwrap(error) from error


def _unwrap(error: Exception) -> FolioError:
    """What really happened at the replica."""
    if isinstance(error, RayActorError | DeploymentUnavailableError):
        return UnavailableError("the engine replica cannot be reached; send the request again")
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, FolioError) else EngineError(f"the engine replica failed: {error}")
