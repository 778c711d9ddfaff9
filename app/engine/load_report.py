"""How busy an engine is, as it tells routers and the autoscaling policy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app.engine.preemption import PreemptionCostModel, PreemptionMode
from app.engine.report import ReplicaReport, StepTimes, attended_tokens
from app.engine.request import Request
from app.engine.scheduler import Scheduler
from vmem import KVMemory, MemoryReport

# What happened this long ago counts for a third.
_MEMORY_S = 10.0
# Keys of cached prefixes in a report: 95 KiB together with their changes. Serve's controller passes them on to all
# routers.
MOST_KEYS = 13_824
# Nobody is told to come back later than this: what waits now says little about more than a minute. Nor sooner: a step
# takes about as long.
_LEAST_RETRY_S, _MOST_RETRY_S = 0.05, 60.0
# Times are kept until somebody takes them, the last ones.
_MOST_TIMES = 4096


@dataclass(slots=True)
class Activity:
    """What an engine has done.

    Attributes:
        num_preempted: requests that gave way since the start, by what became of their blocks.
        step_s: seconds of each step since this was last asked for, at most `_MOST_TIMES`.
        queue_s: the same of each request that has begun: from when the engine got it to the step that computed its
            first tokens.
        num_failed_steps: since the start, and with each of them all requests in flight.
    """

    num_preempted: Mapping[PreemptionMode, int] = field(default_factory=dict)
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    queue_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    num_failed_steps: int = 0

    def add(self, recent: Activity) -> None:
        """What has been done since, with its counts as they are now."""
        self.num_preempted = recent.num_preempted
        self.step_s.extend(recent.step_s)
        self.queue_s.extend(recent.queue_s)

    def take(self) -> Activity:
        """The same; the times are told once. Another thread may go on adding."""
        return Activity(self.num_preempted, _taken(self.step_s), _taken(self.queue_s), self.num_failed_steps)


class DecayingRate:
    """Amounts a second, lately: what came `_MEMORY_S` seconds ago counts for 1/e."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        self._rate = self.at(now) + amount / _MEMORY_S
        self._at = now

    def at(self, now: float) -> float:
        return self._rate * math.exp(-max(now - self._at, 0.0) / _MEMORY_S)


class LoadMeter:
    """What an engine has done lately. Times are seconds of one clock, whichever it is.

    Attributes:
        expected_cached_tokens, cached_tokens, missed_tokens: see `ReplicaReport`.
    """

    def __init__(self) -> None:
        self.reset_measurements()

    def reset_measurements(self) -> None:
        """Nothing has been done yet."""
        self._busy = DecayingRate()
        self._freed = DecayingRate()
        self._ended = DecayingRate()
        self._activity = Activity()
        self.expected_cached_tokens = 0
        self.cached_tokens = 0
        self.missed_tokens = 0

    def note_step(self, seconds: float, now: float) -> None:
        """A step that computed prompts, and took so long, ends now."""
        # As if it had been spread over its own duration; a long one must not count for more than all of the time.
        self._busy.add(_MEMORY_S * -math.expm1(-seconds / _MEMORY_S), now)

    def note_ended(self, request: Request, now: float) -> None:
        """A request has ended, and frees what it had."""
        self._freed.add(request.num_computed, now)
        self._ended.add(1, now)

    def note_begun(self, request: Request) -> None:
        """A request has been looked up in the prefix cache."""
        expected, cached = request.expected_cached_tokens, request.num_cached_tokens
        if expected is not None and cached is not None:
            self.expected_cached_tokens += expected
            self.cached_tokens += cached
            self.missed_tokens += abs(expected - cached)

    def note_times(self, step_s: float, queue_s: Sequence[float]) -> None:
        """A step took so long, and began with requests that had waited so long."""
        self._activity.step_s.append(step_s)
        self._activity.queue_s.extend(queue_s)

    def take_activity(self, num_preempted: Mapping[PreemptionMode, int]) -> Activity:
        """The times are told once. From any one thread."""
        self._activity.num_preempted = dict(num_preempted)
        return self._activity.take()

    def busy_share(self, now: float) -> float:
        return min(self._busy.at(now), 1.0)

    def freed_tokens_per_s(self, now: float) -> float:
        return self._freed.at(now)

    def ended_per_s(self, now: float) -> float:
        return self._ended.at(now)


