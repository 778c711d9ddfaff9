"""Captured graphs of one model: capture, replay, release, and the memory that they take of a device.

A graph is captured when a step first needs it. It reads and writes fixed addresses: the buffers of its kind, and the
logits, which all graphs share. Memory counts as held from the capture until the release, or until the last graph that
needs it is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from folio.app.engine.device.charges import DeviceCharges
from folio.app.engine.execution.graph import CaptureError, Graph
from folio.app.errors import ModelError
from folio.kernels import note_compilation
from folio.vmem import KVMemory

logger = logging.getLogger(__name__)

# Most bytes of graphs and their buffers.
GRAPH_BYTES = 1 << 30
# A released graph is captured again after this many steps have wanted it. Capturing takes as long as launching about
# that many steps kernel by kernel, so that the total is at most twice that of the better choice.
STEPS_TO_RECAPTURE = 16

# "mixed" or the view of decode steps, and the bucket: a number of tokens.
GraphKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How steps are captured.

    Attributes:
        buckets: ascending numbers of sequences; the last one is the most rows of logits.
        new_graph: makes an empty graph of decode steps.
        new_mixed_graph: the same for steps with prompts; `None`: these are launched kernel by kernel.
        pauses: whether the mapper pauses during a capture. Capturing in one thread while another calls the driver's
            memory management is not documented to be safe, whatever the mode of the capture.
        required: raise an error, rather than launch kernel by kernel, if the model cannot be captured.
        budget_bytes: most bytes of all graphs and their buffers.
    """

    buckets: Sequence[int]
    new_graph: Callable[[], Graph]
    new_mixed_graph: Callable[[], Graph] | None = None
    pauses: bool = True
    required: bool = False
    budget_bytes: int = GRAPH_BYTES


class GraphKind(Protocol):
    """Graphs of one kind of steps, which share a pool.

    Attributes:
        setting: the setting that asks for them, and its value that allows steps that cannot be captured.
        steps: the name of these steps, for messages.
        new_graph: makes an empty graph.
    """

    setting: ClassVar[tuple[str, str]]
    steps: ClassVar[str]
    new_graph: Callable[[], Graph]

    @property
    def buffer_bytes(self) -> int:
        """Memory of the buffers. From any thread."""
        ...

    def describe(self, key: GraphKey) -> str:
        """The graph, for messages."""
        ...

    def capture(self, key: GraphKey, graph: Graph) -> object:
        """Capture the step, which writes `CapturedGraphs.write_logits`; returns what the graph reads and does not
        keep. Makes buffers that are missing. Raises as `Graph.capture`."""
        ...

    def drop_buffers(self, captured: Collection[GraphKey]) -> None:
        """Free buffers that none of these graphs needs."""
        ...


