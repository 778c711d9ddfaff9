"""Which tokens the next step computes."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from app.engine.request import Request
from vmem import KVMemory, OutOfPages, ViewPolicy, VmemError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The next `num_tokens` uncomputed tokens of a request; `samples` when they are its last."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.num_tokens == self.request.num_uncomputed


class Scheduler:
    """Iteration-level batching, first come first served.

    One token budget a step: decodes first, then chunks of prompts already admitted, then new requests. A request takes
    the blocks of its whole prompt when it is admitted. When a decode finds no page, the latest arrived request gives
    all of its blocks back and waits at the head of the queue to be computed again (PagedAttention §4.5, recompute);
    while it waits nobody passes it. The same happens while sequences own more than a budget that was lowered.
    """

    def __init__(self, memory: KVMemory, *, max_num_seqs: int, max_num_batched_tokens: int, view: ViewPolicy) -> None:
        self._memory = memory
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # each running sequence decodes in every step
        self._max_num_batched_tokens = max_num_batched_tokens
        self._view = view
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of arrival

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def next_waiting(self) -> Request:
        return self._waiting[0]

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that is finished or cancelled, and free its memory."""
        if request.memory is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._release(request)

    def schedule(self) -> list[Scheduled]:
        """The next step, its blocks allocated. Empty when there is nothing to do, or no memory to do it with."""
        while self._memory.num_free_pages < 0 and self._running:
            self._preempt(self._running[-1])
        budget = self._max_num_batched_tokens
        scheduled: list[Scheduled] = []

        # Decodes: one token each, and perhaps one block.
        for request in [r for r in self._running if r.num_uncomputed == 1]:
            if request.memory is not None and self._grow(request):
                scheduled.append(Scheduled(request, 1))
        scheduled = [s for s in scheduled if s.request.memory is not None]  # without those preempted meanwhile
        budget -= len(scheduled)

        # Prompts: admitted ones first; their blocks are there already.
        for request in self._running:
            if budget and request.num_uncomputed > 1:
                scheduled.append(Scheduled(request, min(budget, request.num_uncomputed)))
                budget -= scheduled[-1].num_tokens
        while budget and self._waiting and self._admit(self._waiting[0]):
            request = self._waiting.popleft()
            self._running.append(request)
            scheduled.append(Scheduled(request, min(budget, request.num_uncomputed)))
            budget -= scheduled[-1].num_tokens
        return scheduled

    def _admit(self, request: Request) -> bool:
        """Open the request's memory, if the step after this one would not have to preempt it at once."""
        needed = self._memory.pages_for(len(request.token_ids))
        if self.num_running >= self._max_num_seqs:
            return False
        if self._running and needed + self.num_running * self._memory.pages_for(1) > self._memory.num_free_pages:
            return False
        request.memory = self._memory.open(self._view)
        try:
            self._memory.append(request.memory, len(request.token_ids))
        except VmemError as error:
            self._release(request)
            if isinstance(error, OutOfPages):
                return False
            raise
        return True

    def _grow(self, request: Request) -> bool:
        """Give the request room for its next token, at the cost of later ones; False if it was itself preempted."""
        while request.memory is not None:
            try:
                self._memory.append(request.memory, len(request.token_ids))
                return True
            except OutOfPages:
                self._preempt(self._running[-1])
        return False

    def _preempt(self, victim: Request) -> None:
        logger.info("preempting %s: %d tokens will be computed again", victim.request_id, victim.num_computed)
        self._running.remove(victim)
        self._release(victim)
        self._waiting.appendleft(victim)

    def _release(self, request: Request) -> None:
        assert request.memory is not None
        self._memory.free(request.memory)
        request.memory = None
        request.num_computed = 0
