"""The operations of an ingress: bodies become tokenised calls of engine replicas, and their pieces become answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from inspect import isfunction
from typing import Any, TypeVar

from folio.app.api.anthropic.body import CountTokensRequest, MessagesRequest
from folio.app.api.anthropic.replies import MessageEvent, TokenCount
from folio.app.api.event_response import note_broken_stream
from folio.app.api.input.model_names import ModelNames, Named
from folio.app.api.input.served_models import ServedModel
from folio.app.api.input.translate import Translator
from folio.app.api.openai.answers import CompletionAnswer
from folio.app.api.openai.bodies import ForkRequest
from folio.app.api.openai.replies import Completion
from folio.app.api.openai.token_bodies import DetokenizedText, DetokenizeRequest, TokenizeRequest, Tokens
from folio.app.api.operators.model_cards import ModelCards
from folio.app.api.operators.pins import Pins
from folio.app.api.pooled.translate import PooledTranslator
from folio.app.api.responses.body import ResponsesRequest
from folio.app.api.responses.replies import ResponseEvent, ResponseObject, StreamEvent
from folio.app.api.responses.stored import StoredResponses
from folio.app.edge.admission import AdmissionControl, overloaded_error
from folio.app.errors import DeadlineError, FolioError
from folio.app.fleet.messages import ForkCall, GenerateRequest, ServedPooling
from folio.app.fleet.overload import LoadShedder
from folio.app.serving.calls import ReplicaClient
from folio.app.serving.metrics import Measured, RequestMeter

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Admitted:
    """An admitted and translated request, with a call for each prompt. `arrived`: `time.monotonic` at its arrival."""

    calls: list[GenerateRequest]
    answer: Any
    arrived: float
    measured: Measured
    translator: Translator


def _whole(route: str, translate: Callable[[Translator], Callable[..., Any]]) -> Any:
    """The method that answers a body whole. `route`: its name in metrics."""

    async def method(self: Operations, request: Any, session: str | None = None) -> Any:
        async with self._admit(route, translate, request, session) as admitted:
            outputs = await self._replicas.complete_calls(admitted.calls, admitted.arrived)
            admitted.measured.receives(outputs)
            return await admitted.translator.build_answer(admitted.answer.full_answer, outputs)

    return method


def _in_chunks(route: str, translate: Callable[[Translator], Callable[..., Any]]) -> Any:
    """The method that answers a body in chunks, the outputs' pieces in order of arrival."""

    async def method(self: Operations, request: Any, session: str | None = None) -> AsyncIterator[Any]:
        async with self._admit(route, translate, request, session) as admitted:
            async with aclosing(self._replicas.stream_calls(admitted.calls, admitted.arrived)) as pieces:
                async for prompt, piece in pieces:
                    admitted.measured.streams(piece, prompt)
                    chunk = admitted.answer.chunk(piece, prompt)
                    if chunk is not None:
                        yield chunk
            if request.include_usage:
                yield admitted.answer.last_chunk()

    return method


def _pooled(route: str, translate: Callable[[PooledTranslator], Callable[..., Any]]) -> Any:
    """The method that answers a body with vectors of its prompts, or with scores."""

    async def method(self: Operations, request: Any) -> Any:
        arrived = time.monotonic()
        async with self._measured(route, request) as (measured, request, model):
            served = await self._loaded(model, partial(_pooling_of, model), request.timeout_s, arrived)
            calls, answer = await model.translator.in_thread(translate(model.pooled), request, *served)
            measured.sends(calls, request.model)
            outputs = await self._replicas.complete_pooled(calls, arrived)
            measured.receives(outputs)
            return await model.translator.build_answer(answer.full_answer, outputs)

    return method


def _named(operations: type[T]) -> type[T]:
    """Name the methods that functions have made, because Serve's errors show the names."""
    for name, method in vars(operations).items():
        if isfunction(method):
            method.__name__ = name
    return operations


