"""The engine replica: a shelf of models in a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ray import serve
from ray.util import get_node_ip_address

from folio.app.config.added_model import check_added
from folio.app.config.logs import configure_logs
from folio.app.config.shelf import ModelConfig, ShelfConfig
from folio.app.dashboard.views import ReplicaView, WatchCall, view_replica
from folio.app.engine.lora.source import AdapterSource
from folio.app.engine.report import Progress
from folio.app.errors import RequestError, UnavailableError, UnknownPinError, UnknownRequestError
from folio.app.fleet.autoscaling import AutoscalingLoad
from folio.app.fleet.loaded import LoadedTable
from folio.app.fleet.messages import (
    CheckedModel,
    ForkCall,
    GenerateRequest,
    HostedModel,
    HotPrefixes,
    Piece,
    ServedPooling,
    SharedStreamCall,
    reports_as_stats,
)
from folio.app.fleet.shelf_load import reports_for_routers
from folio.app.fleet.status import ReplicaStatus
from folio.app.fleet.streams import BEAT_S, PROGRESS_S, StreamPace, with_heartbeats
from folio.app.replica.additions import ShelfAdditions
from folio.app.replica.figures import replica_status
from folio.app.replica.prefill import pieces_here
from folio.app.replica.request_streams import RequestStreams
from folio.app.serving.engine_metrics import ReplicaMeter, RoutingAudit
from folio.app.serving.ledger import BudgetMember, member_of_this_replica
from folio.app.serving.loaded import TableCopy
from folio.app.serving.peers import LOADING_TIMEOUT_S, STARTING_TIMEOUT_S, peer_prefixes
from folio.app.serving.shared_streams import Entry, SharedStreams
from folio.app.tracing import keep_traces_whole
from folio.vmem import BudgetAnswer

if TYPE_CHECKING:
    from folio.app.engine.async_engine import AsyncEngine
    from folio.app.shelf.shelf import Shelf

logger = logging.getLogger(__name__)

# Time for the last answers of a replica whose engine has stopped.
_FLUSH_GRACE_S = 1.0
# Longest time in which engines are closed: a load in progress is waited for, and one that hangs ends with the process.
_CLOSE_S = 60.0
# Timeout of calls that a hanging engine would never answer.
_ANSWER_S = 5.0

T = TypeVar("T")
ReplicaItem: TypeAlias = list[Piece] | GenerateRequest | int | str | Progress


class _ProcessExit:
    """Ends the process soon after an engine has stopped or a load hangs: until then its requests fail."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._timer: threading.Timer | None = None
        self.is_expected = False  # engines are being closed

    def if_stopped(self) -> None:
        """Called at each sign of a stopped engine; ends the process once."""
        if self._timer is not None or self.is_expected:
            return
        try:
            self._shelf.check()
        except UnavailableError as reason:
            logger.error("the process ends, and Serve starts another one: %s", reason)
            self._timer = _ending(_FLUSH_GRACE_S)


