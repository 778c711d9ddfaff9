"""The engine replica: a shelf of models in a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray import serve

from app.config.added_model import check_added
from app.config.shelf import ModelConfig, ShelfConfig
from app.dashboard.views import ReplicaView, ShelfView, WatchCall, view_replica, view_shelf
from app.engine import Delta
from app.engine.lora.source import AdapterSource
from app.engine.report import ReplicaReport
from app.engine.shelf.status import ModelStatus
from app.errors import (
    ConfigError,
    ModelUnavailableError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownPinError,
    UnknownRequestError,
)
from app.fleet.autoscaling import AutoscalingLoad
from app.fleet.loaded import LoadedTable
from app.fleet.messages import (
    CheckedModel,
    ForkCall,
    GenerateRequest,
    HostedModel,
    HotPrefixes,
    Piece,
    PieceCollector,
    ReplicaStatus,
    ServedPooling,
    SharedStreamCall,
    reports_as_stats,
)
from app.fleet.retry import DuplicateGuard
from app.fleet.shelf_load import reports_for_routers, summed_load, summed_memory, unloaded_report
from app.fleet.streams import StreamPace, interleave, with_heartbeats
from app.logs import configure_logs
from app.serving.engine_metrics import EngineMeter, RoutingAudit
from app.serving.ledger import BudgetMember, device_of_this_replica
from app.serving.loaded import TableCopy
from app.serving.peers import peer_prefixes
from app.serving.shared_streams import Entry, SharedStreams
from app.serving.shelf_metrics import ShelfMeter
from app.tracing import keep_traces_whole, traced
from vmem import BudgetAnswer, MemoryReport

if TYPE_CHECKING:
    from app.engine.async_engine import AsyncEngine, Pace
    from app.engine.shelf.shelf import Shelf
    from app.engine.shelf.shelved_model import ShelvedModel

logger = logging.getLogger(__name__)

# Time for the last answers of a replica whose engine has stopped.
_FLUSH_GRACE_S = 1.0
# Bound of the calls that a hanging engine would never answer.
_ANSWER_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Figures:
    """Loads by model, load and memory of all models together, and memory of each model that has an engine."""

    loads: dict[str, ReplicaReport]
    load: ReplicaReport
    memory: MemoryReport
    memories: dict[str, MemoryReport]


class EngineReplica:
    """Runs the models of a shelf. Cancelling a call cancels its request and frees its memory. Methods with a `model`
    are about that one, or the first one if it is empty, which is loaded if it has not been.

    All streams and Serve's health checks share the event loop, which therefore never waits for the memory's lock: calls
    that may need the lock run in other threads (`_run_in_thread`).

    Args:
        shared_kv_memory_bytes: KV memory of all replicas on this device together, for a single model. `None`: this
            replica has `kv_memory_bytes` or `device_memory_bytes` of its own.
        pace: of the streams. `None`: they send every step.

    Raises:
        ConfigError, ModelError: the replica cannot start.
    """

    def __init__(
        self, shelf: ShelfConfig, shared_kv_memory_bytes: int | None = None, pace: StreamPace | None = None
    ) -> None:
        # Imported here, in the replica: Serve's controller and the process that builds the application import this
        # module, too, and would take seconds to import torch and transformers.
        from app.engine.load_report import MOST_KEYS
        from app.engine.model.device import resolve
        from app.engine.shelf.shelf import Shelf
        from app.serving.tp_actors import actors_of_this_replica

        configure_logs()
        keep_traces_whole()
        self._settings, self._first, self._is_shared = shelf, shelf.first.name, shelf.device_memory_bytes is not None
        self._most_keys = MOST_KEYS
        first = shelf.first.engine  # all models have the same device
        if first.device == "cuda" and len(ray.get_gpu_ids()) != 1:
            raise ConfigError(
                f"Ray gave this replica the GPUs {ray.get_gpu_ids()}, it needs one: ray_actor_options in the YAML must "
                "have num_gpus: 1, or be left out"
            )
        self._device = resolve(first).device
        if first.device == "auto" and self._device == "cuda" and not ray.get_gpu_ids():
            logger.warning("device auto is the CPU: Ray gave this replica no GPU")
            self._device = "cpu"
        self._audit = RoutingAudit()
        self._meter, self._shelf_meter = EngineMeter(), ShelfMeter()
        self._shared = SharedStreams()
        self._duplicates = DuplicateGuard()
        self._pace = pace or StreamPace(math.inf, min_interval_s=0.0, max_interval_s=0.0)
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        peers = partial(peer_prefixes, context.deployment, context.app_name)
        self._exit_timer: threading.Timer | None = None
        self._closing = False
        self._member: BudgetMember | None = None
        self._table = LoadedTable()  # that the engine has
        self._setting = asyncio.Lock()
        self._syncing: asyncio.Task[None] | None = None
        self._removals: set[asyncio.Task[None]] = set()
        self._tables: TableCopy | None = None
        if shelf.grows:
            self._tables = TableCopy(context.app_name)
            self._table = self._tables.fetch().beside(shelf.names)
        make_shelf = partial(
            Shelf,
            [self._on_device(model) for model in (*shelf.models, *self._table.models)],
            device_memory_bytes=shelf.device_memory_bytes,
            host_memory_bytes=shelf.host_memory_bytes,
            weights_dir=shelf.weights_dir,
            weights_dir_bytes=shelf.weights_dir_bytes,
            launch=actors_of_this_replica(),
            prefixes_of_others=peers,
            loaded=self._table.sources if not self._is_shared else (),
        )
        self._shelf: Shelf
        if shared_kv_memory_bytes is None:
            self._shelf = make_shelf()
        else:
            self._member = member = BudgetMember(shared_kv_memory_bytes, device_of_this_replica(self._device))
            try:
                member.wait_for_budget()
                self._shelf = make_shelf(admit=member.attach)
            except BaseException:
                member.close()
                raise
            [engine] = self._engines().values()
            member.follow(partial(engine.load, most_keys=0))
        for name in self._shelf.names if self._is_shared else ():
            self._shelf.model(name).loaded_adapters = self._adapters_of(name)
        self._ready_at = time.monotonic()
        gc.collect()  # as in the ingress: keep libraries' objects out of full collections
        gc.freeze()

    async def complete_as_stream(self, call: GenerateRequest | ForkCall) -> AsyncIterator[list[Piece]]:
        """The outputs, each in one piece, as a stream of one item: streams have heartbeats, and by value they end when
        their caller dies.

        Raises:
            UnknownRequestError: the request to fork is not here, or has ended.
        """
        async with aclosing(with_heartbeats(self._collected(call))) as items:
            async for item in items:
                yield item

    async def generate_stream(self, call: GenerateRequest | ForkCall) -> AsyncIterator[list[Piece] | int]:
        """The outputs as they are generated: a piece of each that has grown, as often as `StreamPace` allows. A number
        is that of the shared stream that carries all later pieces. Raises as `complete_as_stream`."""
        share = call.share if isinstance(call, GenerateRequest) else None
        async with (
            aclosing(self._pieces(call)) as lists,
            aclosing(with_heartbeats(self._shared.route_pieces(lists, share))) as items,
        ):
            async for item in items:
                yield item

    async def open_shared_stream(self, call: SharedStreamCall) -> AsyncIterator[list[Entry]]:
        """The shared stream of an ingress.

        Raises:
            UnknownRequestError: the call is for another replica.
        """
        if call.replica != self._name:
            raise UnknownRequestError(f"the replica {call.replica!r} is gone", "request_id")
        async with aclosing(with_heartbeats(self._shared.messages(call))) as messages:
            async for entries in messages:
                yield entries

    async def ready(self) -> None:
        """Return at once. Raises `UnavailableError` once the engine has stopped."""
        self._shelf.check()

    async def hosted_models(self) -> list[HostedModel]:
        """The state of each model. Raises `UnavailableError` once the engine has stopped."""
        self._shelf.check()
        engines = self._engines()
        return [
            HostedModel(status, engine.context_tokens if (engine := engines.get(status.name)) is not None else None)
            for status in self._shelf.statuses()
        ]

    async def max_model_len(self, model: str = "") -> int:
        """The model's context length, as far as there is memory. Raises as `_ready`."""
        return (await self._ready(model)).context_tokens

    async def pooling(self, model: str = "") -> ServedPooling:
        """The vectors that the model makes of prompts. Raises as `_ready`."""
        pooling = (await self._ready(model)).pooling
        return ServedPooling(None) if pooling is None else ServedPooling(pooling.kind, pooling.template)

    async def named_report(self) -> tuple[str, MemoryReport]:
        """The replica's name, with which its answers' ids end, and its KV memory, of all models together."""
        return self._name, (await _run_in_thread(partial(self._figures, 0))).memory

    async def status(self) -> ReplicaStatus:
        """The status for operators. Raises `UnavailableError` once the engine has stopped."""
        figures = await _run_in_thread(partial(self._figures, 0))
        ready_s = sum(engine.start_times.ready_s for engine in self._engines().values())
        return ReplicaStatus(
            self._name,
            figures.load,
            figures.memory,
            ready_s,
            {name: replace(load, keys=b"", changes=b"") for name, load in figures.loads.items()},
            figures.memories,
            self._shelf.statuses(),
        )

    async def look(self, call: WatchCall) -> ReplicaView:
        """This replica's part of the dashboard. Raises `UnavailableError` once the only engine has stopped."""
        device = self._shelf.device_status()
        if device is None:
            [(model, engine)] = self._engines().items()
            view = partial(view_replica, engine.watch, call, name=self._name, model=model, ready_at=self._ready_at)
            return await _run_in_thread(view)
        figures = await _run_in_thread(partial(self._figures, 0))
        watches = {name: engine.watch for name, engine in self._engines().items() if engine.healthy}
        shelf = ShelfView(self._shelf.statuses(), device, figures.load, figures.memory, watches)
        return await _run_in_thread(partial(view_shelf, shelf, call, name=self._name, ready_at=self._ready_at))

    async def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change the budget of this replica's KV cache (`KVMemory.set_budget`).

        Raises:
            RequestError: the budget is out of bounds, or follows the load because replicas share the device's memory.
        """
        if self._member is not None:
            raise RequestError(
                "budgets follow the load here: set shared_kv_memory_bytes of the application instead", "budget_bytes"
            )
        if self._is_shared:
            raise RequestError(
                "the models of a replica get their budgets from device_memory_bytes: set that instead", "budget_bytes"
            )
        [engine] = self._engines().values()
        return await _run_in_thread(partial(engine.set_budget, budget_bytes, revision))

    async def pin(
        self,
        name: str,
        prompt_token_ids: list[int],
        cache_salt: str | None,
        tenant: str | None = None,
        model: str = "",
    ) -> None:
        await (await self._ready(model)).pin(name, prompt_token_ids, cache_salt=cache_salt, tenant=tenant)

    async def unpin(self, name: str, model: str = "") -> None:
        """Unpin a prefix of a model. Raises `UnknownPinError`; loads nothing."""
        engine = self._shelf.model(model or self._first).engine
        if engine is None:
            raise UnknownPinError(f"no prefix is pinned as {name!r}: its model is not loaded here", "name")
        await _run_in_thread(partial(engine.unpin, name))

    async def check_adapter(self, name: str, path: str, model: str = "") -> AdapterSource:
        """Check an adapter of a model before it is loaded (`AsyncEngine.check_adapter`)."""
        return replace(await (await self._ready(model)).check_adapter(name, path), model=model)

    async def check_model(self, config: ModelConfig) -> CheckedModel:
        """Check a model before it is added. Raises `RequestError` if it cannot be served."""
        return CheckedModel(*await _run_in_thread(partial(check_added, config, self._settings)))

    async def set_loaded(self, table: LoadedTable) -> None:
        """Set the models and adapters added at run time, unless this replica has a newer table."""
        table = table.beside(self._settings.names)
        async with self._setting:
            if table.revision > self._table.revision:
                await self._set_models(table.models)
                self._table = table
                await self._set_adapters()
                names = ", ".join((*(model.name for model in table.models), *table.ids.values()))
                logger.info("models and adapters added at run time: %s", names or "none")

    async def hot_prefixes(self, fingerprint: str) -> HotPrefixes | None:
        """The prefixes that warm the cache of a new replica (`app.engine.startup.hot_prefixes`), of the model with this
        fingerprint; `None` if there is none."""
        for engine in self._engines().values():
            if await asyncio.to_thread(getattr, engine, "prefix_fingerprint") == fingerprint:
                return HotPrefixes(fingerprint, await _run_in_thread(engine.hot_prefixes))
        return None

    async def record_routing_stats(self) -> dict[str, Any]:
        """The load reports for routers. Serve calls this every report period; metrics are recorded here, too."""
        self._exit_if_stopped()
        if self._tables is not None and (self._syncing is None or self._syncing.done()):
            self._syncing = asyncio.create_task(self._sync_tables(self._tables))
        engines = self._engines()
        figures = await _run_in_thread(partial(self._figures, self._most_keys // max(len(engines), 1)))
        statuses = self._shelf.statuses()
        self._record(engines, figures, statuses)
        return reports_as_stats(reports_for_routers(figures.loads, statuses, self._shelf.device_status()))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load for `KVAwareScaling`. Called by Serve if the deployment has an `autoscaling_config`."""
        load, device = (await _run_in_thread(partial(self._figures, 0))).load, self._shelf.device_status()
        share = 0.0 if device is None else device.needed_bytes / device.capacity_bytes
        return AutoscalingLoad.from_report(load, share).as_metrics()

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica after three errors, or at once when its process has ended."""
        self._exit_if_stopped()
        self._shelf.check()
        if self._member is not None and not self._member.healthy and not self._closing:
            raise UnavailableError("the replica's budget can no longer change, see the log")

    def _engines(self) -> dict[str, AsyncEngine]:
        """The engines of the models that have been loaded."""
        return self._shelf.engines()

    async def _ready(self, model: str) -> AsyncEngine:
        """The engine of a model, once it has been loaded.

        Raises:
            UnknownModelError: there is no such model.
            OverloadedError: too many requests wait for it.
            UnavailableError: it cannot be loaded, or its engine has stopped.
        """
        engine = await self._shelf.model(model or self._first).ready()
        engine.check()
        return engine

    async def _set_models(self, models: Sequence[ModelConfig]) -> None:
        """Remove and add models, so that those added at run time are these."""
        kept = [model for model in self._table.models if model in models]
        for model in self._table.models:
            if model not in kept and model.name in self._shelf.names:
                removal = asyncio.create_task(self._shelf.remove(model.name))
                self._removals.add(removal)
                removal.add_done_callback(self._removals.discard)
                await asyncio.wait([removal], timeout=_ANSWER_S)  # its name is free at once
        for model in models:
            if model not in kept and model.name not in self._shelf.names:
                self._shelf.add(self._on_device(model))

    async def _set_adapters(self) -> None:
        """Give every model the adapters loaded at run time for it. One of several models whose engine has stopped gets
        them when it is loaded again."""
        names = self._shelf.names
        outcomes = await asyncio.gather(*map(self._set_adapters_of, names), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not (self._is_shared and isinstance(outcome, UnavailableError)):
                raise outcome

    async def _set_adapters_of(self, name: str) -> None:
        model = self._shelf.model(name)
        model.loaded_adapters = self._adapters_of(name)  # before the look at the engine, see `Control._load`
        if model.engine is not None:
            await model.engine.set_loaded(model.loaded_adapters)

    def _adapters_of(self, name: str) -> list[AdapterSource]:
        return [source for source in self._table.sources if (source.model or self._first) == name]

    def _on_device(self, model: ModelConfig) -> ModelConfig:
        return replace(model, engine=model.engine.on_device(self._device))

    def _figures(self, most_keys: int) -> _Figures:
        """Raises `UnavailableError` once the only engine has stopped. A model whose engine has stopped has the load of
        one that has not been loaded."""
        engines, loads, memories = self._engines(), {}, {}
        for status in self._shelf.statuses():
            engine = engines.get(status.name)
            try:
                if engine is not None:
                    loads[status.name], memory = engine.load(most_keys=most_keys), engine.report()
                    memories[status.name] = memory
                    continue
            except UnavailableError:
                if not self._is_shared:
                    raise
            loads[status.name] = unloaded_report(status, time.monotonic())
        return _Figures(loads, summed_load(list(loads.values())), summed_memory(list(memories.values())), memories)

    def _record(self, engines: Mapping[str, AsyncEngine], figures: _Figures, statuses: Sequence[ModelStatus]) -> None:
        """Record metrics, of the models by their names."""
        num_late: list[int] = []
        for name, load in figures.loads.items():
            engine, memory = engines.get(name), figures.memories.get(name)
            if engine is None or memory is None:
                self._meter.note_load(name, load)
                continue
            activity = engine.take_activity()
            num_late.append(activity.num_late_compilations)
            self._meter.note(name, load, memory, activity)
            self._meter.note_speculation(name, engine.speculation)
            self._meter.note_start(name, engine.start_times)
        # Compilations of a load are no late ones; each engine counts those of the process since its own load.
        if num_late and not any(status.state == "loading" for status in statuses):
            self._meter.note_compilations(min(num_late))
        if (device := self._shelf.device_status()) is not None:
            self._shelf_meter.note(statuses, device)

    def _exit_if_stopped(self) -> None:
        """End the process of a stopped engine soon: until then Serve sends requests that fail."""
        if not self._shelf.healthy and self._exit_timer is None and not self._closing:
            self._exit_timer = threading.Timer(_FLUSH_GRACE_S, os._exit, (1,))
            self._exit_timer.start()

    async def _sync_tables(self, copy: TableCopy) -> None:
        """Take over a change that this replica has missed."""
        try:
            await self.set_loaded(await copy.refresh())
        except UnavailableError:
            return  # the engine has stopped; the health check says so

    async def _collected(self, call: GenerateRequest | ForkCall) -> AsyncGenerator[list[Piece], None]:
        collector = PieceCollector(self._name)
        async with aclosing(self._deltas(call, lambda: math.inf)) as deltas:
            async for some in deltas:
                collector.hold(some)
        yield collector.held_pieces()

    async def _pieces(self, call: GenerateRequest | ForkCall) -> AsyncGenerator[list[Piece], None]:
        collector = PieceCollector(self._name)
        with self._pace.stream() as pace:
            async with aclosing(self._deltas(call, pace)) as deltas:
                async for some in deltas:
                    if pieces := collector.push(some):
                        yield pieces

    def _deltas(self, call: GenerateRequest | ForkCall, pace: Pace) -> AsyncGenerator[list[Delta], None]:
        if isinstance(call, GenerateRequest):
            return self._generated(call, pace)
        if call.replica != self._name:
            raise UnknownRequestError(f"the replica that had the request {call.fork_of!r} is gone", "request_id")
        engine = self._shelf.model(call.model or self._first).engine
        if engine is None:
            raise UnknownRequestError(f"there is no request {call.fork_of!r} here", "request_id")
        return engine.fork(
            call.fork_of,
            call.params,
            call.request_id,
            index=call.index,
            timeout_s=call.timeout_s,
            pace=pace,
            owner=call.owner,
        )

    async def _generated(self, request: GenerateRequest, pace: Pace) -> AsyncGenerator[list[Delta], None]:
        model = self._shelf.model(request.model or self._first)
        key, expected = request.repeat_key, request.expected
        if expected is not None and expected.replica != self._name:  # the expectation concerns another replica
            expected = None

        def generate(prompt: list[int], num_expected: int | None = None) -> AsyncGenerator[list[Delta], None]:
            return model.generate(
                prompt,
                request.params,
                request.request_id,
                priority=request.priority,
                cache_salt=request.cache_salt,
                adapter=request.adapter,
                tenant=request.tenant,
                user=request.user,
                timeout_s=request.timeout_s,
                turn=request.turn,
                cache_ttl_s=request.cache_ttl_s,
                expected_cached_tokens=num_expected,
                pooling=request.pooling,
                pace=pace,
                owner=request.owner,
            )

        def begin() -> AsyncGenerator[list[Delta], None]:
            first = generate(request.prompt_token_ids, None if expected is None else expected.cached_tokens)
            return pool_together([first, *map(generate, request.beside)]) if request.beside else first

        try:
            async with (
                nullcontext() if key is None else self._duplicates.exclusive(key),
                aclosing(traced(begin(), request.num_prompt_tokens)) as deltas,
            ):
                async for some in deltas:
                    if expected is not None and not some[0].index:
                        self._audit.note(expected.cached_tokens, some[0].num_cached_tokens)
                        expected = None
                    yield some
        except (OverloadedError, UnavailableError) as failure:
            error = self._of_model(failure, model) if self._is_shared else failure
            error.replica = self._name  # for the retry at another replica
            self._exit_if_stopped()
            if error is failure:
                raise
            raise error from failure

    def _of_model(
        self, failure: OverloadedError | UnavailableError, model: ShelvedModel
    ) -> OverloadedError | UnavailableError:
        """A failure of one of several models, with the time that its wake takes."""
        if isinstance(failure, UnavailableError):
            if not self._shelf.healthy:
                return failure
            return ModelUnavailableError(failure.message, failure.retry_after_s)
        wake_s = model.expected_wake_s
        if failure.retry_after_s is None or model.engine is None or not wake_s:  # `ready` counts the first load
            return failure
        seconds = failure.retry_after_s + wake_s
        later = OverloadedError(f"queue full while {model.name!r} wakes; try again in {max(seconds, 1):.0f} s", seconds)
        later.num_queued = failure.num_queued
        return later

    def __del__(self) -> None:
        if hasattr(self, "_shelf"):  # else the start failed
            self._closing = True
            self._shelf.close()
            if self._member is not None:
                self._member.close()


async def pool_together(streams: list[AsyncGenerator[list[Delta], None]]) -> AsyncGenerator[list[Delta], None]:
    """The deltas of several pooled requests, one of each, as outputs of one request."""
    num_unfinished = len(streams)
    async with aclosing(interleave(streams)) as lists:
        async for number, [delta] in lists:
            num_unfinished -= 1
            yield [replace(delta, index=number, num_unfinished=num_unfinished)]


async def _run_in_thread(call: Callable[[], T]) -> T:
    """Make a call in a thread. Raises `UnavailableError` after `_ANSWER_S`; the call may take effect all the same."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(call), _ANSWER_S)
    except TimeoutError:
        raise UnavailableError(f"the engine has not answered within {_ANSWER_S:.0f} s; ask again") from None