def _taken(times: deque[float]) -> deque[float]:
    """What is there now."""
    return deque((times.popleft() for _ in range(len(times))), _MOST_TIMES)


def retry_after_s(
    queued: Sequence[int], step: StepTimes, meter: LoadMeter, *, step_tokens: int, free_tokens: int, now: float
) -> float:
    """When about half of the requests that wait will have begun: then there is room for others, and still work to do.

    They wait for steps that compute their prompts, for the end of requests that run, and for room in the KV cache:
    whichever takes longest, by the measured times of steps, and by how many requests have ended and how much room they
    have made lately.

    Args:
        queued: tokens of the prompts of all that wait, for whatever.
        step_tokens: tokens of a step at most.
        free_tokens: that the KV cache has room for.
        now: on the meter's clock.
    """
    num_steps = -(-sum(queued) // step_tokens)
    compute_s = num_steps * step.fixed_s + sum(
        tokens * step.token_s + attended_tokens(tokens, 0) * step.attended_s for tokens in queued
    )
    seconds = compute_s / 2
    if rate := meter.ended_per_s(now):
        seconds = max(seconds, len(queued) / 2 / rate)
    missing_tokens = sum(queued) / 2 - free_tokens
    if missing_tokens > 0:
        rate = meter.freed_tokens_per_s(now)
        seconds = max(seconds, missing_tokens / rate if rate else _MOST_RETRY_S)
    return min(max(seconds, _LEAST_RETRY_S), _MOST_RETRY_S)


def free_tokens(report: MemoryReport, memory: KVMemory) -> int:
    """Tokens that the KV cache has room for, cached ones given up."""
    return int((report.budget_bytes - report.active_bytes) * _tokens_per_byte(memory))


def _tokens_per_byte(memory: KVMemory) -> float:
    return memory.max_tokens / (memory.pages_for(memory.max_tokens) * memory.groups[0].layout.page_bytes)


def make_report(
    memory: KVMemory,
    scheduler: Scheduler,
    recovery: PreemptionCostModel,
    meter: LoadMeter,
    *,
    arriving: Sequence[tuple[int, int]] = (),
    step_tokens: int,
    now: float,
    most_keys: int = MOST_KEYS,
) -> ReplicaReport:
    """The engine's load. From any thread: what it counts may change meanwhile, and is a moment old anyhow.

    Args:
        arriving: requests that the engine takes before its next step: tokens, and how many of them are expected to be
            cached.
        step_tokens: tokens of a step at most.
        now: on the meter's clock: the monotonic one.
        most_keys: of cached prefixes; collecting them is most of the work.
    """
    step = recovery.step_times
    num_decodes = context = 0
    queued_parts = list(arriving)
    for request in scheduler.unfinished():
        if request.num_uncomputed == 1 and request.num_computed:
            if request.memory is not None:
                num_decodes += 1
                context += request.num_computed
            continue
        cached = request.num_computed
        if not cached and request.expected_cached_tokens is not None:
            cached = min(request.expected_cached_tokens, len(request.token_ids) - 1)
        queued_parts.append((len(request.token_ids), cached))
    queued = sum(tokens - cached for tokens, cached in queued_parts)
    attended = sum(attended_tokens(tokens - cached, cached) for tokens, cached in queued_parts)
    memory_report = memory.report()
    cached_keys = memory.prefixes.cached_keys(most_keys)
    num_steps = -(-queued // step_tokens)
    return ReplicaReport(
        made_at=now,
        unit_tokens=memory.prefixes.unit_tokens,
        keys=cached_keys.keys,
        changes=cached_keys.changes,
        stride=cached_keys.stride,
        keys_version=cached_keys.version,
        step=step,
        step_tokens=step_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting + len(arriving),
        queued_tokens=queued,
        queued_s=num_steps * step.fixed_s + queued * step.token_s + attended * step.attended_s,
        num_decodes=num_decodes,
        decode_s=num_decodes * step.token_s + context * step.attended_s,
        free_tokens=free_tokens(memory_report, memory),
        total_tokens=int(memory_report.budget_bytes * _tokens_per_byte(memory)),
        freed_tokens_per_s=meter.freed_tokens_per_s(now),
        busy_share=meter.busy_share(now),
        budget_bytes=memory_report.budget_bytes,
        expected_cached_tokens=meter.expected_cached_tokens,
        cached_tokens=meter.cached_tokens,
        missed_tokens=meter.missed_tokens,
    )
