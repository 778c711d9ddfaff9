"""Step loop: schedule, map, launch, sample, apply.

Without asynchronous scheduling one call does all of it for one step. With it the forward of the next step is launched
before the tokens of the last one are known to the host, which reads and applies them while the device computes:

    device   | forward 1 | sample 1 | forward 2       | sample 2 | forward 3 …
    host       launch 2  |  read and apply 1 · sample 2 · launch 3 | read and apply 2 …

The forward takes tokens that are not known yet from the sampler's output on the device. Sampling is launched when the
tokens before it are applied, so that grammars, penalties and bad words see a complete history. A sequence that ends
costs one row of the next forward, whose result is dropped. Sequences that need a token before they can be scheduled
(draft tokens to verify, forks, beams) wait for it, and so does a step that must preempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from folio.app.engine.layers.batch import demands, next_demands
from folio.app.engine.ranks.adapter_store import AdapterStore
from folio.app.engine.ranks.executor import Executor, Forward
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.faults import SequenceFailure, attribute_failures, failure_of
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.schedule.load_report import LoadMeter
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.engine.schedule.running import TokensAwaited
from folio.app.engine.schedule.scheduled import Committed, Scheduled
from folio.app.engine.schedule.scheduler import Scheduler
from folio.app.engine.speculation import Speculation
from folio.app.engine.step.decoding import Decoder
from folio.app.engine.step.pooler import PooledRows, Pooler
from folio.app.engine.step.token_selection import TokenChooser, TokenSelection
from folio.app.engine.step.watch import EngineWatch
from folio.app.errors import EngineError, RequestError
from folio.vmem import KVMemory, PinError

# Poll interval of a step that finds no memory.
_WAIT_FOR_PAGES_S = 0.01
# A request that cannot begin although nothing else runs fails after this time.
_GIVE_UP_S = 5.0


@dataclass(slots=True, eq=False)
class _Step:
    """A launched step.

    Attributes:
        forward: waits until the forward is launched on the device.
        committed: `None` before `Scheduler.commit_step`.
        selection: waits for the chosen tokens; `None` before they are sampled.
        start: when it was scheduled, by `time.perf_counter`.
    """

    scheduled: list[Scheduled]
    forward: Callable[[], Forward]
    pooled: list[PooledRows]
    start: float
    committed: Committed | None = None
    selection: Callable[[], TokenSelection] | None = None

    def sampled(self) -> torch.Tensor:
        """The sampled tokens `[rows]` int64, on the device. Called within the queue of the device's work."""
        assert self.selection is not None
        selection = self.selection()
        if selection.pending is not None:
            return selection.pending.token_ids
        assert selection.sampled is not None
        return torch.tensor(selection.sampled.token_ids, device=self.forward().logits.device)


