"""Watch: records for live views of an engine: steps, blocks, and the requests that hold them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from folio.vmem import MemorySnapshot, SequenceSnapshot, take_snapshot

if TYPE_CHECKING:
    from folio.app.engine.request.request import Sequence
    from folio.app.engine.schedule.scheduler import Scheduler
    from folio.vmem import KVMemory, SequenceMemory

# Steps are recorded until this long after the last look, and at most this many are kept.
_WATCHED_S, _MOST_STEPS = 10.0, 4096
# Sequences, and parked regions of each layer group, in a detailed view.
_MOST_SEQUENCES = _MOST_PARKED = 24


class StepRecord(NamedTuple):
    """One step. `number` rises with time over all engines of a process; `at` is the step's end by `time.monotonic`;
    outputs are generated tokens; `queue_s` has the waiting times of requests that have begun since the step before."""

    number: int
    at: float
    seconds: float
    num_tokens: int
    num_outputs: int
    num_sequences: int
    num_waiting: int
    queue_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class WatchedSequence:
    """A sequence that has blocks, and the output of a request that it belongs to."""

    request_id: str
    index: int
    num_prompt_tokens: int
    num_cached_tokens: int
    memory: SequenceSnapshot


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine at one moment.

    Attributes:
        memory: `None` if the memory was busy for longer than a look may wait.
        sequences: the longest ones, in a detailed view.
    """

    memory: MemorySnapshot | None
    sequences: list[WatchedSequence]


class EngineWatch:
    """Views of one engine. Until the first look, and again `_WATCHED_S` after the last, a step costs one comparison.

    Args:
        memory, scheduler: the engine's.
    """

    def __init__(self, memory: KVMemory, scheduler: Scheduler) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._steps: deque[StepRecord] = deque(maxlen=_MOST_STEPS)
        self._queue_s: list[float] = []
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        """Whether a live view is open, so that steps are recorded."""
        return self._until > 0

    def note_begun(self, queue_s: float) -> None:
        """Record that a request begins, after its time in the queue. By the engine's thread."""
        self._queue_s.append(queue_s)

    def note_step(self, seconds: float, num_tokens: int, num_outputs: int, num_sequences: int) -> None:
        """Record a step that has just ended. By the engine's thread."""
        now, queue_s = time.monotonic(), tuple(self._queue_s)
        self._queue_s.clear()
        if now > self._until:
            self._until = 0.0
            self._steps.clear()
            return
        number, waiting = round(now * 1e6), self._scheduler.num_waiting
        step = StepRecord(number, now, seconds, num_tokens, num_outputs, num_sequences, waiting, queue_s)
        self._steps.append(step)

    def steps(self, since: int = 0) -> list[StepRecord]:
        """The steps after the one with this number. From any thread."""
        self._until = time.monotonic() + _WATCHED_S
        return [step for step in self._steps.copy() if step.number > since]

    def look(self, *, detailed: bool = False, wanted: Collection[str] = ()) -> EngineView:
        """A view of the engine now. From any thread; waits for the memory's lock for 20 ms at most.

        Args:
            detailed: with sequences and parked regions.
            wanted: ids of requests whose sequences are to be among them, however short they are.
        """
        owners: dict[int, Sequence] = {}
        chosen: list[SequenceMemory] = []
        if detailed:
            for sequence in self._scheduler.unfinished():
                if (memory := sequence.memory) is not None:
                    owners[id(memory)] = sequence
                    if sequence.request_id.rpartition("-")[0] in wanted:
                        chosen.append(memory)
        snapshot = take_snapshot(
            self._memory,
            most_sequences=_MOST_SEQUENCES if detailed else 0,
            most_parked=_MOST_PARKED if detailed else 0,
            wanted=chosen[:_MOST_SEQUENCES],
        )
        sequences = [
            WatchedSequence(
                owner.request_id.rpartition("-")[0],  # `AsyncEngine` numbers its callers' ids
                owner.index,
                len(owner.prompt_token_ids),
                owner.num_cached_tokens or 0,
                sequence,
            )
            for sequence in (() if snapshot is None else snapshot.sequences)
            if (owner := owners.get(id(sequence.memory))) is not None
        ]
        return EngineView(snapshot, sequences)
