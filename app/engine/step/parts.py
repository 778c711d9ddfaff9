"""Parts of an engine: model, memory, schedule and output, made in this order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import cache, partial

from folio.app.config.engine import EngineConfig
from folio.app.engine.device.charges import DeviceCharges
from folio.app.engine.device.shared_device import SharedDevice
from folio.app.engine.execution.work_queue import ThreadQueue
from folio.app.engine.lora.source import AdapterSource
from folio.app.engine.memory.footprint import Footprint
from folio.app.engine.memory.kv_plan import build_memory
from folio.app.engine.memory.kv_store import open_handover, open_kept, open_store
from folio.app.engine.memory.memory_profile import DevicePlan, plan_device
from folio.app.engine.model.device import resolve
from folio.app.engine.model.fingerprints import fingerprints
from folio.app.engine.model.vocabulary import Vocabulary
from folio.app.engine.ranks.adapter_store import AdapterStore
from folio.app.engine.ranks.executor import Executor
from folio.app.engine.ranks.processes import Launch
from folio.app.engine.ranks.self_test import self_test
from folio.app.engine.report import StartTimes, process_age_s
from folio.app.engine.request.faults import kernel_errors_as_config_errors
from folio.app.engine.request.request import Request
from folio.app.engine.schedule.load_report import LoadMeter, LoadReporter
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.engine.schedule.read_ahead import ReadAhead
from folio.app.engine.schedule.scheduler import Scheduler
from folio.app.engine.speculation import Speculation
from folio.app.engine.step.decoding import Decoder
from folio.app.engine.step.intake import RequestValidator, fit_context
from folio.app.engine.step.pooler import Pooler
from folio.app.engine.step.step_loop import StepLoop
from folio.app.engine.step.token_selection import TokenChooser
from folio.app.engine.step.watch import EngineWatch
from folio.app.errors import ConfigError
from folio.vmem import DevicePages, KVMemory, OutOfPages, VmemError

Admit = Callable[[KVMemory, DevicePlan | None], None]


class EngineParts:
    """The parts of an `Engine`, which describes arguments, attributes and errors.

    Args:
        undo: closes the parts, in reverse.
    """

    def __init__(
        self,
        config: EngineConfig,
        launch: Launch,
        admit: Admit | None,
        loaded: Collection[AdapterSource],
        device: SharedDevice | None,
        undo: ExitStack,
    ) -> None:
        self.start_times = StartTimes(process_s=process_age_s())
        self.config = resolve(config)
        pages = None if device is None else device.pages
        with kernel_errors_as_config_errors():
            self._load_models(launch, device, undo)
            self._open_memory(admit, pages, undo)
            self._make_schedule(loaded, pages, undo)
            self._make_output(waits=device is not None)

    def _load_models(self, launch: Launch, device: SharedDevice | None, undo: ExitStack) -> None:
        """Load the model on all ranks, and a draft model."""
        weights = None if device is None else device.weights
        self.executor = executor = Executor(self.config, launch, weights)
        undo.callback(executor.close)
        self.model = executor.model
        self.start_times.lap("model_s")
        self.speculation = Speculation.load(self.config, self.model, executor.layers, weights)
        models, self._share = [self.model], 1.0  # the model's share of the KV budget
        if self.speculation is not None:
            undo.callback(self.speculation.close)
            models += self.speculation.models
            self._share = self.speculation.memory_share
        self._arenas = [model.weights for model in models if model.weights is not None]
        self._plan = plan_device(self.config, executor) if device is None else None

    def _open_memory(self, admit: Admit | None, pages: DevicePages | None, undo: ExitStack) -> None:
        """Take the KV memory, and a draft model's, and test the kernels that read it."""
        config, executor, plan, queue = self.config, self.executor, self._plan, self.executor.queue
        try:
            self.memory = build_memory(
                config,
                self.model,
                executor.layers,
                executor.ranks,
                share=self._share,
                plan=plan,
                queue=queue if isinstance(queue, ThreadQueue) else None,
                pages=pages,
                most_bytes=None if pages is None else pages.capacity_bytes - sum(a.num_bytes for a in self._arenas),
            )
        except VmemError as error:
            if pages is not None and isinstance(error, OutOfPages):
                raise  # other models have the memory now
            raise ConfigError(f"these settings do not work here: {error}") from error
        undo.callback(self.memory.close)
        undo.callback(queue.wait_until_idle)
        self.start_times.lap("memory_s")
        if admit is not None:
            admit(self.memory, plan)
            self.start_times.lap("budget_s")
        self.max_model_len = fit_context(config, self.model, self.memory)
        self_test(executor, self.memory.groups, config.kv_view, batch_invariant=config.batch_invariant)
        executor.bind_memory(self.memory, pages)
        executor.enforce_step_timeout()
        self.start_times.lap("self_test_s")
        self._open_stores(pages, undo)
        draft, every = None, [executor.graphs]
        if self.speculation is not None:
            self.speculation.open(self.max_model_len, lambda: self.recovery.step_times, plan, pages)
            draft = self.speculation.memory
            every.append(self.speculation.graphs)
        graphs = [captured for captured in every if captured is not None]
        own_bytes = 0 if plan is None else plan.weight_bytes
        self.footprint = Footprint(self.memory, draft, self._share, self._arenas, graphs, own_bytes, self._kept)

    def _open_stores(self, pages: DevicePages | None, undo: ExitStack) -> None:
        """Open what has prefixes that are not cached: in host memory, on disk, in other processes."""
        config, self._kept = self.config, None
        self.recovery = PreemptionCostModel(config.max_num_batched_tokens)
        if pages is not None and self.memory.prefixes.enabled:
            self._kept = open_kept(self.memory, self.recovery.is_worth_swap)
            undo.callback(self._kept.close)
        self.store = open_store(config, self.model, self.memory, self._kept)
        if self.store is not None:
            undo.callback(self.store.close)
            self.start_times.lap("store_s")
        self.fingerprints = cache(partial(fingerprints, config, self.model))
        self.handover = open_handover(config, self.memory, lambda: self.fingerprints().outputs)
        if self.handover is not None:
            undo.callback(self.handover.close)

    def _make_schedule(self, loaded: Collection[AdapterSource], pages: DevicePages | None, undo: ExitStack) -> None:
        """Make the scheduler, the adapters that requests wait for, load reports and live views."""
        config, receiver = self.config, None if self.handover is None else self.handover.receiver
        self.scheduler = Scheduler(
            self.memory,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            view=config.kv_view,
            recovery=self.recovery,
            policy=config.preemption,
            fair_tenants=config.fair_tenants,
            max_mixed_step_s=math.inf if config.max_mixed_step_s is None else config.max_mixed_step_s,
            reads=ReadAhead(self._kept, self.store, receiver, self.recovery),
        )
        self.adapters = AdapterStore(
            config.adapters,
            self.model.adapters,
            config.max_loaded_adapters,
            self.executor.ranks,
            self.scheduler,
            loaded,
            None if pages is None else DeviceCharges(pages),
        )
        undo.callback(self.adapters.close)
        self._meter = LoadMeter()
        self.load = LoadReporter(
            self.memory,
            self.scheduler,
            self.recovery,
            self._meter,
            step_tokens=config.max_num_batched_tokens,
            most_queued=config.max_queued_requests,
            held=lambda: self.adapters.waiting_sequences,
            store=None if self.store is None else self.store.counts,
            receiver=receiver,
        )
        self.watch = EngineWatch(self.memory, self.scheduler)

    def _make_output(self, *, waits: bool) -> None:
        """Make the parts that turn requests into steps, and steps into tokens and deltas."""
        config = self.config
        self.requests: dict[str, Request] = {}
        self.vocabulary = Vocabulary(self.model)
        self.intake = RequestValidator(
            self.model,
            self.memory,
            self.vocabulary,
            self.scheduler,
            isolate_tenants=config.isolate_tenants,
            max_cache_ttl_s=config.max_cache_ttl_s,
        )
        self.chooser = TokenChooser()
        self.decoder = Decoder(
            self.memory, self.scheduler, self.vocabulary, self.requests, self._meter, self.speculation
        )
        self.pooler = None if self.model.pooling is None else Pooler(self.model.pooling, self.decoder)
        self._steps = StepLoop(
            self.executor,
            self.memory,
            self.scheduler,
            self.chooser,
            self.decoder,
            self.adapters,
            self.pooler,
            self.speculation,
            self.recovery,
            self.requests,
            self._meter,
            self.watch,
            config.max_num_batched_tokens,
            waits,
        )
