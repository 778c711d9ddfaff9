"""Load of an engine: measured rates, load reports for routers and autoscaling, and the limit of the queue."""

from __future__ import annotations

import math
import time
from collections import abc, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from folio.app.engine.report import Progress, ReplicaReport, StepTimes, attended_tokens
from folio.app.engine.request.request import Sequence
from folio.app.engine.schedule.preemption import PreemptionCostModel, PreemptionMode
from folio.app.engine.schedule.scheduler import Scheduler
from folio.app.errors import OverloadedError
from folio.kernels import num_compilations
from folio.vmem import KVMemory, MemoryReport
from folio.vmem.prefix.store.block_store import StoreCounts
from folio.vmem.prefix.store.handover import PrefixReceiver

# Time constant of rates: what happened this long ago counts for 1/e.
_DECAY_S = 10.0
# Keys of cached prefixes in a report: 95 KiB with their changes. Serve's controller passes them on to all routers.
MOST_KEYS = 13_824
# Bounds of `retry_after_s`: about one step, and the longest time that a queue can predict.
_LEAST_RETRY_S, _MOST_RETRY_S = 0.05, 60.0
# The latest times that are kept until `take_activity`.
_MOST_TIMES = 4096

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Activity:
    """Counts and times of an engine's work.

    Attributes:
        num_preempted: preemptions since the start, by mode.
        step_s: seconds of each step since the last report.
        queue_s: seconds of each request that has begun, from its arrival to the step that computed its first chunk.
        prefill_s: seconds of each request that has its first token, from the start of that step to the end of the step
            that sampled the token.
        step_tokens: tokens computed by each step since the last report.
        num_failed_steps: since the start; each of them failed all requests in flight.
        num_late_compilations: kernels compiled or loaded in this process, and graphs captured, since the warm-up.
        store: of prefixes on disk; `None` without them.
        received_bytes: of blocks, from processes that had begun their requests; since the start.
    """

    num_preempted: Mapping[PreemptionMode, int]
    step_s: abc.Sequence[float]
    queue_s: abc.Sequence[float]
    prefill_s: abc.Sequence[float]
    step_tokens: abc.Sequence[int]
    num_failed_steps: int
    num_late_compilations: int
    store: StoreCounts | None = None
    received_bytes: int = 0