class CapturedGraphs:
    """The graphs of one model over one KV memory.

    Args:
        charges: charges to a device that other models share, for graphs and their buffers.

    Attributes:
        captured: graphs by key.
        num_bytes: memory of all graphs, and of failed ones in a pool that others keep.
        limit_bytes: current bound of `held_bytes`, beside the plan's.
        wanted_bytes: bytes of a graph that a step wanted, and for which a shared device had no memory.
    """

    def __init__(
        self, plan: GraphPlan, memory: KVMemory, device: torch.device, charges: DeviceCharges | None = None
    ) -> None:
        self._plan, self._memory, self._device, self._charges = plan, memory, device, charges
        self._kinds: list[GraphKind] = []
        self._refused: list[GraphKind] = []
        self._logits: torch.Tensor | None = None  # [largest bucket, vocab_size]
        self._read: dict[GraphKey, tuple[GraphKind, object]] = {}  # what graphs read, kept alive for them
        self._sizes: dict[GraphKey, int] = {}  # of graphs captured before
        self._to_wait: dict[GraphKey, int] = {}  # steps until a released graph is captured again
        self._capture_s = 0.0  # since the last release
        self.captured: dict[GraphKey, Graph] = {}
        self.num_bytes = self.wanted_bytes = 0
        self.limit_bytes = self._budget_bytes = plan.budget_bytes

    def add_kind(self, kind: GraphKind) -> None:
        self._kinds.append(kind)

    @property
    def held_bytes(self) -> int:
        """Memory of the device: graphs, and the buffers that they read and write. From any thread."""
        logits = self._logits
        return (
            self.num_bytes + sum(kind.buffer_bytes for kind in self._kinds) + (0 if logits is None else logits.nbytes)
        )

    @property
    def room_bytes(self) -> int:
        """Bound of `held_bytes`."""
        return min(self._budget_bytes, self.limit_bytes)

    def wants(self, kind: GraphKind, key: GraphKey) -> bool:
        """Whether the graph that a step wants exists; captures it now if need be.

        Raises:
            ModelError: the model cannot be captured, and the plan requires it.
        """
        if key not in self.captured and (left := self._to_wait.get(key, 0)):
            self._to_wait[key] = left - 1
            return False
        return self.capture(kind, key)

    def replay(self, key: GraphKey, num_rows: int) -> torch.Tensor:
        """Logits `[num_rows, vocab_size]`, valid until the next call."""
        self.captured[key].replay()
        assert self._logits is not None
        return self._logits[:num_rows]

    def write_logits(self, logits: torch.Tensor) -> None:
        """Within a capture: copy logits `[num_rows, vocab_size]` to where replays leave them."""
        if self._logits is None:  # when the work runs for the first time
            self._logits = logits.new_zeros(self._plan.buckets[-1], logits.shape[1])
        self._logits[: len(logits)].copy_(logits)

    def capture(self, kind: GraphKind, key: GraphKey) -> bool:
        """Capture a graph, unless it is there; False if it does not fit, or if the model cannot be captured. Raises
        `ModelError`, see `wants`."""
        if key in self.captured:
            return True
        self.wanted_bytes = 0
        expected = self._sizes.get(key, 0)
        fits = self.held_bytes + max(expected, 1) <= self.room_bytes
        if kind in self._refused or not fits or not self._take(expected, wanted=expected):
            return False
        began = time.perf_counter()
        try:
            return self._record(kind, key, expected)
        finally:
            self._settle()
            self._capture_s += time.perf_counter() - began

    def release(self) -> None:
        """Give the memory of all graphs back to the device. No step may be in flight. Graphs that are wanted later are
        captured again."""
        if self.captured:
            logger.info(
                "gave back %d graphs, %.1f MiB; capturing them took %.2f s",
                len(self.captured),
                self.held_bytes / 2**20,
                self._capture_s,
            )
        self._capture_s = 0.0
        self._to_wait |= dict.fromkeys(self.captured, STEPS_TO_RECAPTURE)
        self.captured.clear()
        self._read.clear()
        self.num_bytes = self.wanted_bytes = 0
        self._budget_bytes = self._plan.budget_bytes
        self._settle()

    @torch.inference_mode()
    def _record(self, kind: GraphKind, key: GraphKey, charged: int) -> bool:
        """See `capture`; `charged`: bytes charged for this graph already."""
        held_before, graph = self.held_bytes, kind.new_graph()
        try:
            with self._memory.mapper.paused() if self._plan.pauses else nullcontext():
                read = kind.capture(key, graph)
        except torch.OutOfMemoryError as error:
            self._keep_remains(kind, graph, charged)
            self._budget_bytes = held_before
            logger.warning("no memory for a %s; no more graphs are captured: %s", kind.describe(key), error)
            return False
        except CaptureError as error:
            self._refused.append(kind)
            self._keep_remains(kind, graph, charged)
            setting, otherwise = kind.setting
            if self._plan.required:
                raise ModelError(
                    f"{setting} is 'on', but {kind.steps} of this model cannot be captured: {error}; use {otherwise!r}"
                ) from error
            logger.warning("%s of this model cannot be captured; launching each kernel: %s", kind.steps, error)
            return False
        if key not in self._sizes:  # else it has been captured before
            note_compilation(kind.describe(key))
        self._sizes[key] = size = graph.num_bytes + self.held_bytes - held_before
        if not self._take(max(size - charged, 0), wanted=size):
            if self.captured:  # they may keep the graph's pool, for which there is no memory
                self.release()
            return False
        self._read[key], self.captured[key] = (kind, read), graph
        self.num_bytes += graph.num_bytes
        return True

    def _keep_remains(self, kind: GraphKind, graph: Graph, charged: int) -> None:
        """Count what a failed capture has left in a pool that other graphs keep; release them if there is no memory."""
        if any(other is kind for other, _ in self._read.values()):
            if self._take(max(graph.num_bytes - charged, 0), wanted=0):
                self.num_bytes += graph.num_bytes
            else:
                self.release()

    def _take(self, num_bytes: int, *, wanted: int) -> bool:
        """Charge memory to a shared device; if it has too little, note what is wanted, and return False."""
        if self._charges is None or self._charges.take(num_bytes):
            return True
        self.wanted_bytes = wanted
        return False

    def _settle(self) -> None:
        """Give back buffers and charges that no graph needs."""
        for kind in self._kinds:
            kind.drop_buffers(self.captured)
        if not self.captured:
            self._logits = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else torch keeps the pool of graphs that are gone
        if self._charges is not None:
            self._charges.give_back(self._charges.charged_bytes - self.held_bytes)
