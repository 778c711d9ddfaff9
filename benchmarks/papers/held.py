"""What requests hold of a KV memory over time: PagedAttention's figures 2, 13 and 15."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.reserved import ReservedAdmission
from folio.app.engine.schedule.scheduler import Scheduler
from folio.vmem import KVMemory


@dataclass(slots=True)
class Shares:
    """Shares of the KV memory, whose sum is 1.

    Attributes:
        state: tokens whose keys and values are computed.
        reserved: held for tokens that a request will compute later.
        unused: held, and never used (internal fragmentation).
        free: not held, though requests wait (external fragmentation, and what is kept free).
    """

    state: float = 0.0
    reserved: float = 0.0
    unused: float = 0.0
    free: float = 0.0


class Observer:
    """Observes a scheduler from one time until another.

    Args:
        admission: of a baseline.
        capacity: tokens of the memory.

    Attributes:
        shares: while requests wait, sums over time.
        seconds, waited_s: observed, and of them with waiting requests.
        owned_blocks, all_blocks: sums over time of the blocks that running sequences own, and of those that they would
            own if none was shared.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: KVMemory,
        admission: ReservedAdmission | None,
        capacity: int,
        window_s: tuple[float, float],
    ) -> None:
        self._scheduler, self._memory, self._admission = scheduler, memory, admission
        self._capacity = capacity
        self._window_s = window_s
        self.seconds = self.waited_s = self.running = 0.0
        self.owned_blocks = self.all_blocks = 0.0
        self.shares = Shares()

    def note(self, begun_at: float, ends_at: float) -> None:
        """Note what is held from one time until another, in seconds since the first arrival."""
        seconds = min(ends_at, self._window_s[1]) - max(begun_at, self._window_s[0])
        if seconds <= 0:
            return
        running = tuple(self._scheduler.running)
        self.seconds += seconds
        self.running += seconds * len(running)
        sequences = [sequence for request in running for sequence in request.sequences]
        owned = self._memory.report().groups[0].active_blocks
        self.owned_blocks += seconds * owned
        self.all_blocks += seconds * sum(len(s.memory.groups[0].block_ids) for s in sequences if s.memory is not None)
        if self._scheduler.waiting.peek() is None and not self._scheduler.preempted:
            return
        state, later = sum(sequence.num_computed for sequence in sequences), 0
        if self._admission is None:
            taken = owned * self._memory.groups[0].layout.block_tokens
        else:
            taken = sum(size for ranges in self._admission.ranges.values() for _, size in ranges)
            later = sum(len(s.prompt_token_ids) + s.max_tokens - s.num_computed for s in sequences)
        self.waited_s += seconds
        self.shares.state += seconds * state / self._capacity
        self.shares.reserved += seconds * later / self._capacity
        self.shares.unused += seconds * (taken - state - later) / self._capacity
        self.shares.free += seconds * (1 - taken / self._capacity)

    @property
    def batched(self) -> float:
        """Mean number of running requests."""
        return self.running / self.seconds if self.seconds else 0.0

    @property
    def saved(self) -> float:
        """Share of blocks saved by sharing."""
        return 1 - self.owned_blocks / self.all_blocks if self.all_blocks else 0.0

    def mean_shares(self) -> tuple[float, float, float, float] | None:
        """State, reserved, unused and free; `None` if no request has waited."""
        s, waited_s = self.shares, self.waited_s
        sums = (s.state, s.reserved, s.unused, s.free)
        return (sums[0] / waited_s, sums[1] / waited_s, sums[2] / waited_s, sums[3] / waited_s) if waited_s else None
