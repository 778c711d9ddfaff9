"""The engine replica: one engine in a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from functools import partial
from typing import Any, TypeVar

import ray
from ray import serve

from app.config.engine import EngineConfig
from app.engine import AsyncEngine, Delta
from app.engine.async_engine import Pace
from app.errors import ConfigError, OverloadedError, RequestError, UnavailableError, UnknownRequestError
from app.fleet.autoscaling import AutoscalingLoad
from app.fleet.messages import (
    ForkCall,
    GenerateRequest,
    HotPrefixes,
    Piece,
    PieceCollector,
    ReplicaFacts,
    ReplicaStatus,
    SharedStreamCall,
    report_as_stats,
)
from app.fleet.retry import DuplicateGuard
from app.fleet.streams import StreamPace, with_heartbeats
from app.logs import configure_logs
from app.serving.ledger import BudgetMember, device_of_this_replica
from app.serving.metrics import EngineMeter, ReadyGauge, RoutingAudit, SpeculationMeter
from app.serving.peers import PeerReplicas
from app.serving.shared_streams import Entry, SharedStreams
from app.serving.tp_actors import actors_of_this_replica
from vmem import BudgetAnswer, MemoryReport

# How long a replica without an engine stays, so that what it has answered gets out.
_FLUSH_GRACE_S = 1.0
# Figures and orders that an engine which hangs keeps for longer are given up.
_ANSWER_S = 5.0

T = TypeVar("T")


def _only_at_the_end() -> float:
    return math.inf


class EngineReplica:
    """Runs the model. Cancelling a call cancels its request and frees its pages.

    Its event loop, which all streams and Serve's health checks share, never waits for the memory's lock: what may have
    to is called in other threads (`_beside`).

    Args:
        shared_kv_memory_bytes: what it shares with the other replicas on its device, `kv_memory_bytes` of each. None:
            it has its own.
        pace: of its streams. None: they send every step.

    Raises:
        ConfigError, ModelError: the replica cannot start.
    """

    def __init__(
        self, config: EngineConfig, shared_kv_memory_bytes: int | None = None, pace: StreamPace | None = None
    ) -> None:
        configure_logs()
        if config.device == "cuda" and len(ray.get_gpu_ids()) != 1:
            raise ConfigError(
                f"Ray gave this replica the GPUs {ray.get_gpu_ids()}, it needs one: ray_actor_options in the YAML must "
                "have num_gpus: 1, or be left out"
            )
        self._audit = RoutingAudit()
        self._guesses = SpeculationMeter()
        self._meter = EngineMeter()
        self._ready = ReadyGauge()
        self._shared = SharedStreams()
        self._alone = DuplicateGuard()
        self._pace = pace or StreamPace(math.inf, min_interval_s=0.0, max_interval_s=0.0)
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        peers = PeerReplicas(context.deployment, context.app_name)
        self._leaving: threading.Timer | None = None
        self._closing = False
        self._member: BudgetMember | None = None
        if shared_kv_memory_bytes is None:
            self._engine = AsyncEngine(config, actors_of_this_replica(), prefixes_of_others=peers.prefixes)
        else:
            self._member = BudgetMember(shared_kv_memory_bytes, device_of_this_replica(config.device))
            self._engine = self._start_as(self._member, config, peers)
        gc.collect()  # as in the ingress: full collections shall leave libraries' objects out
        gc.freeze()

    async def generate(self, request: GenerateRequest) -> list[Piece]:
        """The outputs, each in one piece."""
        return await self._whole(self._deltas(request, _only_at_the_end))

    async def generate_at_once(self, request: GenerateRequest) -> AsyncIterator[list[Piece]]:
        """The same as a stream of one item, and signs of life until it comes, as all streams have them."""
        async with aclosing(with_heartbeats(_once(self.generate(request)))) as items:
            async for item in items:
                yield item

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[list[Piece] | int]:
        """The outputs as they are generated: a piece of each that has grown, as often as `StreamPace`
        allows. A number: that of the shared stream which has all that follow."""
        async with (
            aclosing(self._pieces(partial(self._deltas, request))) as lists,
            aclosing(with_heartbeats(self._shared.route_pieces(lists, request.share))) as items,
        ):
            async for item in items:
                yield item

    async def share(self, call: SharedStreamCall) -> AsyncIterator[list[Entry]]:
        """The shared stream of an ingress.

        Raises:
            UnknownRequestError: this is another replica.
        """
        if call.replica != self._name:
            raise UnknownRequestError(f"the replica {call.replica!r} is gone", "request_id")
        async with aclosing(with_heartbeats(self._shared.messages(call))) as messages:
            async for entries in messages:
                yield entries

    async def fork(self, call: ForkCall) -> list[Piece]:
        """More outputs of a request from where one of its outputs is, each in one piece.

        Raises:
            UnknownRequestError: it is not here, or not any more.
        """
        return await self._whole(self._forked(call, _only_at_the_end))

    async def fork_stream(self, call: ForkCall) -> AsyncIterator[list[Piece]]:
        """The same as they are generated."""
        async with aclosing(with_heartbeats(self._pieces(partial(self._forked, call)))) as lists:
            async for pieces in lists:
                yield pieces

    async def facts(self) -> ReplicaFacts:
        """Raises `UnavailableError` once the engine has stopped."""
        self._engine.check()
        return ReplicaFacts(self._engine.max_model_len)

    async def report(self) -> MemoryReport:
        """Where KV memory is now."""
        return await _run_in_thread(self._engine.report)

    async def named_report(self) -> tuple[str, MemoryReport]:
        """The same, and whose it is: the end of the ids of its answers."""
        return self._name, await self.report()

    async def check_integrity(self) -> None:
        """Audit the engine's books (`AsyncEngine.check_integrity`)."""
        await self._engine.check_integrity()

    async def status(self) -> ReplicaStatus:
        """What operators want to know. Raises `UnavailableError` once the engine has stopped."""
        load, report = await _run_in_thread(partial(self._engine.load, most_keys=0)), await self.report()
        return ReplicaStatus.from_reports(self._name, load, report, self._engine.start_times.ready_s)

    async def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change how much memory this replica's KV cache may take (`KVMemory.set_budget`).

        Raises:
            RequestError: the budget is out of bounds, or replicas that share a device's memory set it themselves.
        """
        if self._member is not None:
            raise RequestError(
                "budgets follow the load here: set shared_kv_memory_bytes of the application instead", "budget_bytes"
            )
        return await _run_in_thread(partial(self._engine.set_budget, budget_bytes, revision))

    async def pin(
        self, name: str, prompt_token_ids: list[int], cache_salt: str | None, tenant: str | None = None
    ) -> None:
        """Compute a prefix and keep it (`Engine.pin`)."""
        await self._engine.pin(name, prompt_token_ids, cache_salt=cache_salt, tenant=tenant)

    async def hot_prefixes(self) -> HotPrefixes:
        """What a new replica should have cached before it takes requests (`Engine.hot_prefixes`)."""
        prefixes = await _run_in_thread(self._engine.hot_prefixes)
        return HotPrefixes(await asyncio.to_thread(lambda: self._engine.prefix_fingerprint), prefixes)

    async def unpin(self, name: str) -> None:
        """Let a pinned prefix go."""
        await _run_in_thread(partial(self._engine.unpin, name))

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve, for `FolioRouter`s, every report; so counts are passed on to Prometheus here, too."""
        self._guesses.note(self._engine.speculation)
        self._ready.note(self._engine.start_times)  # again and again: Ray forgets a gauge 20 s after it was last set
        self._leave_if_stopped()
        load, report = await _run_in_thread(self._engine.load), await self.report()
        self._meter.note(load, report, self._engine.take_activity())
        return report_as_stats(load)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, if the deployment has an `autoscaling_config`: what `KVAwareScaling` needs to know."""
        return AutoscalingLoad.from_report(await _run_in_thread(partial(self._engine.load, most_keys=0))).as_metrics()

    def check_health(self) -> None:
        """Called by Serve. Three errors here replace the replica, and the end of its process does so at once."""
        self._leave_if_stopped()
        self._engine.check()
        if self._member is not None and not self._member.healthy and not self._closing:
            raise UnavailableError("the replica's budget can be changed no more, see the log")

    def _leave_if_stopped(self) -> None:
        """End the process of a stopped engine soon: until then it gets requests that it cannot answer."""
        if not self._engine.healthy and self._leaving is None and not self._closing:
            self._leaving = threading.Timer(_FLUSH_GRACE_S, os._exit, (1,))
            self._leaving.start()

    async def _deltas(self, request: GenerateRequest, pace: Pace) -> AsyncGenerator[list[Delta], None]:
        if request.repeat_key is None:
            turn: AbstractAsyncContextManager[None] = nullcontext()
        else:
            turn = self._alone.exclusive(request.repeat_key)
        try:
            async with turn, aclosing(self._computed(request, pace)) as deltas:
                async for some in deltas:
                    yield some
        except (OverloadedError, UnavailableError) as error:
            error.replica = self._name  # the request may be sent to another one
            self._leave_if_stopped()
            raise

    async def _computed(self, request: GenerateRequest, pace: Pace) -> AsyncGenerator[list[Delta], None]:
        expected = request.expected
        if expected is not None and expected.replica != self._name:  # it was to go elsewhere
            expected = None
        deltas = self._engine.generate(
            request.prompt_token_ids,
            request.params,
            request.request_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            tenant=request.tenant,
            user=request.user,
            timeout_s=request.timeout_s,
            expected_cached_tokens=expected.cached_tokens if expected is not None else None,
            pace=pace,
        )
        async with aclosing(deltas):
            async for some in deltas:
                if expected is not None:
                    self._audit.note(expected.cached_tokens, some[0].num_cached_tokens)
                    expected = None
                yield some

    async def _forked(self, call: ForkCall, pace: Pace) -> AsyncGenerator[list[Delta], None]:
        if call.replica != self._name:  # that one is gone
            raise UnknownRequestError(f"the replica that had the request {call.fork_of!r} is gone", "request_id")
        deltas = self._engine.fork(call.fork_of, call.params, call.request_id, index=call.index, pace=pace)
        async with aclosing(deltas):
            async for some in deltas:
                yield some

    async def _whole(self, deltas: AsyncGenerator[list[Delta], None]) -> list[Piece]:
        collector = PieceCollector(self._name)
        async with aclosing(deltas):
            async for some in deltas:
                collector.hold(some)
        return collector.held_pieces()

    async def _pieces(
        self, begin: Callable[[Pace], AsyncGenerator[list[Delta], None]]
    ) -> AsyncGenerator[list[Piece], None]:
        collector = PieceCollector(self._name)
        with self._pace.stream() as pace:
            async with aclosing(begin(pace)) as deltas:
                async for some in deltas:
                    if pieces := collector.push(some):
                        yield pieces

    @staticmethod
    def _start_as(member: BudgetMember, config: EngineConfig, peers: PeerReplicas) -> AsyncEngine:
        """Make the engine when there is memory for it; all is closed again if it cannot start."""
        try:
            member.wait_for_budget()
            engine = AsyncEngine(config, actors_of_this_replica(), member.attach, peers.prefixes)
            member.follow(partial(engine.load, most_keys=0))
        except BaseException:
            member.close()
            raise
        return engine

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # else it never started
            self._closing = True
            self._engine.close()
            if self._member is not None:
                self._member.close()


async def _once(item: Awaitable[T]) -> AsyncGenerator[T, None]:
    yield await item


async def _run_in_thread(call: Callable[[], T]) -> T:
    """What the call returns, which is made in a thread. Raises `UnavailableError` if it takes too long; it may be
    carried out all the same."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(call), _ANSWER_S)
    except TimeoutError:
        raise UnavailableError(f"the engine has not answered within {_ANSWER_S:.0f} s; ask again") from None