class DecayingRate:
    """Amount per second, with exponential decay."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        self._rate = self.at(now) + amount / _DECAY_S
        self._at = now

    def at(self, now: float) -> float:
        return self._rate * math.exp(-max(now - self._at, 0.0) / _DECAY_S)


class LoadMeter:
    """Rates of an engine's recent work. Times are seconds of any one clock.

    Attributes:
        busy: seconds of steps that compute prompts, per second.
        freed_tokens, ended_requests: tokens freed by requests that end, and number of these requests, per second.
        step_s, queue_s, prefill_s, step_tokens: see `Activity`.
        expected_cached_tokens, cached_tokens, missed_tokens: see `ReplicaReport`.
        num_early_compilations: `folio.kernels.num_compilations` before the engine's first request.
    """

    def __init__(self) -> None:
        self.reset_measurements()

    def reset_measurements(self) -> None:
        self.busy, self.freed_tokens, self.ended_requests = DecayingRate(), DecayingRate(), DecayingRate()
        self.step_s: deque[float] = deque(maxlen=_MOST_TIMES)
        self.queue_s: deque[float] = deque(maxlen=_MOST_TIMES)
        self.prefill_s: deque[float] = deque(maxlen=_MOST_TIMES)
        self.step_tokens: deque[int] = deque(maxlen=_MOST_TIMES)
        self.expected_cached_tokens = self.cached_tokens = self.missed_tokens = 0
        self.num_early_compilations = num_compilations()

    def note_step(self, seconds: float, now: float) -> None:
        """Count a step that computed prompts and ends now, spread over its duration: the rate is at most 1."""
        self.busy.add(_DECAY_S * -math.expm1(-seconds / _DECAY_S), now)

    def note_ended(self, sequence: Sequence, now: float) -> None:
        self.freed_tokens.add(sequence.num_computed, now)
        self.ended_requests.add(1, now)

    def note_begun(self, sequence: Sequence) -> None:
        """Count a request that has been looked up in the prefix cache."""
        expected, cached = sequence.expected_cached_tokens, sequence.num_cached_tokens
        if expected is not None and cached is not None:
            self.expected_cached_tokens += expected
            self.cached_tokens += cached
            self.missed_tokens += abs(expected - cached)


def begin_s(
    num_tokens: int,
    num_attended: int,
    num_requests: int,
    step: StepTimes,
    meter: LoadMeter,
    *,
    step_tokens: int,
    free_tokens: int,
    now: float,
    share: float = 1.0,
    ends_s: float = math.inf,
) -> float:
    """Expected time until a share of queued requests has begun, and their prompts are computed.

    The longest of: computing the prompts; the end of as many requests, at the recent rate; room in the KV cache for the
    tokens, at the rate at which requests have freed it.

    Args:
        num_tokens, num_attended: prompt tokens to compute, and the sum of the tokens to which each attends.
        num_requests: running requests that must end first, to make room for as many.
        step_tokens: most tokens of a step.
        free_tokens: tokens for which the KV cache has room.
        now: on the meter's clock.
        ends_s: time after which that many requests have ended in any case.
    """
    seconds = share * step.seconds(-(-num_tokens // step_tokens), num_tokens, num_attended)
    if num_requests > 0:
        rate = meter.ended_requests.at(now)
        until_s = min(share * num_requests / rate if rate else math.inf, ends_s)
        seconds = max(seconds, until_s) if until_s < math.inf else seconds
    missing_tokens = share * num_tokens - free_tokens
    if missing_tokens > 0:
        rate = meter.freed_tokens.at(now)
        seconds = max(seconds, missing_tokens / rate if rate else _MOST_RETRY_S)
    return seconds


def retry_after_s(
    queued: abc.Sequence[int], step: StepTimes, meter: LoadMeter, *, step_tokens: int, free_tokens: int, now: float
) -> float:
    """Expected time until half of the queue has begun: then there is room for others, and still work to do.

    Args:
        queued: prompt tokens of each queued request.
        step_tokens, free_tokens, now: see `begin_s`.
    """
    attended = sum(attended_tokens(tokens, 0) for tokens in queued)
    bounds = {"step_tokens": step_tokens, "free_tokens": free_tokens}
    seconds = begin_s(sum(queued), attended, len(queued), step, meter, **bounds, now=now, share=0.5)
    return min(max(seconds, _LEAST_RETRY_S), _MOST_RETRY_S)


class LoadReporter:
    """Make load reports, and refuse requests while the queue is full. From any thread; figures may change meanwhile.

    Args:
        step_tokens: most tokens of a step.
        most_queued: most requests that wait (`max_queued_requests`).
        held: requests that wait for an adapter, and are not in the scheduler's queue yet.
        store: counts of prefixes on disk; `None` without them.
        receiver: of blocks from other processes; `None` without one.
    """

    def __init__(
        self,
        memory: KVMemory,
        scheduler: Scheduler,
        recovery: PreemptionCostModel,
        meter: LoadMeter,
        *,
        step_tokens: int,
        most_queued: int | Literal["auto"] | None = None,
        held: Callable[[], abc.Sequence[Sequence]] = tuple,
        store: StoreCounts | None = None,
        receiver: PrefixReceiver | None = None,
    ) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._recovery = recovery
        self._meter = meter
        self._step_tokens = step_tokens
        self._most_queued = most_queued
        self._held, self._store, self._receiver = held, store, receiver
        self.num_failed_steps = 0
        whole_bytes = memory.pages_for(memory.max_tokens) * memory.groups[0].layout.page_bytes
        self._tokens_per_byte = memory.max_tokens / whole_bytes

    def check_queue(self, arriving: abc.Sequence[tuple[int, int]] = ()) -> None:
        """Raise `OverloadedError` if the queue is full.

        Args:
            arriving: see `report`.
        """
        most = self._most_queued
        if most is None or most == "auto":
            return
        held = self._held()
        # Until the next step, requests that will begin at once are in the queue too.
        begin_at_once = max(self._scheduler.max_num_seqs - self._scheduler.num_running, 0)
        if len(self._scheduler.waiting) + len(held) + len(arriving) < most + begin_at_once:
            return
        queued = [
            *self._scheduler.waiting.lengths(),
            *(len(sequence.token_ids) for sequence in held),
            *(tokens for tokens, _ in arriving),
        ]
        seconds = retry_after_s(
            queued,
            self._recovery.step_times,
            self._meter,
            step_tokens=self._step_tokens,
            free_tokens=self._free_tokens(self._memory.report()),
            now=time.monotonic(),
        )
        error = OverloadedError(
            f"queue full (max_queued_requests={most}); try again in {max(seconds, 1):.0f} s", seconds
        )
        error.num_queued = len(queued)
        raise error

    def report(
        self, arriving: abc.Sequence[tuple[int, int]] = (), *, now: float | None = None, most_keys: int = MOST_KEYS
    ) -> ReplicaReport:
        """Report the load and the cached prefixes.

        Args:
            arriving: requests that the engine takes before its next step: (tokens, expected cached tokens) of each.
            now: on the meter's clock; by default the monotonic one.
            most_keys: most keys of cached prefixes; collecting them is most of the work.
        """
        now = time.monotonic() if now is None else now
        scheduler, meter, step = self._scheduler, self._meter, self._recovery.step_times
        early = [*arriving, *((len(r.token_ids), r.expected_cached_tokens or 0) for r in self._held())]
        num_decodes = context = 0
        queued_parts = early.copy()
        for sequence in scheduler.unfinished():
            if sequence.num_uncomputed == 1 and sequence.num_computed:
                if sequence.memory is not None:
                    num_decodes += 1
                    context += sequence.num_computed
                continue
            queued_parts.append((len(sequence.token_ids), _cached_tokens(sequence)))
        queued = sum(tokens - cached for tokens, cached in queued_parts)
        attended = sum(attended_tokens(tokens - cached, cached) for tokens, cached in queued_parts)
        memory_report = self._memory.report()
        cached_keys = self._memory.prefixes.cached_keys(most_keys)
        return ReplicaReport(
            made_at=now,
            unit_tokens=self._memory.prefixes.unit_tokens,
            keys=cached_keys.keys,
            changes=cached_keys.changes,
            stride=cached_keys.stride,
            keys_version=cached_keys.version,
            step=step,
            step_tokens=self._step_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(early),
            queued_tokens=queued,
            queued_s=step.seconds(-(-queued // self._step_tokens), queued, attended),
            num_decodes=num_decodes,
            decode_s=step.seconds(0, num_decodes, context),
            free_tokens=self._free_tokens(memory_report),
            total_tokens=int(memory_report.budget_bytes * self._tokens_per_byte),
            freed_tokens_per_s=meter.freed_tokens.at(now),
            busy_share=min(meter.busy.at(now), 1.0),
            budget_bytes=memory_report.budget_bytes,
            expected_cached_tokens=meter.expected_cached_tokens,
            cached_tokens=meter.cached_tokens,
            missed_tokens=meter.missed_tokens,
        )

    def progress(self, arriving: Mapping[str, tuple[int, int]]) -> dict[str, Progress]:
        """The requests that have no token yet, by their ids.

        Args:
            arriving: see `report`, by the requests' ids.
        """
        scheduler, now = self._scheduler, time.monotonic()
        free_tokens = self._free_tokens(self._memory.report())
        num_free = scheduler.max_num_seqs - scheduler.num_running
        begun = [
            sequence for request in (*scheduler.running, *scheduler.preempted) for sequence in tuple(request.sequences)
        ]
        waiting = [sequence for request in scheduler.waiting.expected_order() for sequence in tuple(request.sequences)]
        waiting += self._held()
        coming = [
            (place, sequence.request_id, len(sequence.token_ids), sequence.num_computed, _cached_tokens(sequence))
            for place, sequence in (*((0, sequence) for sequence in begun), *enumerate(waiting, 1))
            if sequence.num_uncomputed > 1 or not sequence.num_computed
        ]
        later = enumerate(arriving.items(), len(waiting) + 1)
        coming += [(place, name, tokens, 0, cached) for place, (name, (tokens, cached)) in later]
        found: dict[str, Progress] = {}
        num_tokens = num_attended = 0
        step_s = self._recovery.step_times.seconds(1, len(begun), sum(sequence.num_computed for sequence in begun))
        left = sorted(sequence.max_tokens - sequence.num_output_tokens for sequence in begun) or [0]
        for place, name, tokens, num_computed, cached in coming:
            num_tokens += tokens - cached
            num_attended += attended_tokens(tokens - cached, cached)
            num_ends = max(place - num_free, 0)  # of running requests, then of those that replace them
            rounds, last = divmod(max(num_ends - 1, 0), len(left))
            seconds = begin_s(
                num_tokens,
                num_attended,
                num_ends,
                self._recovery.step_times,
                self._meter,
                step_tokens=self._step_tokens,
                free_tokens=free_tokens,
                now=now,
                ends_s=(rounds * left[-1] + left[last]) * step_s,
            )
            found[name] = Progress(place, round(seconds, 1), num_computed, tokens)
        return found

    def take_activity(self) -> Activity:
        """The engine's work since the last call. Always call it from the same thread."""
        meter = self._meter
        return Activity(
            dict(self._scheduler.begun.num_preempted),
            step_s=_drained(meter.step_s),
            queue_s=_drained(meter.queue_s),
            prefill_s=_drained(meter.prefill_s),
            step_tokens=_drained(meter.step_tokens),
            num_failed_steps=self.num_failed_steps,
            num_late_compilations=num_compilations() - meter.num_early_compilations,
            store=None if self._store is None else replace(self._store),
            received_bytes=0 if self._receiver is None else self._receiver.num_bytes,
        )

    def _free_tokens(self, report: MemoryReport) -> int:
        """Tokens for which the KV cache has room, cached blocks evicted."""
        return int((report.budget_bytes - report.active_bytes) * self._tokens_per_byte)


def _cached_tokens(sequence: Sequence) -> int:
    """The computed tokens of a request; before it begins, those that are expected to be cached."""
    return sequence.num_computed or min(sequence.expected_cached_tokens or 0, len(sequence.token_ids) - 1)


def _drained(values: deque[Number]) -> list[Number]:
    """Remove and return the values so far; another thread may add more meanwhile."""
    return [values.popleft() for _ in range(len(values))]