@dataclass(eq=False, repr=False)
class StepLoop:
    """Compute one step after the other.

    Args:
        _requests: the engine's requests by id.
        _num_tokens: most tokens of a step.
        _waits: the device is shared. Requests wait for memory without a limit, and `step` returns instead of waiting.

    Attributes:
        starved: with `_waits`: whether the last step found no memory for any request.
        step_s: seconds of the step whose tokens the latest call returned; `None` if there was none.
    """

    _executor: Executor
    _memory: KVMemory
    _scheduler: Scheduler
    _chooser: TokenChooser
    _decoder: Decoder
    _adapters: AdapterStore
    _pooler: Pooler | None
    _speculation: Speculation | None
    _recovery: PreemptionCostModel
    _requests: dict[str, Request]
    _meter: LoadMeter
    _watch: EngineWatch
    _num_tokens: int
    _waits: bool = False
    starved: bool = False
    step_s: float | None = None
    _launched: _Step | None = None  # its tokens are not applied
    _applied: list[Delta] = field(default_factory=list)  # deltas of the steps that `settle` applied
    _applied_at: float = 0.0
    _prefilling: list[tuple[Sequence, float]] = field(default_factory=list)  # no first token yet; with their starts
    _stalled_since: float | None = None

    @property
    def has_deltas(self) -> bool:
        """Whether `take_applied` has deltas to return although all requests may have ended."""
        return bool(self._applied)

    def step(self) -> list[Delta]:
        """Compute a step, or launch it and return the deltas of the one before.

        Raises:
            UnavailableError: a rank is lost; no step will succeed any more.
        """
        self.step_s = None
        self.starved = False
        if self._launched is not None:
            if self._speculation is not None and self._scheduler.decoding():
                self.settle()  # draft tokens are proposed from known ones
            elif all(s.sequence.is_ended for s in self._launched.scheduled):
                self._launched = None
        deltas = self.take_applied()
        before, step = self._launched, None
        try:
            step = self._launch()
            if step is None and before is None:
                return deltas or self._wait_for_pages()
        except (TokensAwaited, SequenceFailure, _Unschedulable) as reason:
            self._scheduler.abort_step()
            deltas += self._fail_requests(reason)
        except BaseException:
            self._scheduler.abort_step()
            raise
        self._launched = None
        try:
            if before is not None:
                deltas += self._apply(before)
            if step is not None:
                self._sample(step)
                if self._executor.is_async:
                    self._launched = step
                else:
                    deltas += self._apply(step)
        except BaseException:
            self._discard(before, step)
            raise
        return deltas

    def take_applied(self) -> list[Delta]:
        """The deltas of settled steps. The next call of `Engine.step` returns them first, before any error of their
        requests."""
        deltas, self._applied = self._applied, []
        return deltas

    def settle(self) -> None:
        """Apply the tokens of the launched step, whose deltas `take_applied` returns."""
        if (step := self._launched) is None:
            return
        self._launched = None
        try:
            self._applied += self._apply(step)
        except BaseException:
            self._discard(step)
            raise

    def forget(self, request_id: str) -> None:
        """Drop the deltas of a cancelled request."""
        self._applied = [delta for delta in self._applied if delta.request_id != request_id]

    # ---- the parts of a step ----

    def _launch(self) -> _Step | None:
        """Schedule a step, map its memory and launch its forward. `None` if there is nothing to compute, or no memory.

        Nothing is committed if this raises.
        """
        before = self._launched
        drafts = self._propose()
        start = time.perf_counter()  # after the proposals: step times measure the cost of verification alone
        scheduled = self._scheduler.schedule(drafts, ahead=before is not None)
        if unschedulable := self._scheduler.take_unschedulable():
            raise _Unschedulable([request for request in unschedulable if request.sequences])
        if not scheduled:
            return None
        memory = self._memory
        memory.ensure(demands(scheduled))
        plan = self._executor.planner.plan(scheduled, adapter_slots=self._adapters.slots)
        following = next_demands(scheduled, self._scheduler.max_num_batched_tokens)
        memory.plan(following, self._scheduler.coming_tokens(following), self._scheduler.view)
        pooled = [] if self._pooler is None else self._pooler.select(scheduled)
        self._note_begun(scheduled, start)
        forward = self._executor.launch(
            plan, memory, [part.rows for part in pooled], None if before is None else before.sampled
        )
        step = _Step(scheduled, forward, pooled, start)
        if self._executor.is_async:
            self._commit(step)
        return step

    def _sample(self, step: _Step) -> None:
        """Launch the choice of the step's tokens."""
        selection = self._chooser.select(step.scheduled)

        def choose() -> TokenSelection:
            self._chooser.choose(selection, step.forward().logits)
            return selection

        step.selection = self._executor.queue.submit(choose)
        if step.committed is None:
            self._commit(step)
        else:
            for sequence, row in selection.plain:
                sequence.pending_row = row

    def _commit(self, step: _Step) -> None:
        step.committed = self._scheduler.commit_step()
        if step.committed.progress:
            self._stalled_since = None

    def _apply(self, step: _Step) -> list[Delta]:
        """Wait for the step's tokens and apply them."""
        assert step.selection is not None
        selection = step.selection()
        self._scheduler.settle(step.scheduled)
        deltas = self._decoder.apply(selection)
        sums = step.forward().sums
        if self._pooler is not None and sums is not None:
            deltas += self._pooler.apply(step.pooled, sums.cpu())
        for s in step.scheduled:
            if s.sequence.pin_name is not None and s.ends_prompt and not s.sequence.is_ended:
                deltas.append(self._pin(s.sequence))
        self._adapters.release_retired()
        now = time.perf_counter()
        self.step_s = seconds = now - max(step.start, self._applied_at)
        self._applied_at = now
        self._note_step(step.scheduled, seconds)
        if self._prefilling:
            self._note_prefilled(now)
        if self._watch.is_on:
            num_tokens, num_outputs = sum(s.num_tokens for s in step.scheduled), sum(len(d.token_ids) for d in deltas)
            self._watch.note_step(seconds, num_tokens, num_outputs, len(step.scheduled))
        return deltas

    def _fail_requests(self, reason: TokensAwaited | SequenceFailure | _Unschedulable) -> list[Delta]:
        """Fail the requests that kept the step from being launched; the others go on."""
        match reason:
            case SequenceFailure(sequence=sequence):
                return [self._decoder.fail(sequence.request, failure_of(sequence.request_id, reason))]
            case _Unschedulable(requests=requests, error=error):
                return [self._decoder.fail(request, error) for request in requests]
        return []

    def _discard(self, *steps: _Step | None) -> None:
        """Undo launched steps after one of them has failed."""
        launched = [step for step in steps if step is not None]
        if any(step.committed is None for step in launched):
            self._scheduler.abort_step()
        if committed := [(step.scheduled, step.committed) for step in launched if step.committed is not None]:
            self._scheduler.discard_steps(committed)

    # ---- details ----

    def _propose(self) -> dict[Sequence, list[int]]:
        """Propose draft tokens for sequences that decode."""
        if self._speculation is None:
            return {}
        decoding = self._scheduler.decoding()
        proposals = self._speculation.propose(decoding, self._num_tokens - len(decoding))
        return {sequence: tokens for sequence, tokens in zip(decoding, proposals, strict=True) if tokens}

    def _note_begun(self, scheduled: list[Scheduled], start: float) -> None:
        """Count the requests whose first chunk the step computes."""
        for s in scheduled:
            sequence = s.sequence
            if s.start == sequence.num_cached_tokens and not sequence.max_computed:
                with attribute_failures(sequence):
                    self._meter.note_begun(sequence)
                sequence.queue_s = start - sequence.submitted_at
                self._meter.queue_s.append(sequence.queue_s)
                if self._watch.is_on:
                    self._watch.note_begun(sequence.queue_s)
                self._prefilling.append((sequence, start))

    def _note_prefilled(self, now: float) -> None:
        """Count the requests that have got their first token. Those that have ended without one are forgotten."""
        left = []
        for sequence, start in self._prefilling:
            if sequence.num_output_tokens:
                self._meter.prefill_s.append(now - start)
            elif not sequence.is_ended:
                left.append((sequence, start))
        self._prefilling = left

    def _note_step(self, scheduled: list[Scheduled], seconds: float) -> None:
        num_tokens = sum(s.num_tokens for s in scheduled)
        num_attended, verifies = sum(s.num_attended for s in scheduled), any(s.drafts for s in scheduled)
        self._recovery.observe_step(num_tokens, num_attended, seconds, verifies=verifies)
        self._meter.step_s.append(seconds)
        self._meter.step_tokens.append(num_tokens)
        if num_tokens > sum(s.samples for s in scheduled):  # not only decodes
            self._meter.note_step(seconds, time.monotonic())
            self._scheduler.mixed_steps.note(scheduled, seconds)

    def _pin(self, sequence: Sequence) -> Delta:
        """Pin the prefix that a sequence has computed, and end its request."""
        assert sequence.memory is not None
        assert sequence.pin_name is not None
        try:
            self._memory.pin(sequence.pin_name, sequence.memory, sequence.num_computed)
        except PinError as error:
            return self._decoder.fail(sequence.request, RequestError(str(error), "name"))
        except BaseException as error:  # noqa: BLE001 - raised again unless the request caused it
            return self._decoder.fail(sequence.request, failure_of(sequence.request_id, error))
        self._decoder.end_sequence(sequence)
        return Delta(sequence.request_id, (), "", "stop", num_cached_tokens=sequence.num_cached_tokens or 0)

    def _wait_for_pages(self) -> list[Delta]:
        """Wait briefly while nothing can be scheduled: for adapters, or because the device has less memory than the
        budget. Fail the first request when that takes too long."""
        if not self._requests:
            return []
        if self._waits:
            self.starved = True
            return []
        if self._adapters.wait(_WAIT_FOR_PAGES_S):
            self._stalled_since = None
            return []
        now = time.monotonic()
        self._stalled_since = self._stalled_since or now
        if now - self._stalled_since < _GIVE_UP_S:
            self._memory.wait_for_progress(_WAIT_FOR_PAGES_S)
            return []
        self._stalled_since = None
        error = EngineError("the device has too little memory for this request, although the budget allows it")
        return [self._decoder.fail(self._scheduler.first_blocked.request, error)]


class _Unschedulable(Exception):
    """Requests whose beams no longer fit into the KV cache."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(requests)
        self.requests = requests
        self.error = EngineError("the KV cache has become too small for the beams of this request")
