"""The engine replica: one engine in a Ray Serve deployment, and its calls of peer replicas."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from app.config.engine import EngineConfig
from app.dashboard.views import ReplicaView, WatchCall, view_replica
from app.engine import Delta
from app.engine.lora.source import AdapterSource
from app.errors import ConfigError, OverloadedError, RequestError, UnavailableError, UnknownRequestError
from app.fleet.adapters import AdapterTable
from app.fleet.autoscaling import AutoscalingLoad
from app.fleet.messages import (
    ForkCall,
    GenerateRequest,
    HotPrefixes,
    Piece,
    PieceCollector,
    ReplicaStatus,
    ServedPooling,
    SharedStreamCall,
    report_as_stats,
)
from app.fleet.retry import DuplicateGuard
from app.fleet.streams import StreamPace, interleave, with_heartbeats
from app.logs import configure_logs
from app.serving.adapters import TableCopy
from app.serving.engine_metrics import EngineMeter, RoutingAudit
from app.serving.ledger import BudgetMember, device_of_this_replica
from app.serving.shared_streams import Entry, SharedStreams
from app.tracing import keep_traces_whole, traced
from vmem import BudgetAnswer, CachedPrefix, MemoryReport

if TYPE_CHECKING:
    from app.engine.async_engine import Pace

logger = logging.getLogger(__name__)

# Time for the last answers of a replica whose engine has stopped.
_FLUSH_GRACE_S = 1.0
# Bound of the calls that a hanging engine would never answer.
_ANSWER_S = 5.0
# Bound of the calls of peer replicas at the start, and the pause between two attempts.
PEER_TIMEOUT_S = 10.0
_PEER_RETRY_S = 0.1

T = TypeVar("T")


class EngineReplica:
    """Runs the model. Cancelling a call cancels its request and frees its memory.

    All streams and Serve's health checks share the event loop, which therefore never waits for the memory's lock: calls
    that may need the lock run in other threads (`_run_in_thread`).

    Args:
        shared_kv_memory_bytes: KV memory of all replicas on this device together. `None`: this replica has
            `kv_memory_bytes` of its own.
        pace: of the streams. `None`: they send every step.

    Raises:
        ConfigError, ModelError: the replica cannot start.
    """

    def __init__(
        self, config: EngineConfig, shared_kv_memory_bytes: int | None = None, pace: StreamPace | None = None
    ) -> None:
        # Imported here, in the replica: Serve's controller and the process that builds the application import this
        # module, too, and would take seconds to import torch and transformers.
        from app.engine import AsyncEngine
        from app.engine.model.device import resolve
        from app.serving.tp_actors import actors_of_this_replica

        configure_logs()
        keep_traces_whole()
        if config.device == "cuda" and len(ray.get_gpu_ids()) != 1:
            raise ConfigError(
                f"Ray gave this replica the GPUs {ray.get_gpu_ids()}, it needs one: ray_actor_options in the YAML must "
                "have num_gpus: 1, or be left out"
            )
        resolved = resolve(config)
        if config.device == "auto" and resolved.device == "cuda" and not ray.get_gpu_ids():
            logger.warning("device auto is the CPU: Ray gave this replica no GPU")
            resolved = config.on_device("cpu")
        config = resolved
        self._audit = RoutingAudit()
        self._meter = EngineMeter()
        self._shared = SharedStreams()
        self._duplicates = DuplicateGuard()
        self._pace = pace or StreamPace(math.inf, min_interval_s=0.0, max_interval_s=0.0)
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        peers = partial(peer_prefixes, context.deployment, context.app_name)
        self._exit_timer: threading.Timer | None = None
        self._closing = False
        self._member: BudgetMember | None = None
        self._table = AdapterTable()  # that the engine has
        self._setting = asyncio.Lock()
        self._syncing: asyncio.Task[None] | None = None
        self._adapters: TableCopy | None = None
        if config.adapter_dir is not None:
            self._adapters = TableCopy(context.app_name)
            self._table = self._adapters.fetch()
        loaded = self._table.sources
        launch = actors_of_this_replica()
        if shared_kv_memory_bytes is None:
            self._engine = AsyncEngine(config, launch, prefixes_of_others=peers, loaded=loaded)
        else:
            self._member = member = BudgetMember(shared_kv_memory_bytes, device_of_this_replica(config.device))
            try:
                member.wait_for_budget()
                self._engine = AsyncEngine(config, launch, member.attach, peers, loaded)
            except BaseException:
                member.close()
                raise
            member.follow(partial(self._engine.load, most_keys=0))
        self._model, self._ready_at = config.model, time.monotonic()
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

    async def max_model_len(self) -> int:
        """The model's context length. Raises `UnavailableError` once the engine has stopped."""
        self._engine.check()
        return self._engine.max_model_len

    async def pooling(self) -> ServedPooling:
        """The vectors that the model makes of prompts. Raises `UnavailableError` once the engine has stopped."""
        self._engine.check()
        pooling = self._engine.pooling
        return ServedPooling(None) if pooling is None else ServedPooling(pooling.kind, pooling.template)

    async def named_report(self) -> tuple[str, MemoryReport]:
        """The replica's name, with which its answers' ids end, and its KV memory."""
        return self._name, await _run_in_thread(self._engine.report)

    async def status(self) -> ReplicaStatus:
        """The status for operators. Raises `UnavailableError` once the engine has stopped."""
        load = await _run_in_thread(partial(self._engine.load, most_keys=0))
        memory = await _run_in_thread(self._engine.report)
        return ReplicaStatus(self._name, load, memory, self._engine.start_times.ready_s)

    async def look(self, call: WatchCall) -> ReplicaView:
        """This replica's part of the dashboard. Raises `UnavailableError` once the engine has stopped."""
        watch = self._engine.watch
        view = partial(view_replica, watch, call, name=self._name, model=self._model, ready_at=self._ready_at)
        return await _run_in_thread(view)

    async def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change the budget of this replica's KV cache (`KVMemory.set_budget`).

        Raises:
            RequestError: the budget is out of bounds, or follows the load because replicas share the device's memory.
        """
        if self._member is not None:
            raise RequestError(
                "budgets follow the load here: set shared_kv_memory_bytes of the application instead", "budget_bytes"
            )
        return await _run_in_thread(partial(self._engine.set_budget, budget_bytes, revision))

    async def pin(
        self, name: str, prompt_token_ids: list[int], cache_salt: str | None, tenant: str | None = None
    ) -> None:
        await self._engine.pin(name, prompt_token_ids, cache_salt=cache_salt, tenant=tenant)

    async def unpin(self, name: str) -> None:
        await _run_in_thread(partial(self._engine.unpin, name))

    async def check_adapter(self, name: str, path: str) -> AdapterSource:
        """Check an adapter before it is loaded (`AsyncEngine.check_adapter`)."""
        return await self._engine.check_adapter(name, path)

    async def set_adapters(self, table: AdapterTable) -> None:
        """Set the adapters loaded at run time, unless the engine has a newer table."""
        async with self._setting:
            if table.revision > self._table.revision:
                await self._engine.set_loaded(table.sources)
                self._table = table
                logger.info("adapters loaded at run time: %s", ", ".join(table.ids.values()) or "none")

    async def hot_prefixes(self) -> HotPrefixes:
        """The prefixes that warm the cache of a new replica (`app.engine.startup.hot_prefixes`)."""
        prefixes = await _run_in_thread(self._engine.hot_prefixes)
        return HotPrefixes(await asyncio.to_thread(lambda: self._engine.prefix_fingerprint), prefixes)

    async def record_routing_stats(self) -> dict[str, Any]:
        """The load report for routers. Serve calls this every report period; metrics are recorded here, too."""
        self._meter.note_speculation(self._engine.speculation)
        self._meter.note_start(self._engine.start_times)
        self._exit_if_stopped()
        if self._adapters is not None and (self._syncing is None or self._syncing.done()):
            self._syncing = asyncio.create_task(self._sync_adapters(self._adapters))
        load, memory = await _run_in_thread(self._engine.load), await _run_in_thread(self._engine.report)
        self._meter.note(load, memory, self._engine.take_activity())
        return report_as_stats(load)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load for `KVAwareScaling`. Called by Serve if the deployment has an `autoscaling_config`."""
        return AutoscalingLoad.from_report(await _run_in_thread(partial(self._engine.load, most_keys=0))).as_metrics()

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica after three errors, or at once when its process has ended."""
        self._exit_if_stopped()
        self._engine.check()
        if self._member is not None and not self._member.healthy and not self._closing:
            raise UnavailableError("the replica's budget can no longer change, see the log")

    def _exit_if_stopped(self) -> None:
        """End the process of a stopped engine soon: until then Serve sends requests that fail."""
        if not self._engine.healthy and self._exit_timer is None and not self._closing:
            self._exit_timer = threading.Timer(_FLUSH_GRACE_S, os._exit, (1,))
            self._exit_timer.start()

    async def _sync_adapters(self, copy: TableCopy) -> None:
        """Take over a change that this replica has missed."""
        try:
            await self.set_adapters(await copy.refresh())
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
        return self._engine.fork(
            call.fork_of,
            call.params,
            call.request_id,
            index=call.index,
            timeout_s=call.timeout_s,
            pace=pace,
            owner=call.owner,
        )

    async def _generated(self, request: GenerateRequest, pace: Pace) -> AsyncGenerator[list[Delta], None]:
        key, expected = request.repeat_key, request.expected
        if expected is not None and expected.replica != self._name:  # the expectation concerns another replica
            expected = None

        def generate(prompt: list[int], num_expected: int | None = None) -> AsyncGenerator[list[Delta], None]:
            return self._engine.generate(
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
        except (OverloadedError, UnavailableError) as error:
            error.replica = self._name  # for the retry at another replica
            self._exit_if_stopped()
            raise

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # else the start failed
            self._closing = True
            self._engine.close()
            if self._member is not None:
                self._member.close()


async def pool_together(streams: list[AsyncGenerator[list[Delta], None]]) -> AsyncGenerator[list[Delta], None]:
    """The deltas of several pooled requests, one of each, as outputs of one request."""
    num_unfinished = len(streams)
    async with aclosing(interleave(streams)) as lists:
        async for number, [delta] in lists:
            num_unfinished -= 1
            yield [replace(delta, index=number, num_unfinished=num_unfinished)]


def peer_prefixes(deployment: str, app_name: str, fingerprint: str) -> list[Sequence[CachedPrefix]]:
    """The hot prefixes (`EngineReplica.hot_prefixes`) of each running replica of a deployment that has this
    fingerprint, for one that starts. Errors of peers are logged and never prevent the start. For threads without an
    event loop."""
    try:
        if not _num_running(deployment, app_name):  # the first replica would wait for peers until the timeout
            return []
        answers = _broadcast(deployment, app_name, "hot_prefixes")
    except Exception as error:  # any: the deployment may just have gone, and the start goes on
        name = type(error).__name__
        logger.warning("peer replicas cannot be asked for hot prefixes: %s: %s", name, error, exc_info=True)
        return []
    found: list[Sequence[CachedPrefix]] = []
    num_others = 0
    for answer in answers:
        if isinstance(answer, Exception):
            logger.warning("no hot prefixes from a peer replica: %s", answer)
        elif isinstance(answer, HotPrefixes) and answer.fingerprint == fingerprint:
            found.append(answer.prefixes)
        else:  # token ids may have other meanings there
            num_others += 1
    if num_others:
        logger.info("%d peer replicas have another model or version; their prefixes are not restored", num_others)
    return found


def _num_running(deployment: str, app_name: str) -> int:
    application = serve.status().applications.get(app_name)
    if application is None or deployment not in application.deployments:
        return 0
    states: Any = application.deployments[deployment].replica_states
    return int(states.get("RUNNING", 0))


def _broadcast(deployment: str, app_name: str, method: str) -> list[Any]:
    """Every running replica's answer or exception."""
    # `serve.get_deployment_handle` would keep the handle, and its router would read all load reports for ever.
    handle: DeploymentHandle[Any] = DeploymentHandle(deployment, app_name)
    deadline = time.monotonic() + PEER_TIMEOUT_S
    try:
        while True:
            try:
                left_s = max(deadline - time.monotonic(), 0.0)
                return list(handle.broadcast(method).results(timeout_s=left_s, return_exceptions=True))
            except DeploymentUnavailableError:  # a new handle does not know any replica yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PEER_RETRY_S)
    finally:
        handle.shutdown()


async def _run_in_thread(call: Callable[[], T]) -> T:
    """Make a call in a thread. Raises `UnavailableError` after `_ANSWER_S`; the call may take effect all the same."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(call), _ANSWER_S)
    except TimeoutError:
        raise UnavailableError(f"the engine has not answered within {_ANSWER_S:.0f} s; ask again") from None