def _ending(seconds: float) -> threading.Timer:
    """Ends the process after this time, unless it is cancelled."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.start()
    return timer


class EngineReplica:
    """Runs the models of a shelf. Cancelling a call cancels its request and frees its memory. An empty `model` means
    the first one. Methods with a `model` load it first where that is necessary.

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
        # Imports of seconds, not for Serve's controller and the application's builder, which import this module, too.
        self._begun_at, self._is_draining = time.monotonic(), False
        gc.disable()  # a million objects come to stay, which need no collections
        from folio.app.engine.schedule.load_report import MOST_KEYS
        from folio.app.serving.tp_actors import actors_of_this_replica, device_of_this_replica
        from folio.app.shelf.shelf import Shelf

        gc.enable()
        configure_logs()
        keep_traces_whole()
        self._settings, self._first, self._most_keys = shelf, shelf.first.name, MOST_KEYS
        self._device = device_of_this_replica(shelf.first.engine)  # all models have the same device
        self._shared = SharedStreams()
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        timeout_s = STARTING_TIMEOUT_S if shelf.device_memory_bytes is None else LOADING_TIMEOUT_S
        peers = partial(peer_prefixes, context.deployment, context.app_name, timeout_s)
        self._member: BudgetMember | None = None
        copy = TableCopy(context.app_name) if shelf.grows else None
        table = LoadedTable() if copy is None else copy.fetch().beside(shelf.names)
        make_shelf = partial(
            Shelf,
            [model.on_device(self._device) for model in (*shelf.models, *table.models)],
            device_memory_bytes=shelf.device_memory_bytes,
            host_memory_bytes=shelf.host_memory_bytes,
            weights_dir=shelf.weights_dir,
            weights_dir_bytes=shelf.weights_dir_bytes,
            launch=actors_of_this_replica(),
            prefixes_of_others=peers,
            loaded=table.sources,
        )
        self._shelf: Shelf = self._open_shelf(make_shelf, shared_kv_memory_bytes)
        self._exit = _ProcessExit(self._shelf)
        if self._member is not None:
            [engine] = self._shelf.engines().values()
            self._member.follow(partial(engine.load, most_keys=0))
        self._meter = ReplicaMeter()
        self._status = partial(replica_status, self._shelf, self._name, get_node_ip_address())
        self._additions = ShelfAdditions(
            shelf, self._shelf, table, None if copy is None else copy.refresh, self._device
        )
        pace = pace or StreamPace(math.inf, min_interval_s=0.0, max_interval_s=0.0)
        if self._device == "cuda":
            pace.use_free_cores()
        self._requests = RequestStreams(
            self._shelf,
            self._first,
            self._additions.model,
            replica=self._name,
            pace=pace,
            note_cached=RoutingAudit().note,
            on_failure=self._exit.if_stopped,
        )
        self._ready_at = time.monotonic()
        gc.collect()  # as in the ingress: keep libraries' objects out of full collections
        gc.freeze()

    def _open_shelf(self, make: Callable[..., Shelf], shared_kv_memory_bytes: int | None) -> Shelf:
        """Make the shelf, with a part of the memory that replicas of one device share."""
        if shared_kv_memory_bytes is None:
            return make()
        self._member = member = member_of_this_replica(shared_kv_memory_bytes, self._device)
        try:
            member.wait_for_budget()
            return make(admit=member.attach)
        except BaseException:
            member.close()
            raise

    async def generate_stream(self, call: GenerateRequest | ForkCall) -> AsyncIterator[ReplicaItem]:
        """The outputs as they are generated: `pieces_here`. A number is that of the shared stream with all
        later pieces, a string this replica's name, when the first piece is late. Also for whole answers: unlike a plain
        one, a stream has heartbeats, and it ends with its caller (if sent by value, see `folio.app.compat.ray`).

        Raises:
            UnknownRequestError: the request to fork is not here, or has ended.
        """
        beat_s, beat = BEAT_S, None
        share, late = (call.share, self._name) if isinstance(call, GenerateRequest) else (None, None)
        if isinstance(call, GenerateRequest) and call.shows_progress:
            beat_s, beat = PROGRESS_S, partial(asyncio.to_thread, self._requests.progress, call)
        async with (
            aclosing(pieces_here(self._requests, call, self._name)) as lists,
            aclosing(with_heartbeats(self._shared.route_pieces(lists, share), beat_s, beat, late)) as items,
        ):
            async for item in items:
                yield item

    async def has_output(self, model: str, request_id: str, index: int) -> tuple[str, bool]:
        """This replica's name, and whether a fork can continue that output here."""
        return self._name, self._requests.has_output(model, request_id, index)

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
        engines = self._shelf.engines()
        return [
            HostedModel(status, engine.context_tokens if (engine := engines.get(status.name)) is not None else None)
            for status in self._shelf.statuses()
        ]

    async def max_model_len(self, model: str = "") -> int:
        """The model's context length, or less where the memory is too small for it. Raises as `_ready`."""
        return (await self._ready(model)).context_tokens

    async def pooling(self, model: str = "") -> ServedPooling:
        """The vectors that the model makes of prompts. Raises as `_ready`."""
        pooling = (await self._ready(model)).pooling
        return ServedPooling(None) if pooling is None else ServedPooling(pooling.kind, pooling.template)

    async def status(self) -> ReplicaStatus:
        """The status for operators. Raises `UnavailableError` once the only engine has stopped."""
        return await _run_in_thread(self._status)

    async def look(self, call: WatchCall) -> ReplicaView:
        """This replica's part of the dashboard. Raises `UnavailableError` once the only engine has stopped."""
        status = await self.status()
        watches = {name: engine.watch for name, engine in self._shelf.engines().items() if engine.healthy}
        of_replica = self._ready_at, self._is_draining
        return await _run_in_thread(partial(view_replica, status, watches, call, *of_replica))

    async def set_draining(self, replica: str, draining: bool) -> bool:
        """Have routers move this replica's calls to others, if it is the one that is meant; returns whether it is."""
        if replica == self._name:
            self._is_draining = draining
        return replica == self._name

    async def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change the budget of this replica's KV cache (`KVMemory.set_budget`).

        Raises:
            RequestError: the budget is out of bounds, or follows the load because replicas share the device's memory.
        """
        if self._member is not None:
            raise RequestError(
                "budgets follow the load here: set shared_kv_memory_bytes of the application instead", "budget_bytes"
            )
        return await _run_in_thread(partial(self._shelf.set_budget, budget_bytes, revision))

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
        engine = (await self._additions.model(model)).engine
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
        await self._additions.adopt(table)

    async def hot_prefixes(self, fingerprint: str) -> HotPrefixes | None:
        """The prefixes that warm the cache of a new replica (`folio.app.engine.startup.hot_prefixes`), of the
        model with this fingerprint; `None` if there is none."""
        for engine in self._shelf.engines().values():
            if (await asyncio.to_thread(getattr, engine, "fingerprints")).prefixes == fingerprint:
                return HotPrefixes(fingerprint, await _run_in_thread(engine.hot_prefixes))
        return None

    async def record_routing_stats(self) -> dict[str, Any]:
        """The load reports for routers. Serve calls this every report period; metrics are recorded here, too."""
        self._exit.if_stopped()
        self._additions.refresh()
        engines = self._shelf.engines()
        most_keys = self._most_keys // max(len(engines), 1)
        status = await _run_in_thread(partial(self._status, most_keys=most_keys))
        self._meter.note(status, engines)
        reports, start_s = reports_for_routers(status.models, status.device), self._ready_at - self._begun_at
        return reports_as_stats(reports, status.outputs, start_s, self._is_draining)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load for `KVAwareScaling`. Called by Serve if the deployment has an `autoscaling_config`."""
        status = await self.status()
        return AutoscalingLoad.from_report(status.load, status.device).as_metrics()

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica after three errors, or at once when its process has ended."""
        self._exit.if_stopped()
        self._shelf.check()
        if self._member is not None and not self._member.healthy and not self._exit.is_expected:
            raise UnavailableError("the replica's budget can no longer change, see the log")

    async def _ready(self, model: str) -> AsyncEngine:
        """The engine of a model, once it has been loaded.

        Raises:
            UnknownModelError: there is no such model.
            OverloadedError: too many requests wait for it.
            UnavailableError: it has not reached this replica, it cannot be loaded, or its engine has stopped.
        """
        engine = await (await self._additions.model(model)).ready()
        engine.check()
        return engine

    def __del__(self) -> None:
        if hasattr(self, "_exit"):  # else the start failed
            self._exit.is_expected = True
            ending = _ending(_CLOSE_S)
            try:
                self._shelf.close()
                if self._member is not None:
                    self._member.close()
            finally:
                ending.cancel()


async def _run_in_thread(call: Callable[[], T]) -> T:
    """Make a call in a thread. Raises `UnavailableError` after `_ANSWER_S`; the call may still take effect."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await asyncio.to_thread(call)
    except TimeoutError:
        raise UnavailableError(f"the engine has not answered within {_ANSWER_S:.0f} s; ask again") from None
