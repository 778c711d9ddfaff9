"""The ingress: turns HTTP requests and typed handle calls into tokenised calls of engine replicas."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from folio.app.api.batches.runner import BatchRunner
from folio.app.api.batches.store import BatchStore
from folio.app.api.http import build_api
from folio.app.api.input.model_names import ModelNames
from folio.app.api.input.served_models import ServedModels
from folio.app.api.operators.bodies import AddModelRequest, BudgetRequest, DrainRequest, PinRequest
from folio.app.api.operators.changes import ModelChanges
from folio.app.api.operators.model_cards import ModelCards
from folio.app.api.operators.pins import Pins
from folio.app.api.operators.replies import BudgetReport, DrainReport, LoadReport, ModelCard, load_report
from folio.app.api.replicas import STATUS_TIMEOUT_S
from folio.app.api.responses.store import open_store
from folio.app.api.responses.stored import StoredResponses
from folio.app.api.unknown_fields import UnknownFields
from folio.app.compat.ray import http_host
from folio.app.config.http import HttpSettings
from folio.app.config.logs import configure_logs
from folio.app.config.shelf import ShelfConfig
from folio.app.dashboard.collector import Collector
from folio.app.dashboard.http import add_dashboard
from folio.app.dashboard.traffic import TrafficLog
from folio.app.edge.admission import AdmissionControl, LoadSheddingMiddleware
from folio.app.edge.callers import Callers
from folio.app.edge.guard import key_ring, protect
from folio.app.edge.limits import IngressLimits
from folio.app.edge.request_body import ReadsRefusedBodies
from folio.app.errors import FolioError, UnavailableError, UnknownReplicaError
from folio.app.fleet.overload import LoadShedder
from folio.app.fleet.vllm_metrics import load_families
from folio.app.http.haproxy import trusted_addresses
from folio.app.serving.calls import ReplicaClient
from folio.app.serving.dashboard import WatchedReplicas, count_starting
from folio.app.serving.grpc_ingress import GrpcIngress
from folio.app.serving.limits import LimitReporter, num_ingresses
from folio.app.serving.loaded import LoadedTables, TableCopy
from folio.app.serving.metrics import EdgeMeter, RequestMeter
from folio.app.serving.metrics_page import FreshPage, MetricsPage, render
from folio.app.serving.operations import Operations
from folio.app.serving.shared_streams import SharedReader
from folio.app.tracing import keep_traces_whole
from folio.vmem import BudgetAnswer, MemoryReport

# Timeouts of `ready` before and after a replica has answered once: later a replica may be busy.
STARTING_TIMEOUT_S, READY_TIMEOUT_S = 0.2, 10.0
_BUDGET_TRIES = 5
# Greatest age of the load for endpoint pickers. Each of them asks every 50 ms or so, and all replicas have to answer.
_LOAD_FRESH_S = 0.05


@serve.ingress()
class Ingress(GrpcIngress, Operations):
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
        batch_window: most prompts of one request that are in flight together.
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
        # Methods that the routes and callers through the handle use.
        self.models, self.model = self._cards.all, self._cards.of
        self.pins, self.unpin = self._pins.all, self._pins.unpin
        self.load_adapter, self.unload_adapter = self._changes.load_adapter, self._changes.unload_adapter
        self.remove_model = self._changes.remove_model
        self.response, self.delete_response = self._stored.response, self._stored.delete
        self.response_input = self._stored.input_of
        self.metrics = MetricsPage(context.app_name, None if self._is_shared else first, with_vllm=with_vllm).text
        self.load_metrics = FreshPage(self._make_load_page, _LOAD_FRESH_S).text
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
        # Leave room to read a file that is too long.
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
            raise UnavailableError(f"no engine replica answered within {timeout_s} s", timeout_s) from None

    async def drain(self) -> int:
        """Refuse new requests from now on; returns the number of requests in flight."""
        self._admission.start_draining()
        if self._batches is not None:
            self._batches.stop()
        return self._admission.num_in_flight

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
            UnavailableError: a replica has not answered; or other changes came first at each of several attempts.
        """
        for _ in range(_BUDGET_TRIES):
            revision = request.revision
            if revision is None:
                revision = 1 + max((report.budget_revision for report in (await self.reports()).values()), default=0)
            answers = await self.set_budget(request.budget_bytes, revision)
            if request.revision is not None or "stale" not in answers:
                return BudgetReport(budget_bytes=request.budget_bytes, revision=revision, answers=answers)
        raise UnavailableError(f"others changed the budget during each of {_BUDGET_TRIES} attempts; try again")

    async def drain_replica(self, request: DrainRequest) -> DrainReport:
        """Move the requests of an engine replica to the others, and send it no new ones. Raises `UnknownReplicaError`,
        or `UnavailableError` if it does not answer."""
        answers = await self._replicas.call_each(
            "set_draining", request.replica, request.draining, timeout_s=STATUS_TIMEOUT_S
        )
        if True not in answers:
            silent = [answer for answer in answers if isinstance(answer, FolioError)]
            raise silent[0] if silent else UnknownReplicaError(f"there is no replica {request.replica!r}", "replica")
        return DrainReport(replica=request.replica, draining=request.draining)

    async def add_model(self, request: AddModelRequest) -> ModelCard:
        """Add a model on every engine replica, or on none."""
        await self._changes.add_model(request)
        return await self.model(request.name)

    async def load(self) -> LoadReport:
        """The load of every engine replica; replicas without an answer in `STATUS_TIMEOUT_S` are only counted."""
        return load_report(await self._replicas.call_each("status", timeout_s=STATUS_TIMEOUT_S))

    async def pin(self, request: PinRequest) -> str:
        """Pin a prefix on every engine replica; returns its model's name, see `Pins.pin`.

        Raises:
            OverloadedError: there is no room for requests now.
            UnavailableError: the server is draining.
        """
        with self._admission.admitted():
            return await self._pins.pin(request)

    async def _make_load_page(self) -> str:
        answers = await self._replicas.call_each("status", timeout_s=STATUS_TIMEOUT_S)
        return render(load_families(answers, [model.name for model in self._models]))
