"""Executor: the model on this rank, or on all ranks of a tensor-parallel group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from folio.app.config.engine import ResolvedConfig
from folio.app.config.machine import binding_variables, describe_threads, num_threads, unbind_thread
from folio.app.engine.device.charges import DeviceCharges, promised_bytes
from folio.app.engine.execution.builder import BatchBuilder
from folio.app.engine.execution.captured_graphs import CapturedGraphs, GraphPlan
from folio.app.engine.execution.decode_graphs import decode_buckets
from folio.app.engine.execution.graph import CAPTURES
from folio.app.engine.execution.model_runner import ModelRunner, ObservedLayers
from folio.app.engine.execution.planner import StepPlanner
from folio.app.engine.execution.work_queue import InlineQueue, ThreadQueue, WorkQueue
from folio.app.engine.layers.batch import StepPlan
from folio.app.engine.model.loader import load_model
from folio.app.engine.ranks.processes import LOAD_TIMEOUT_S, Launch, RankOrder, pack_arrays, pack_step
from folio.app.engine.ranks.rank_group import RankGroup
from folio.app.errors import ConfigError, FolioError, ModelError, UnavailableError
from folio.app.models.weights.arena import WeightArena
from folio.app.models.weights.store import WeightStore
from folio.kernels import KernelError, select_provider
from folio.vmem import DevicePages, KVMemory, MirroredBackend, ViewPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forward:
    """Results of a forward, on the device, which may still compute them.

    Attributes:
        logits: `[num_logits, vocab_size]`.
        sums: `[len(pooled), hidden_size]` float32, sums of hidden states; `None` if none were asked for.
    """

    logits: torch.Tensor
    sums: torch.Tensor | None


class Executor:
    """Runs forwards, on all ranks at the same time.

    When a forward of several ranks fails, their collectives no longer match: the peers are ended, and
    `UnavailableError` is raised from then on.

    Args:
        launch: starts the peers.
        weights: see `load_model`.

    Raises:
        ConfigError, ModelError: the model cannot be loaded; all resources are freed.
        KernelError: the configured kernels are not available.
        UnavailableError: a peer died.

    Attributes:
        ranks: the peers, `None` on one rank.
        planner: plans the steps over the bound memory.
        is_async: whether `launch` returns before the forward is computed.
        queue: where the device's work is submitted.
        graphs: captured steps over the bound memory; `None` if all steps are launched kernel by kernel.
    """

    def __init__(self, config: ResolvedConfig, launch: Launch, weights: WeightStore | None = None) -> None:
        if config.decode_graphs == "on" and config.device not in CAPTURES:
            raise ConfigError(
                f"decode_graphs is 'on' and device {config.device!r}; steps are captured on CUDA only: use "
                "decode_graphs 'auto'"
            )
        if binding := binding_variables():
            unbind_thread()
            logger.info("%s has bound this thread to one core; it may use all again", ", ".join(binding))
        torch.set_num_threads(num_threads(config))
        logger.info("%s", describe_threads(config))
        self._max_num_seqs = config.max_num_seqs
        self._limit_s: float | None = LOAD_TIMEOUT_S  # the first forwards may compile kernels
        on_cpu = config.device == "cpu"
        self.is_async = config.async_scheduling == "on" or (config.async_scheduling == "auto" and not on_cpu)
        self.queue: WorkQueue = ThreadQueue(num_threads(config)) if on_cpu and self.is_async else InlineQueue()
        self._arena: WeightArena | None = None
        self.graphs: CapturedGraphs | None = None
        self.ranks = RankGroup(config, launch) if config.tensor_parallel_size > 1 else None
        try:
            self._comm = comm = None if self.ranks is None else self.ranks.connect(torch.device(config.device))
            if self.ranks is None:
                self.model = load_model(config, weights=weights)
                self._arena = self.model.weights
            else:
                self.model = self.ranks.load(lambda: load_model(config, comm))
            self._runner = self._observe(config)
        except BaseException:
            self.close()
            raise

    def _observe(self, config: ResolvedConfig) -> ModelRunner:
        device, setting = self.model.module.device, config.decode_graphs
        provider = select_provider(config.attention, device, batch_invariant=config.batch_invariant)
        self._graph_plan: GraphPlan | None = None
        if self.ranks is None and setting != "off" and device.type in CAPTURES:
            capture = CAPTURES[device.type](device, provider)
            provider = capture.provider
            self._graph_plan = GraphPlan(
                decode_buckets(min(config.max_num_seqs, config.max_num_batched_tokens)),
                capture.new_pool(),
                # A pool of their own, because a failed capture makes its pool unusable.
                capture.new_pool() if config.mixed_graphs == "on" else None,
                # The queue's thread must not wait for the memory's other callers: they may wait for the queue.
                pauses=not isinstance(self.queue, ThreadQueue),
                required=setting == "on",
            )
        try:
            with self._on_peers(RankOrder.OBSERVE):
                return ModelRunner(self.model, provider)
        except UnavailableError as error:
            if error.__cause__ is None:  # a rank was lost
                raise
            if isinstance(error.__cause__, FolioError | KernelError):
                raise error.__cause__ from error
            raise ModelError(
                f"{config.model!r} cannot be run by {config.tensor_parallel_size} ranks: {error.__cause__}; "
                "see the logs of the other ranks"
            ) from error

    @property
    def layers(self) -> ObservedLayers:
        return self._runner.layers

    @property
    def captures(self) -> bool:
        """Whether decode steps are captured, unless the model cannot be."""
        return self._graph_plan is not None

    def run_largest(self, num_tokens: int, num_logits: int) -> torch.Tensor:
        """Logits `[num_logits, vocab_size]` of a step without a cache, on the device: see `ModelRunner.run_largest`."""
        sizes = np.array([num_tokens, num_logits], dtype=np.int64)
        with self._on_peers(RankOrder.LARGEST, pack_arrays([sizes])):
            return self._runner.run_largest(num_tokens, num_logits)

    def bind_memory(self, memory: KVMemory, pages: DevicePages | None = None) -> None:
        """Use this memory from now on. Graphs are charged to `pages`, of a shared device."""
        if self.ranks is not None:
            assert isinstance(memory.backend, MirroredBackend)
            self.ranks.command(RankOrder.OPEN, bytes([memory.backend.number]))
        self._runner.attach_caches(memory.tensors)
        if self._graph_plan is not None:
            charges = None if pages is None else DeviceCharges(pages, partial(promised_bytes, memory))
            self.graphs = self._runner.use_graphs(self._graph_plan, memory, charges)
        self._builder = BatchBuilder(memory.tensors, self.model.module.device, self._max_num_seqs)
        self.planner = StepPlanner(memory, self._builder, self._max_num_seqs)

    def capture_graphs(self, view: ViewPolicy) -> None:
        """Capture decode steps of the view that sequences have first, as many as fit. Raises `ModelError` if the
        settings require it and the model cannot be captured."""
        decode, mixed = self._runner.graphs, self._runner.mixed_graphs

        def capture() -> None:
            if decode is not None:
                decode.capture_all(view)
            if mixed is not None:
                mixed.capture_all()

        self.queue.submit(capture)()

    def run(self, plan: StepPlan, memory: KVMemory) -> torch.Tensor:
        """Logits `[num_logits, vocab_size]` of a step, on the CPU."""
        return self.launch(plan, memory)().logits.cpu()  # synchronises

    def launch(
        self,
        plan: StepPlan,
        memory: KVMemory,
        pooled: Sequence[slice] = (),
        sampled: Callable[[], torch.Tensor] | None = None,
    ) -> Callable[[], Forward]:
        """Submit a step; returns a function that waits until it is launched on the device, with all its ranks.

        Args:
            pooled: rows whose hidden states are added up.
            sampled: the previous step's sampled tokens, `[rows]` int64 on the device, called within the queue.
        """
        with ExitStack() as entered:
            entered.enter_context(self._on_peers(RankOrder.STEP, b"" if self.ranks is None else pack_step(plan)))
            on_peers = entered.pop_all()
        builder = self._builder
        builder.expected = plan.header.number

        def forward() -> Forward:
            with on_peers:
                batch = builder.build(plan)
                if sampled is not None and plan.pending.size:
                    batch.fill_pending(sampled())
                if self._comm is not None and plan.pending.size:  # only this rank samples
                    self._comm.broadcast(batch.token_ids)
                if pooled:
                    return Forward(*self._runner.run_pooled(batch, pooled))
                return Forward(self._runner.run(batch), None)

        try:
            return self.queue.submit(forward)
        finally:
            memory.launched()  # a part of a failed step may be running

    def own_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[num_tokens, vocab_size]` of one sequence by the model's own attention, on the CPU."""
        with self._on_peers(RankOrder.OWN_LOGITS, pack_arrays([token_ids.numpy().astype(np.int64)])):
            return self._runner.own_logits(token_ids)

    def rounded_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[num_tokens, vocab_size]` of one sequence without a cache: see `ModelRunner.rounded_logits`."""
        with self._on_peers(RankOrder.ROUNDED_LOGITS, pack_arrays([token_ids.numpy().astype(np.int64)])):
            return self._runner.rounded_logits(token_ids)

    def enforce_step_timeout(self) -> None:
        """Limit forwards to `step_timeout_s` from now on."""
        self._limit_s = None

    @property
    def available(self) -> bool:
        """Whether all ranks are alive."""
        return self.ranks is None or self.ranks.available

    def check_ranks(self) -> None:
        """Raise `UnavailableError` if a rank is lost."""
        if self.ranks is not None:
            self.ranks.check_alive()

    def close(self) -> None:
        """End the queue and the peers, and unmap the weights."""
        self.queue.close()
        if self.graphs is not None:
            self.graphs.release()
        if self.ranks is not None:
            self.ranks.close()
        if self._arena is not None:
            self._arena.close()

    def _on_peers(self, order: RankOrder, message: bytes = b"") -> AbstractContextManager[None]:
        """The peers execute an order while this rank does the same within the context."""
        return nullcontext() if self.ranks is None else self.ranks.step(bytes([order]) + message, self._limit_s)
