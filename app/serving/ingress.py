"""The ingress: turns HTTP requests and typed handle calls into tokenised calls of engine replicas."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar
from urllib.parse import quote

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app.builtin import BUILTIN, BUILTIN_DESCRIPTION
from app.compat.transformers import imported_without_torch
from app.config.http import HttpSettings
from app.dashboard.collector import Collector
from app.dashboard.http import add_dashboard
from app.dashboard.traffic import TrafficLog
from app.edge.admission import AdmissionControl, LoadSheddingMiddleware
from app.edge.callers import Callers
from app.edge.guard import key_ring, protect
from app.edge.limits import IngressLimits
from app.edge.request_body import ReadsRefusedBodies
from app.engine.model.tokenizer import load_tokenizer
from app.errors import (
    DeadlineError,
    FolioError,
    ForbiddenError,
    NoReplicaError,
    RequestError,
    UnavailableError,
    UnknownPinError,
)
from app.fleet.messages import GenerateRequest, Piece, ServedPooling
from app.fleet.overload import LoadShedder
from app.fleet.vllm_metrics import load_families
from app.haproxy import trusted_addresses
from app.logs import configure_logs
from app.openai.batches.runner import BatchRunner
from app.openai.batches.store import BatchStore
from app.openai.bodies import (
    BudgetRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizedText,
    DetokenizeRequest,
    ForkRequest,
    GenerationBody,
    LoadAdapterRequest,
    PinRequest,
    TokenizeRequest,
    Tokens,
    UnloadAdapterRequest,
)
from app.openai.http import build_api, note_broken_stream
from app.openai.messages.body import CountTokensRequest, MessagesRequest
from app.openai.messages.replies import MessageEvent, MessageObject, TokenCount
from app.openai.output.formats import output_format
from app.openai.pooled.answers import PooledAnswer
from app.openai.pooled.bodies import EmbeddingRequest, PooledBody, RerankRequest, ScoreRequest
from app.openai.pooled.replies import EmbeddingList, Ranking, ScoreList
from app.openai.pooled.translate import PooledTranslator
from app.openai.replies import (
    BudgetReport,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    LoadReport,
    ModelCard,
    ModelList,
    PinList,
    load_report,
    pin_list,
)
from app.openai.responses.body import ResponsesRequest
from app.openai.responses.replies import ResponseObject, StreamEvent
from app.openai.translate import Translator
from app.openai.unknown_fields import UnknownFields
from app.request_context import current_context
from app.serving.adapters import LoadedAdapters, TableCopy
from app.serving.calls import ReplicaClient
from app.serving.dashboard import WatchedReplicas, count_starting
from app.serving.grpc_ingress import GrpcIngress
from app.serving.limits import LimitReporter, num_ingresses
from app.serving.metrics import EdgeMeter, Measured, RequestMeter
from app.serving.metrics_page import FreshPage, MetricsPage, render
from app.serving.shared_streams import SharedReader
from app.tracing import keep_traces_whole
from vmem import BudgetAnswer, MemoryReport

# Timeouts of `ready` before and after a replica has answered once: later a replica may be busy.
STARTING_TIMEOUT_S, READY_TIMEOUT_S = 0.2, 10.0
STATUS_TIMEOUT_S = 2.0
UNPIN_TIMEOUT_S = 10.0
_BUDGET_TRIES = 5
# Greatest age of the load for endpoint pickers. Each of them asks every 50 ms or so, and all replicas have to answer.
_LOAD_FRESH_S = 0.05


class _NamesModel(Protocol):
    """A body that names its model."""

    @property
    def model(self) -> str | None: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


Named = TypeVar("Named", bound=_NamesModel)
Body = TypeVar("Body", bound=GenerationBody)
Answer = TypeVar("Answer")
Pooled = TypeVar("Pooled", bound=PooledBody)
PooledReply = TypeVar("PooledReply", bound=PooledAnswer)
Reply = TypeVar("Reply")
Translate: TypeAlias = Callable[[Body, str | None, int], tuple[list[GenerateRequest], Answer]]


@dataclass(frozen=True, slots=True)
class _Admitted(Generic[Answer]):
    """An admitted and translated request.

    Attributes:
        calls: one for each prompt.
        answer: builds the answer from pieces.
        arrived: `time.monotonic` at the arrival.
    """

    calls: list[GenerateRequest]
    answer: Answer
    arrived: float
    measured: Measured


@serve.ingress()
class Ingress(GrpcIngress):
    """Serves one model under its name, and its adapters under theirs.

    HTTP clients use the OpenAI API, or Anthropic's. Other Ray applications call the same methods with the same bodies
    through the `DeploymentHandle`: `generate`, `chat`, `responses`, `messages` and `fork`, each also with `_stream`;
    `embed`, `score`, `rerank`; `tokenize`, `detokenize`, `count_tokens`; `ready`, `reports`, `load`, `set_budget`,
    `pin`, `pins`, `unpin`, `load_adapter`, `unload_adapter`. Requests of one `session` go to the same replica where
    that costs little.

    Args:
        model: the model whose tokenizer to load.
        model_name: the model's name for clients.
        engine: handle of the engine replicas.
        adapters: names of the LoRA adapters of the settings.
        http: protection of the HTTP interface.
        batch_window: prompts of one request that are sent at once.
        wait_for_replica_s: how long the router lets a request wait when there is no replica.
        parsers: the settings `tool_call_parser` and `reasoning_parser`.
        loads_adapters: whether adapters can be loaded at run time.
        aliases: the setting `model_aliases`.
    """

    _probe: asyncio.Task[int] | None = None
    _batches: BatchRunner | None = None

    def __init__(
        self,
        model: str,
        model_name: str,
        engine: DeploymentHandle[Any],
        adapters: Sequence[str] = (),
        http: HttpSettings | None = None,
        batch_window: int = 32,
        wait_for_replica_s: float = 10.0,
        parsers: tuple[str, str] = ("auto", "auto"),
        loads_adapters: bool = False,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        configure_logs()
        keep_traces_whole()
        self._http = http
        self._model_names = (model_name, *adapters)
        with imported_without_torch():
            tokenizer = load_tokenizer(model)
        self._description = BUILTIN_DESCRIPTION if model == BUILTIN else None
        self._translator = Translator(tokenizer, model_name, adapters, output_format(tokenizer, *parsers), aliases)
        self._pooled = PooledTranslator(self._translator.prompts, self._translator.adapter_of, self._translator.key_of)
        shedder = LoadShedder()
        self._replicas = ReplicaClient(engine, shedder, batch_window, SharedReader(engine), wait_for_replica_s)
        self._admission = AdmissionControl(shedder)
        context = serve.get_replica_context()
        self._ingress_limits = IngressLimits()
        self._limits = LimitReporter(
            self._ingress_limits, shedder, context.app_name, context.replica_id.unique_id, num_ingresses
        )
        self._adapters: LoadedAdapters | None = None
        if loads_adapters:
            copy = TableCopy(context.app_name, lambda table: setattr(self._translator, "loaded", table.ids))
            self._adapters = LoadedAdapters(copy, self._replicas, self._model_names)
        self._created = int(time.time())
        self._max_model_len: int | None = None
        self._served: ServedPooling | None = None
        traffic = TrafficLog()
        self._meter = RequestMeter(traffic)
        starting = partial(count_starting, engine.deployment_name, context.app_name)
        self.dashboard = Collector(WatchedReplicas(self._replicas, self._admission, starting), traffic, model_name)
        self._edge = EdgeMeter()
        with_vllm = http is not None and http.vllm_metrics
        self._metrics = MetricsPage(context.app_name, model_name, with_vllm=with_vllm)
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
        protect(api, settings, keys=keys, observer=self._edge, ingress_limits=self._ingress_limits)
        api.add_middleware(LoadSheddingMiddleware, gate=self._admission, observer=self._edge)
        # A file may be longer than is allowed.
        upload_bytes = 0 if self._batches is None else 2 * settings.batches.max_file_bytes
        api.add_middleware(ReadsRefusedBodies, upload_bytes=upload_bytes)
        trusting: Any = ProxyHeadersMiddleware
        self._api = trusting(api, trusted_addresses())  # for gRPC; for HTTP uvicorn has it
        self._limits.start()
        if self._adapters is not None:
            self._adapters.start()
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
            self._probe = asyncio.create_task(self._replicas.max_model_len())
            self._probe.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
        timeout_s = STARTING_TIMEOUT_S if self._max_model_len is None else READY_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                self._max_model_len = await asyncio.shield(self._probe)
        except TimeoutError:
            raise UnavailableError(f"no engine replica answered within {timeout_s} s") from None

    async def drain(self) -> int:
        """Refuse new requests from now on; returns the number of requests in flight."""
        self._admission.start_draining()
        if self._batches is not None:
            self._batches.stop()
        return self._admission.num_in_flight

    async def models(self) -> ModelList:
        if self._adapters is not None:
            await self._adapters.refresh()
        return ModelList(data=[await self.model(name) for name in (*self._model_names, *self._translator.loaded)])

    async def model(self, name: str) -> ModelCard:
        name = self._translator.served_name(name)
        await self._learn(name)
        adapter = self._translator.adapter_of(name)
        return ModelCard(
            id=name,
            created=self._created,
            max_model_len=await self._model_len(),
            parent=self._model_names[0] if adapter is not None else None,
            description=self._description if adapter is None else None,
        )

    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion:
        """A completion, whole."""
        return await self._complete("completions", self._translator.translate_completion, request, session)

    async def generate_stream(
        self, request: CompletionRequest, session: str | None = None
    ) -> AsyncIterator[Completion]:
        """A completion in chunks, the outputs' pieces in order of arrival."""
        async with self._admit("completions", self._translator.translate_completion, request, session) as admitted:
            async with aclosing(self._replicas.stream_calls(admitted.calls, admitted.arrived)) as pieces:
                async for prompt, piece in pieces:
                    admitted.measured.streams(piece, prompt)
                    yield admitted.answer.chunk(piece, prompt)
            if request.include_usage:
                yield admitted.answer.last_chunk()

    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> ChatCompletion:
        """A chat completion, whole."""
        return await self._complete("chat", self._translator.translate_chat, request, session)

    async def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncIterator[ChatCompletionChunk]:
        """A chat completion in chunks; the first chunk of each output carries the role."""
        async with self._admit("chat", self._translator.translate_chat, request, session) as admitted:
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
        return await self._complete("responses", self._translator.translate_response, request, session)

    async def responses_stream(
        self, request: ResponsesRequest, session: str | None = None
    ) -> AsyncIterator[StreamEvent]:
        """A response as events. An error after the first event becomes the last event instead of being raised."""
        async with self._admit("responses", self._translator.translate_response, request, session) as admitted:
            has_sent = False
            try:
                async with aclosing(self._replicas.stream_calls(admitted.calls, admitted.arrived)) as pieces:
                    async for _, piece in pieces:
                        admitted.measured.streams(piece)
                        for event in admitted.answer.events(piece):
                            has_sent = True
                            yield event
            except FolioError as error:
                if not has_sent:
                    raise
                note_broken_stream(error)
                admitted.measured.fails(error)
                yield admitted.answer.failed(error)

    async def messages(self, request: MessagesRequest, session: str | None = None) -> MessageObject:
        """A message of Anthropic's API, whole."""
        return await self._complete("messages", self._translator.translate_message, request, session)

    async def messages_stream(
        self, request: MessagesRequest, session: str | None = None
    ) -> AsyncIterator[MessageEvent]:
        """A message of Anthropic's API as events."""
        async with (
            self._admit("messages", self._translator.translate_message, request, session) as admitted,
            aclosing(self._replicas.stream_calls(admitted.calls, admitted.arrived)) as pieces,
        ):
            async for _, piece in pieces:
                admitted.measured.streams(piece)
                for event in admitted.answer.events(piece):
                    yield event

    async def count_tokens(self, request: CountTokensRequest) -> TokenCount:
        """The number of tokens of a conversation of Anthropic's API."""
        named = await self._with_served_name(request)
        return await self._translator.in_thread(self._translator.count_tokens, named, await self._model_len())

    async def embed(self, request: EmbeddingRequest) -> EmbeddingList:
        """The embeddings of inputs."""
        translate = self._pooled.translate_embeddings
        return await self._pool("embeddings", translate, request, lambda answer: answer.full_answer)

    async def score(self, request: ScoreRequest) -> ScoreList:
        """The scores of pairs of texts: a classifier's, or the cosine similarity of embeddings."""
        translate = self._pooled.translate_score
        return await self._pool("score", translate, request, lambda answer: answer.full_answer)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Documents in the order of their scores with a query."""
        return await self._pool("rerank", self._pooled.translate_rerank, request, lambda answer: answer.ranking)

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        named, max_model_len = await self._with_served_name(request), await self._model_len()
        return await self._translator.in_thread(self._translator.translate_tokenize, named, max_model_len)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizedText:
        named = await self._with_served_name(request)
        return await self._translator.in_thread(self._translator.translate_detokenize, named)

    async def fork(self, request: ForkRequest) -> Completion:
        """Forks of one output of a running request. The usage leaves out the prompt.

        Raises:
            UnknownRequestError: no replica has the request, or it has ended.
        """
        with self._meter.measure("fork") as measured, self._admission.admitted():
            call, answer = self._translator.translate_fork(await self._with_served_name(request))
            outputs = await self._replicas.complete_fork(call)
            measured.receives([outputs])
            return answer.full_answer([outputs])

    async def fork_stream(self, request: ForkRequest) -> AsyncIterator[Completion]:
        with self._meter.measure("fork") as measured, self._admission.admitted():
            call, answer = self._translator.translate_fork(await self._with_served_name(request))
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
        return dict(await self._replicas.call_all("named_report"))

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
        """Load a LoRA adapter on every engine replica, or on none (`LoadedAdapters.load`)."""
        await self._changeable().load(request.lora_name, request.lora_path, in_place=bool(request.load_inplace))

    async def unload_adapter(self, request: UnloadAdapterRequest) -> None:
        """Unload a LoRA adapter from every engine replica, or from none (`LoadedAdapters.unload`)."""
        await self._changeable().unload(request.lora_name)

    async def load(self) -> LoadReport:
        """The load of every engine replica; replicas without an answer in `STATUS_TIMEOUT_S` are only counted."""
        return load_report(await self._replicas.call_each("status", timeout_s=STATUS_TIMEOUT_S))

    async def pins(self) -> PinList:
        """The pinned prefixes of all engine replicas that answer in `STATUS_TIMEOUT_S`."""
        return pin_list(await self._replicas.call_each("status", timeout_s=STATUS_TIMEOUT_S))

    async def pin(self, request: PinRequest) -> None:
        """Compute a prefix on every engine replica and keep it in the prefix cache; return when all have done so.

        Raises:
            RequestError: the prompt is too short to be shared, or another prefix has the name; some replicas may have
                pinned the prefix nevertheless, until `unpin`.
            EngineError: a replica has no room within its pin quota.
            ForbiddenError: the caller's API key is another tenant's.
            OverloadedError: there is no room for requests now.
            UnavailableError: a replica has not answered in time, or the server is draining.
        """
        with self._admission.admitted():
            context = current_context()
            tenant = request.tenant if context is None else context.tenant_of(request.tenant)
            prefix = await self._translator.in_thread(self._translator.prompts.encode_pin, request)
            await self._replicas.call_all("pin", request.name, prefix, request.cache_salt, tenant)

    async def unpin(self, name: str) -> None:
        """Unpin a prefix on every engine replica; replicas that started after the pin may not have it.

        Raises:
            UnknownPinError: no replica has a pin of this name.
            EngineError: a replica has not answered, and may still have the pin.
        """
        answers = await self._replicas.call_each("unpin", name, timeout_s=UNPIN_TIMEOUT_S)
        if not answers:
            raise NoReplicaError("there is no engine replica; send the request again")
        errors = [answer for answer in answers if isinstance(answer, FolioError)]
        errors.sort(key=lambda error: isinstance(error, UnknownPinError))  # silent replicas may have the pin
        for error in errors:
            if len(errors) == len(answers) or not isinstance(error, UnknownPinError):
                raise error

    async def _make_load_page(self) -> str:
        answers = await self._replicas.call_each("status", timeout_s=STATUS_TIMEOUT_S)
        return render(load_families(answers, self._model_names[0]))

    async def _complete(self, route: str, translate: Translate[Body, Any], request: Body, session: str | None) -> Any:
        async with self._admit(route, translate, request, session) as admitted:
            outputs = await self._replicas.complete_calls(admitted.calls, admitted.arrived)
            admitted.measured.receives(outputs)
            return await self._translator.build_answer(admitted.answer.full_answer, outputs)

    async def _pool(
        self,
        route: str,
        translate: Callable[[Pooled, int, ServedPooling], tuple[list[GenerateRequest], PooledReply]],
        request: Pooled,
        builder: Callable[[PooledReply], Callable[[list[list[Piece]]], Reply]],
    ) -> Reply:
        """Admit, measure and translate a request; compute its vectors, and build the answer."""
        arrived = time.monotonic()
        with self._meter.measure(route) as measured, self._admission.admitted():
            request, max_model_len = await self._with_served_name(request), await self._model_len()
            if self._served is None:
                self._served = await self._replicas.pooling()
            calls, answer = await self._translator.in_thread(translate, request, max_model_len, self._served)
            measured.sends(calls, request.model)
            outputs = await self._replicas.complete_pooled(calls, arrived)
            measured.receives(outputs)
            return await self._translator.build_answer(builder(answer), outputs)

    @asynccontextmanager
    async def _admit(
        self, route: str, translate: Translate[Body, Answer], request: Body, session: str | None
    ) -> AsyncIterator[_Admitted[Answer]]:
        """Admit, measure and translate a request, and pin its prompt if it asks for that."""
        arrived = time.monotonic()
        with self._meter.measure(route) as measured, self._admission.admitted():
            request = await self._with_served_name(request)
            calls, answer = await self._translator.in_thread(translate, request, session, await self._model_len())
            await self._pin_prompt(request, calls, arrived)
            measured.sends(calls, request.model)
            yield _Admitted(calls, answer, arrived, measured)

    async def _pin_prompt(self, request: GenerationBody, calls: Sequence[GenerateRequest], arrived: float) -> None:
        if request.pin is None:
            return
        if len(calls) != 1:
            raise RequestError(f"pin takes one prompt, not {len(calls)}: send them one by one", "pin")
        [call] = calls
        if call.adapter is not None:
            raise RequestError(
                f"prefixes can be pinned for the model {self._model_names[0]!r} only, not for adapters", "pin"
            )
        timeout_s = call.timeout_s
        try:
            async with asyncio.timeout(None if timeout_s is None else arrived + timeout_s - time.monotonic()):
                await self._replicas.call_all("pin", request.pin, call.prompt_token_ids, call.cache_salt, call.tenant)
        except TimeoutError:
            raise DeadlineError(f"the prompt was not pinned within the request's timeout_s of {timeout_s}") from None
        except RequestError as error:
            raise type(error)(error.message, "pin") from error

    def _changeable(self) -> LoadedAdapters:
        """Raises `ForbiddenError` unless adapters can be loaded at run time."""
        if self._adapters is None:
            raise ForbiddenError(
                "adapters cannot be loaded at run time here: the setting engine.adapter_dir is not set"
            )
        self._admission.check_open()
        return self._adapters

    async def _learn(self, model: str | None) -> None:
        """Get the newest adapters if the model is unknown: another ingress may have loaded it a moment ago."""
        if self._adapters is not None and model is not None and not self._translator.knows(model):
            await self._adapters.refresh()

    async def _with_served_name(self, request: Named) -> Named:
        """The request with the served name in place of an alias: it counts for permissions, metrics and the answer."""
        name = None if request.model is None else self._translator.served_name(request.model)
        await self._learn(name)
        return request if name == request.model else request.model_copy(update={"model": name})

    async def _model_len(self) -> int:
        if self._max_model_len is None:
            self._max_model_len = await self._replicas.max_model_len()
        return self._max_model_len
