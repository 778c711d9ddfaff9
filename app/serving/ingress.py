"""The ingress: turns HTTP requests and typed handle calls into tokenised calls of engine replicas."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from folio.app.compat.ray import http_host
from folio.app.config.http import HttpSettings
from folio.app.config.shelf import ShelfConfig
from folio.app.dashboard.collector import Collector
from folio.app.dashboard.http import add_dashboard
from folio.app.dashboard.traffic import TrafficLog
from folio.app.edge.admission import AdmissionControl, LoadSheddingMiddleware, overloaded_error
from folio.app.edge.callers import Callers
from folio.app.edge.guard import key_ring, protect
from folio.app.edge.limits import IngressLimits
from folio.app.edge.request_body import ReadsRefusedBodies
from folio.app.errors import (
    DeadlineError,
    FolioError,
    UnavailableError,
)
from folio.app.fleet.messages import GenerateRequest, Piece, ServedPooling
from folio.app.fleet.overload import LoadShedder
from folio.app.fleet.vllm_metrics import load_families
from folio.app.haproxy import trusted_addresses
from folio.app.logs import configure_logs
from folio.app.openai.batches.runner import BatchRunner
from folio.app.openai.batches.store import BatchStore
from folio.app.openai.bodies import CompletionRequest, ForkRequest, GenerationBody
from folio.app.openai.chat_body import ChatCompletionRequest
from folio.app.openai.event_response import note_broken_stream
from folio.app.openai.http import build_api
from folio.app.openai.messages.body import CountTokensRequest, MessagesRequest
from folio.app.openai.messages.replies import MessageEvent, MessageObject, TokenCount
from folio.app.openai.model_names import ModelNames
from folio.app.openai.operation.bodies import (
    AddModelRequest,
    BudgetRequest,
    LoadAdapterRequest,
    PinRequest,
    UnloadAdapterRequest,
)
from folio.app.openai.operation.changes import ModelChanges
from folio.app.openai.operation.model_cards import ModelCards
from folio.app.openai.operation.pins import Pins
from folio.app.openai.operation.replies import BudgetReport, LoadReport, ModelCard, ModelList, PinList, load_report
from folio.app.openai.pooled.answers import PooledAnswer
from folio.app.openai.pooled.bodies import EmbeddingRequest, PooledBody, RerankRequest, ScoreRequest
from folio.app.openai.pooled.replies import EmbeddingList, Ranking, ScoreList
from folio.app.openai.pooled.translate import PooledTranslator
from folio.app.openai.replicas import STATUS_TIMEOUT_S
from folio.app.openai.replies import ChatCompletion, ChatCompletionChunk, Completion
from folio.app.openai.responses.body import ResponsesRequest
from folio.app.openai.responses.replies import ResponseEvent, ResponseObject, StreamEvent
from folio.app.openai.responses.store import open_store
from folio.app.openai.responses.stored import StoredResponses
from folio.app.openai.served_models import ServedModel, ServedModels
from folio.app.openai.token_bodies import DetokenizedText, DetokenizeRequest, TokenizeRequest, Tokens
from folio.app.openai.translate import Translator
from folio.app.openai.unknown_fields import UnknownFields
from folio.app.serving.calls import ReplicaClient
from folio.app.serving.dashboard import WatchedReplicas, count_starting
from folio.app.serving.grpc_ingress import GrpcIngress
from folio.app.serving.limits import LimitReporter, num_ingresses
from folio.app.serving.loaded import LoadedTables, TableCopy
from folio.app.serving.metrics import EdgeMeter, Measured, RequestMeter
from folio.app.serving.metrics_page import FreshPage, MetricsPage, render
from folio.app.serving.shared_streams import SharedReader
from folio.app.tracing import keep_traces_whole
from folio.vmem import BudgetAnswer, MemoryReport

# Timeouts of `ready` before and after a replica has answered once: later a replica may be busy.
STARTING_TIMEOUT_S, READY_TIMEOUT_S = 0.2, 10.0
_BUDGET_TRIES = 5
# Greatest age of the load for endpoint pickers. Each of them asks every 50 ms or so, and all replicas have to answer.
_LOAD_FRESH_S = 0.05


Body = TypeVar("Body", bound=GenerationBody)
Answer = TypeVar("Answer")
Pooled = TypeVar("Pooled", bound=PooledBody)
PooledReply = TypeVar("PooledReply", bound=PooledAnswer)
Reply = TypeVar("Reply")
T = TypeVar("T")
Translate: TypeAlias = Callable[[Body, str | None, int], tuple[list[GenerateRequest], Answer]]
TranslatePooled: TypeAlias = Callable[[Pooled, int, ServedPooling], tuple[list[GenerateRequest], PooledReply]]


@dataclass(frozen=True, slots=True)
class _Admitted(Generic[Answer]):
    """An admitted and translated request.

    Attributes:
        calls: one for each prompt.
        answer: builds the answer from pieces.
        arrived: `time.monotonic` at the arrival.
        translator: of the model.
    """

    calls: list[GenerateRequest]
    answer: Answer
    arrived: float
    measured: Measured
    translator: Translator


@serve.ingress()
class Ingress(GrpcIngress):
    """Serves models under their names, and their adapters under theirs.

    HTTP clients use the OpenAI API, or Anthropic's. Other Ray applications call the same methods with the same bodies
    through the `DeploymentHandle`: `generate`, `chat`, `responses`, `messages` and `fork`, each also with `_stream`;
    `embed`, `score`, `rerank`; `tokenize`, `detokenize`, `count_tokens`; `ready`, `reports`, `load`, `set_budget`,
    `pin`, `pins`, `unpin`, `load_adapter`, `unload_adapter`. Requests of one `session` go to the same replica where
    that costs little.

    Args:
        shelf: the models of each engine replica.
        engine: handle of the engine replicas.
        http: protection of the HTTP interface.
        batch_window: prompts of one request that are sent at once.
        wait_for_replica_s: how long the router lets a request wait when there is no replica.
        aliases: the setting `model_aliases`.
    """

    _probe: asyncio.Task[None] | None = None
    _batches: BatchRunner | None = None

    def __init__(
        self,
        shelf: ShelfConfig,
        engine: DeploymentHandle[Any],
        http: HttpSettings | None = None,
        batch_window: int = 32,
        wait_for_replica_s: float = 10.0,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        configure_logs()
        keep_traces_whole()
        self._http = http
        self._is_shared = shelf.device_memory_bytes is not None
        shedder, shedders = LoadShedder(), dict[str, LoadShedder]()
        self._shedder = shedder
        self._replicas = ReplicaClient(
            engine, shedder, batch_window, SharedReader(engine), wait_for_replica_s, shedders
        )
        self._models = ServedModels(shelf.models, self._replicas, aliases, shedders if self._is_shared else None)
        first = self._models.first.name
        self._admission = AdmissionControl(shedder)
        context = serve.get_replica_context()
        self._ingress_limits = IngressLimits()
        self._limits = LimitReporter(
            self._ingress_limits, shedder, context.app_name, context.replica_id.unique_id, num_ingresses
        )
        self._tables: LoadedTables | None = None
        if shelf.grows:
            copy = TableCopy(context.app_name, self._models.apply)
            self._tables = LoadedTables(copy, self._replicas, self._models.reserved)
        self._names = ModelNames(self._models, None if self._tables is None else self._tables.refresh)
        self._cards = ModelCards(self._names, self._replicas, is_shared=self._is_shared)
        self._pins = Pins(self._names, self._replicas, is_shared=self._is_shared)
        self._changes = ModelChanges(shelf, self._names, self._tables, self._admission.check_open)
        self._has_answered = False
        self._stored = StoredResponses(None if http is None else open_store(http, context.app_name))
        traffic = TrafficLog()
        self._meter = RequestMeter(traffic)
        starting = partial(count_starting, engine.deployment_name, context.app_name)
        watched = WatchedReplicas(self._replicas, self._admission, starting)
        links = None if http is None else http.dashboard_links
        self.dashboard = Collector(watched, traffic, first, links=links)
        self._edge = EdgeMeter()
        with_vllm = http is not None and http.vllm_metrics
        self._metrics = MetricsPage(context.app_name, None if self._is_shared else first, with_vllm=with_vllm)
        self._load_page = FreshPage(self._make_load_page, _LOAD_FRESH_S)
        # Keep half a million permanent objects, mostly of libraries, out of full garbage collections, which would hold
        # the event loop for 0.3 s after large bodies.
        gc.collect()
        gc.freeze()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        settings = self._http or HttpSettings()
        keys = key_ring(settings, self._edge, self._ingress_limits)
        self._batches = self._batch_runner(settings, Callers(settings, keys))
        api = build_api(self, settings.unknown_fields, self._edge, self._batches)
        if settings.dashboard:
            add_dashboard(api, self.dashboard)
        bound_to = await asyncio.to_thread(http_host)
        protect(api, settings, keys=keys, observer=self._edge, ingress_limits=self._ingress_limits, bound_to=bound_to)
        api.add_middleware(LoadSheddingMiddleware, gate=self._admission, observer=self._edge)
        # A file may be longer than is allowed.
        upload_bytes = 0 if self._batches is None else 2 * settings.batches.max_file_bytes
        api.add_middleware(ReadsRefusedBodies, upload_bytes=upload_bytes)
        trusting: Any = ProxyHeadersMiddleware
        self._api = trusting(api, trusted_addresses())  # for gRPC; for HTTP uvicorn has it
        self._limits.start()
        self._stored.start()
        if self._tables is not None:
            self._tables.start()
        if self._batches is not None:
            self._batches.start()
        return api

    def _batch_runner(self, settings: HttpSettings, callers: Callers) -> BatchRunner | None:
        """`None` without a store. Raises `ConfigError` if the store cannot be used."""
        store = settings.batches.store
        if store is None:
            return None
        # A folder for each application, whose models differ.
        folder = store / f"app-{quote(serve.get_replica_context().app_name, safe='')}"
        return BatchRunner(
            BatchStore(folder, settings.batches),
            self,
            callers,
            concurrent_lines=settings.batches.concurrent_lines,
            max_line_bytes=settings.max_body_bytes,
            unknown=UnknownFields(settings.unknown_fields, self._edge),
        )

    def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve every 10 s. Repeats gauges for Prometheus; routing uses no statistics of ingresses."""
        self._meter.repeat()
        self._edge.repeat()
        return {}

    async def ready(self) -> None:
        """Return when a healthy engine replica has answered.

        Raises:
            UnavailableError: none has answered in time, or the server is draining.
        """
        self._admission.check_open()
        if self._probe is None or self._probe.done():  # the call itself makes Serve scale up from zero
            self._probe = asyncio.create_task(self._replicas.ready())
            self._probe.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
        timeout_s = READY_TIMEOUT_S if self._has_answered else STARTING_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._probe)
                self._has_answered = True
        except TimeoutError:
            raise UnavailableError(f"no engine replica answered within {timeout_s} s") from None

    async def drain(self) -> int:
        """Refuse new requests from now on; returns the number of requests in flight."""
        self._admission.start_draining()
        if self._batches is not None:
            self._batches.stop()
        return self._admission.num_in_flight

    async def models(self) -> ModelList:
        return await self._cards.all()

    async def model(self, name: str) -> ModelCard:
        return await self._cards.of(name)

    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion:
        """A completion, whole."""
        return await self._complete("completions", lambda of: of.translate_completion, request, session)

    async def generate_stream(
        self, request: CompletionRequest, session: str | None = None
    ) -> AsyncIterator[Completion]:
        """A completion in chunks, the outputs' pieces in order of arrival."""
        async with self._admit("completions", lambda of: of.translate_completion, request, session) as admitted:
            async with aclosing(self._replicas.stream_calls(admitted.calls, admitted.arrived)) as pieces:
                async for prompt, piece in pieces:
                    admitted.measured.streams(piece, prompt)
                    yield admitted.answer.chunk(piece, prompt)
            if request.include_usage:
                yield admitted.answer.last_chunk()

    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> ChatCompletion:
        """A chat completion, whole."""
        return await self._complete("chat", lambda of: of.translate_chat, request, session)

    async def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncIterator[ChatCompletionChunk]:
        """A chat completion in chunks; the first chunk of each output carries the role."""
        async with self._admit("chat", lambda of: of.translate_chat, request, session) as admitted:
            async with aclosing(self._replicas.stream_calls(admitted.calls, admitted.arrived)) as pieces:
                async for _, piece in pieces:
                    admitted.measured.streams(piece)
                    chunk = admitted.answer.chunk(piece)
                    if chunk is not None:
                        yield chunk
            if request.include_usage:
                yield admitted.answer.last_chunk()

    async def responses(self, request: ResponsesRequest, session: str | None = None) -> ResponseObject:
        """A response, whole."""
        request = await self._stored.resolve(request)
        response = await self._complete("responses", lambda of: of.translate_response, request, session)
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

    async def response(self, response_id: str) -> ResponseObject:
        """A stored response. Raises `UnknownResponseError`."""
        return await self._stored.response(response_id)

    async def response_input(self, response_id: str) -> list[dict[str, Any]]:
        """The items of a stored response's conversation before it. Raises `UnknownResponseError`."""
        return await self._stored.input_of(response_id)

    async def delete_response(self, response_id: str) -> None:
        """Delete a stored response. Raises `UnknownResponseError`."""
        await self._stored.delete(response_id)

    async def messages(self, request: MessagesRequest, session: str | None = None) -> MessageObject:
        """A message of Anthropic's API, whole."""
        return await self._complete("messages", lambda of: of.translate_message, request, session)

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

    async def embed(self, request: EmbeddingRequest) -> EmbeddingList:
        """The embeddings of inputs."""
        return await self._pool(
            "embeddings", lambda of: of.translate_embeddings, request, lambda answer: answer.full_answer
        )

    async def score(self, request: ScoreRequest) -> ScoreList:
        """The scores of pairs of texts: a classifier's, or the cosine similarity of embeddings."""
        return await self._pool("score", lambda of: of.translate_score, request, lambda answer: answer.full_answer)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Documents in the order of their scores with a query."""
        return await self._pool("rerank", lambda of: of.translate_rerank, request, lambda answer: answer.ranking)

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
        with self._meter.measure("fork") as measured, self._admission.admitted():
            named, model = await self._names.resolve(request)
            measured.served_by = model.name
            call, answer = model.translator.translate_fork(named)
            outputs = await self._replicas.complete_fork(call)
            measured.receives([outputs])
            return answer.full_answer([outputs])

    async def fork_stream(self, request: ForkRequest) -> AsyncIterator[Completion]:
        with self._meter.measure("fork") as measured, self._admission.admitted():
            named, model = await self._names.resolve(request)
            measured.served_by = model.name
            call, answer = model.translator.translate_fork(named)
            async with aclosing(self._replicas.stream_fork(call)) as pieces:
                async for piece in pieces:
                    measured.streams(piece)
                    yield answer.chunk(piece)
            if request.include_usage:
                yield answer.last_chunk()

    async def metrics(self) -> str:
        """All metrics of this application, from all nodes, in Prometheus' text format.

        Raises:
            UnavailableError: a node's metrics are missing.
        """
        return await self._metrics.text()

    async def load_metrics(self) -> str:
        """The present load of all engine replicas, in Prometheus' text format, for gateways' endpoint pickers.

        Raises:
            UnavailableError: there is no replica, or one has not answered in `STATUS_TIMEOUT_S`.
        """
        return await self._load_page.text()

    async def reports(self) -> dict[str, MemoryReport]:
        """KV memory of every engine replica, by its name."""
        return {status.name: status.memory for status in await self._replicas.call_all("status")}

    async def set_budget(self, budget_bytes: int, revision: int) -> list[BudgetAnswer]:
        """Change the budget of every engine replica's KV cache at run time.

        Returns:
            each replica's answer: "applied", "deferred" (memory shrinks as soon as requests allow), or "stale".

        Raises:
            RequestError: the budget is out of bounds; replicas with other bounds may have accepted it.
        """
        return await self._replicas.call_all("set_budget", budget_bytes, revision)

    async def change_budget(self, request: BudgetRequest) -> BudgetReport:
        """`set_budget` with the request's revision, or with the next one.

        Raises:
            RequestError: see `set_budget`.
            UnavailableError: a replica has not answered; or other changes came at the same time, again and again.
        """
        for _ in range(_BUDGET_TRIES):
            revision = request.revision
            if revision is None:
                revision = 1 + max((report.budget_revision for report in (await self.reports()).values()), default=0)
            answers = await self.set_budget(request.budget_bytes, revision)
            if request.revision is not None or "stale" not in answers:
                return BudgetReport(budget_bytes=request.budget_bytes, revision=revision, answers=answers)
        raise UnavailableError(f"the budget was changed by others {_BUDGET_TRIES} times meanwhile; try again")

    async def load_adapter(self, request: LoadAdapterRequest) -> None:
        """Load a LoRA adapter on every engine replica, or on none."""
        await self._changes.load_adapter(request)

    async def unload_adapter(self, request: UnloadAdapterRequest) -> None:
        """Unload a LoRA adapter from every engine replica, or from none."""
        await self._changes.unload_adapter(request)

    async def add_model(self, request: AddModelRequest) -> ModelCard:
        """Add a model to those of every engine replica, or of none."""
        await self._changes.add_model(request)
        return await self.model(request.name)

    async def remove_model(self, name: str) -> None:
        """Remove a model that was added at run time from every engine replica, or from none."""
        await self._changes.remove_model(name)

    async def load(self) -> LoadReport:
        """The load of every engine replica; replicas without an answer in `STATUS_TIMEOUT_S` are only counted."""
        return load_report(await self._replicas.call_each("status", timeout_s=STATUS_TIMEOUT_S))

    async def pins(self) -> PinList:
        """The pinned prefixes of all engine replicas, see `Pins.all`."""
        return await self._pins.all()

    async def pin(self, request: PinRequest) -> str:
        """Pin a prefix on every engine replica; returns its model's name, see `Pins.pin`.

        Raises:
            OverloadedError: there is no room for requests now.
            UnavailableError: the server is draining.
        """
        with self._admission.admitted():
            return await self._pins.pin(request)

    async def unpin(self, name: str, model: str | None = None) -> None:
        """Unpin a prefix on every engine replica, see `Pins.unpin`."""
        await self._pins.unpin(name, model)

    async def _make_load_page(self) -> str:
        answers = await self._replicas.call_each("status", timeout_s=STATUS_TIMEOUT_S)
        return render(load_families(answers, [model.name for model in self._models]))

    async def _complete(
        self, route: str, method: Callable[[Translator], Translate[Body, Any]], request: Body, session: str | None
    ) -> Any:
        async with self._admit(route, method, request, session) as admitted:
            outputs = await self._replicas.complete_calls(admitted.calls, admitted.arrived)
            admitted.measured.receives(outputs)
            return await admitted.translator.build_answer(admitted.answer.full_answer, outputs)

    async def _pool(
        self,
        route: str,
        method: Callable[[PooledTranslator], TranslatePooled[Pooled, PooledReply]],
        request: Pooled,
        builder: Callable[[PooledReply], Callable[[list[list[Piece]]], Reply]],
    ) -> Reply:
        """Admit, measure and translate a request; compute its vectors, and build the answer."""
        arrived = time.monotonic()
        with self._meter.measure(route) as measured, self._admission.admitted():
            request, model = await self._names.resolve(request)
            measured.served_by = model.name
            translator, translate = model.translator, method(model.pooled)
            self._check_room(model)
            self._cards.refresh_contexts()
            ready = asyncio.gather(model.max_model_len(), model.pooling())
            served = await self._within(ready, "the model was not loaded", request.timeout_s, arrived)
            calls, answer = await translator.in_thread(translate, request, *served)
            measured.sends(calls, request.model)
            outputs = await self._replicas.complete_pooled(calls, arrived)
            measured.receives(outputs)
            return await translator.build_answer(builder(answer), outputs)

    @asynccontextmanager
    async def _admit(
        self, route: str, method: Callable[[Translator], Translate[Body, Answer]], request: Body, session: str | None
    ) -> AsyncIterator[_Admitted[Answer]]:
        """Admit, measure and translate a request, and pin its prompt if it asks for that."""
        arrived = time.monotonic()
        with self._meter.measure(route) as measured, self._admission.admitted():
            request, model = await self._names.resolve(request)
            measured.served_by = model.name
            self._check_room(model)
            self._cards.refresh_contexts()
            ready = self._within(model.max_model_len(), "the model was not loaded", request.timeout_s, arrived)
            max_model_len = await ready
            translator = model.translator
            calls, answer = await translator.in_thread(method(translator), request, session, max_model_len)
            if request.pin is not None:
                pinning = self._pins.pin_prompt(request.pin, calls)
                await self._within(pinning, "the prompt was not pinned", calls[0].timeout_s, arrived)
            measured.sends(calls, request.model)
            yield _Admitted(calls, answer, arrived, measured, translator)

    async def _countable(self, model: ServedModel) -> int:
        """The context for requests that only count tokens, which load no model."""
        return model.longest_tokens if self._is_shared else await model.max_model_len()

    def _check_room(self, model: ServedModel) -> None:
        """Raise `OverloadedError` while all replicas are full of a model's requests, unless this request may try. The
        requests of a single model are refused by their heads, in which no model is named."""
        if not self._is_shared:
            return
        model.shedder.arrival_share = self._shedder.arrival_share
        if (delay_s := model.shedder.admission_delay_s(time.monotonic())) is not None:
            raise overloaded_error(delay_s)

    async def _within(self, awaited: Awaitable[T], failure: str, timeout_s: float | None, arrived: float) -> T:
        """Await something within a request's time. Raises `DeadlineError`, which tells the failure."""
        try:
            async with asyncio.timeout(None if timeout_s is None else arrived + timeout_s - time.monotonic()):
                return await awaited
        except TimeoutError:
            raise DeadlineError(f"{failure} within the request's timeout_s of {timeout_s}") from None