@_named
class Operations:
    """The part of an ingress that computes: a method for each operation of `folio.app.http.operations`, and
    `name_stream` for those whose body has `stream`. All raise `FolioError`."""

    _names: ModelNames
    _replicas: ReplicaClient
    _admission: AdmissionControl
    _shedder: LoadShedder
    _meter: RequestMeter
    _cards: ModelCards
    _pins: Pins
    _stored: StoredResponses
    _is_shared: bool  # several models share a device

    generate = _whole("completions", lambda of: of.translate_completion)
    generate_stream = _in_chunks("completions", lambda of: of.translate_completion)
    chat = _whole("chat", lambda of: of.translate_chat)
    chat_stream = _in_chunks("chat", lambda of: of.translate_chat)
    messages = _whole("messages", lambda of: of.translate_message)
    _respond = _whole("responses", lambda of: of.translate_response)
    embed = _pooled("embeddings", lambda of: of.translate_embeddings)
    score = _pooled("score", lambda of: of.translate_score)
    rerank = _pooled("rerank", lambda of: of.translate_rerank)

    async def responses(self, request: ResponsesRequest, session: str | None = None) -> ResponseObject:
        """A response, whole."""
        request = await self._stored.resolve(request)
        response: ResponseObject = await self._respond(request, session)
        await self._stored.keep(request, response)
        return response

    async def responses_stream(
        self, request: ResponsesRequest, session: str | None = None
    ) -> AsyncIterator[StreamEvent]:
        """A response as events. An error after the first event becomes the last event instead of being raised."""
        request = await self._stored.resolve(request)
        async with self._admit("responses", lambda of: of.translate_response, request, session) as admitted:
            try:
                async with aclosing(self._replicas.stream_calls(admitted.calls, admitted.arrived)) as pieces:
                    async for _, piece in pieces:
                        admitted.measured.streams(piece)
                        for event in admitted.answer.events(piece):
                            if isinstance(event, ResponseEvent) and event.response.has_ended:
                                await self._stored.keep(request, event.response)
                            yield event
            except FolioError as error:
                if not admitted.answer.has_begun:
                    raise
                note_broken_stream(error)
                admitted.measured.fails(error)
                yield admitted.answer.failed(error)

    async def messages_stream(
        self, request: MessagesRequest, session: str | None = None
    ) -> AsyncIterator[MessageEvent]:
        """A message of Anthropic's API as events."""
        async with (
            self._admit("messages", lambda of: of.translate_message, request, session) as admitted,
            aclosing(self._replicas.stream_calls(admitted.calls, admitted.arrived)) as pieces,
        ):
            async for _, piece in pieces:
                admitted.measured.streams(piece)
                for event in admitted.answer.events(piece):
                    yield event

    async def count_tokens(self, request: CountTokensRequest) -> TokenCount:
        """The number of tokens of a conversation of Anthropic's API."""
        named, model = await self._names.resolve(request)
        translator = model.translator
        return await translator.in_thread(translator.count_tokens, named, await self._countable(model))

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        named, model = await self._names.resolve(request)
        translator = model.translator
        return await translator.in_thread(translator.translate_tokenize, named, await self._countable(model))

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizedText:
        named, model = await self._names.resolve(request)
        return await model.translator.in_thread(model.translator.translate_detokenize, named)

    async def fork(self, request: ForkRequest) -> Completion:
        """Forks of one output of a running request. The usage leaves out the prompt.

        Raises:
            UnknownRequestError: no replica has the request, or it has ended.
        """
        async with self._forked(request) as (measured, call, answer):
            outputs = await self._replicas.complete_fork(call)
            measured.receives([outputs])
            return answer.full_answer([outputs])

    async def fork_stream(self, request: ForkRequest) -> AsyncIterator[Completion]:
        async with self._forked(request) as (measured, call, answer):
            async with aclosing(self._replicas.stream_fork(call)) as pieces:
                async for piece in pieces:
                    measured.streams(piece)
                    yield answer.chunk(piece)
            if request.include_usage:
                yield answer.last_chunk()

    @asynccontextmanager
    async def _measured(self, route: str, request: Named) -> AsyncIterator[tuple[Measured, Named, ServedModel]]:
        """Measure and admit a request; gives it with the served name of its model."""
        with self._meter.measure(route) as measured, self._admission.admitted():
            request, model = await self._names.resolve(request)
            measured.served_by = model.name
            yield measured, request, model

    @asynccontextmanager
    async def _forked(self, request: ForkRequest) -> AsyncIterator[tuple[Measured, ForkCall, CompletionAnswer]]:
        async with self._measured("fork", request) as (measured, request, model):
            yield measured, *model.translator.translate_fork(request)

    @asynccontextmanager
    async def _admit(
        self, route: str, translate: Callable[[Translator], Callable[..., Any]], request: Any, session: str | None
    ) -> AsyncIterator[_Admitted]:
        """Admit, measure and translate a request, and pin its prompt if it asks for that."""
        arrived = time.monotonic()
        async with self._measured(route, request) as (measured, request, model):
            max_model_len = await self._loaded(model, model.max_model_len, request.timeout_s, arrived)
            translator = model.translator
            calls, answer = await translator.in_thread(translate(translator), request, session, max_model_len)
            if request.pin is not None:
                pinning = self._pins.pin_prompt(request.pin, calls)
                await _within(pinning, "the prompt was not pinned", calls[0].timeout_s, arrived)
            measured.sends(calls, request.model)
            yield _Admitted(calls, answer, arrived, measured, translator)

    async def _loaded(
        self, model: ServedModel, ready: Callable[[], Awaitable[T]], timeout_s: float | None, arrived: float
    ) -> T:
        """The result of `ready`, once the model is loaded. Raises `OverloadedError` while all replicas are full of the
        model's requests, unless its shedder admits this one. With a single model, requests were shed earlier, from
        their heads, which name no model."""
        if self._is_shared:
            model.shedder.arrival_share = self._shedder.arrival_share
            if (delay_s := model.shedder.admission_delay_s(time.monotonic())) is not None:
                raise overloaded_error(delay_s)
        self._cards.refresh_contexts()
        return await _within(ready(), "the model was not loaded", timeout_s, arrived)

    async def _countable(self, model: ServedModel) -> int:
        """The context length for requests that only count tokens, and therefore load no model."""
        return model.longest_tokens if self._is_shared else await model.max_model_len()


async def _within(awaited: Awaitable[T], failure: str, timeout_s: float | None, arrived: float) -> T:
    """Await something within a request's time. Raises `DeadlineError`, whose message begins with `failure`."""
    try:
        async with asyncio.timeout(None if timeout_s is None else arrived + timeout_s - time.monotonic()):
            return await awaited
    except TimeoutError:
        raise DeadlineError(f"{failure} within the request's timeout_s of {timeout_s}") from None


async def _pooling_of(model: ServedModel) -> tuple[int, ServedPooling]:
    return await asyncio.gather(model.max_model_len(), model.pooling())
