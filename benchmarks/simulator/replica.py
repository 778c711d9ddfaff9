"""Simulated replica: the real scheduler and KV memory, without a model."""

from __future__ import annotations

import math
from collections import Counter, abc
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.simulator.descent import Steps, descend
from benchmarks.simulator.device import Device
from benchmarks.simulator.memory import make_memory, prompt_of
from benchmarks.simulator.received import ReceivedBlocks
from benchmarks.simulator.traffic import Arrival
from folio.app.engine.report import ReplicaReport
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.schedule.load_report import LoadMeter, LoadReporter
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.engine.schedule.scheduled import Scheduled
from folio.app.engine.schedule.scheduler import Scheduler
from folio.vmem import CachedKeys, EvictionOrder, PrefixUse, key_of

# Above the number of keys of any of these caches.
_ALL_KEYS = 1 << 20
# Generated tokens differ from all tokens of prompts.
_GENERATED, _MOST_SEQUENCES = 1 << 24, 16
_SAMPLING = SamplingParams(max_tokens=1)


@dataclass(slots=True, eq=False)
class Served:
    """A request at a replica, with times of its events in seconds of simulated time.

    `cached_tokens`: of the prompt, found in the prefix cache. `due_tokens`: tokens to compute, as estimated at the
    arrival. `begun_at`: the first step with the prompt. `moved_at`: it has left the replica that computed its prompt.
    """

    arrival: Arrival
    replica: int
    due_tokens: int = 0
    begun_at: float | None = None
    moved_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        assert self.first_token_at is not None
        return self.first_token_at - self.arrival.at

    @property
    def tpot_s(self) -> float:
        """Mean time of the tokens after the first one; 0 without any."""
        assert self.first_token_at is not None
        assert self.ended_at is not None
        return (self.ended_at - self.first_token_at) / max(self.arrival.num_output_tokens - 1, 1)


@dataclass(slots=True, eq=False)
class Leap:
    """A step in flight, or several that differ only in that every sequence is one token longer each time.

    Attributes:
        first_s: time of the first step.
        longer_s: increase of the time from step to step.
        computes_prompts: not only decodes.
    """

    scheduled: list[Scheduled]
    num_steps: int
    begun_at: float
    first_s: float
    longer_s: float
    computes_prompts: bool

    @property
    def ends_at(self) -> float:
        n = self.num_steps
        return self.begun_at + n * self.first_s + n * (n - 1) / 2 * self.longer_s

    def cut(self, now: float) -> None:
        """End the leap with the present step."""
        lasts_s = now - self.begun_at
        if self.num_steps == 1 or lasts_s <= self.first_s:
            num_steps = 1
        elif self.longer_s <= 0:
            num_steps = math.ceil(lasts_s / self.first_s)
        else:
            b = self.first_s - self.longer_s / 2
            num_steps = math.ceil((-b + math.sqrt(b * b + 2 * self.longer_s * lasts_s)) / self.longer_s)
        self.num_steps = min(num_steps, self.num_steps)


class SimulatedReplica:
    """One engine replica in simulated time. While it only decodes, and no request arrives, many steps are computed as
    one leap.

    Args:
        leaps: allow leaps. The outcome is the same without them.
        eviction: in place of Folio's.
        receives: it also gets requests whose prompts were computed elsewhere, with their blocks (`ReceivedBlocks`).

    Attributes:
        busy_s: seconds in steps.
        prefill_tokens: computed tokens of prompts.
        prefill_due_tokens: of prompts without a first token yet, the tokens not cached at their arrival.
    """

    def __init__(
        self,
        index: int,
        device: Device,
        now: float = 0.0,
        *,
        leaps: bool = True,
        eviction: EvictionOrder | None = None,
        receives: bool = False,
        prefix_cache: bool = True,
    ) -> None:
        self.index = index
        self.now = now
        self._arrival_at = now
        self.busy_s = 0.0
        self.prefill_tokens = 0
        self.prefill_due_tokens = 0
        self.num_steps = 0
        self.meter = LoadMeter()
        self._device = device
        self._leaps = leaps
        self._leap: Leap | None = None
        self._served: dict[str, Served] = {}
        self._descents: dict[str, Steps] = {}  # of beam searches
        self._active_units: Counter[bytes] = Counter()  # keys of unfinished requests' prompts
        self._memory = make_memory(device, device.cache_tokens, eviction, lambda: self.now, prefix_cache=prefix_cache)
        self._recovery = PreemptionCostModel(device.step_tokens)
        self._received = ReceivedBlocks(self._memory, self._recovery) if receives else None
        self._scheduler = Scheduler(
            self._memory,
            max_num_seqs=device.max_num_seqs,
            max_num_batched_tokens=device.step_tokens,
            view="block_table",
            recovery=self._recovery,
            policy="recompute",
            max_mixed_step_s=device.max_mixed_step_s,
            reads=self._received,
            clock=lambda: self._arrival_at,
        )
        self._load = LoadReporter(
            self._memory, self._scheduler, self._recovery, self.meter, step_tokens=device.step_tokens
        )

    @property
    def num_unfinished(self) -> int:
        return len(self._served)

    @property
    def wakes_at(self) -> float | None:
        """Time of the next call if no request arrives; `None` while idle."""
        return self._leap.ends_at if self._leap is not None else None

    def active_units_with(self, keys: abc.Sequence[bytes]) -> int:
        """Units of unfinished requests' prompts and of another prompt; shared units count once."""
        shared = next((i for i, key in enumerate(keys) if key not in self._active_units), len(keys))
        return len(self._active_units) + len(keys) - shared

    def cached_keys(self) -> CachedKeys:
        """Keys of all prefixes cached now."""
        return self._memory.prefixes.cached_keys(_ALL_KEYS)

    def cached_tokens(self, arrival: Arrival) -> int:
        """Tokens of a prompt that are cached now."""
        return self._memory.prefixes.match(*prompt_of(arrival, self._memory)).num_tokens

    def submit(self, arrival: Arrival, expected_cached_tokens: int, now: float, *, only_prompt: bool = False) -> Served:
        """Add a request at its arrival. `only_prompt`: it leaves after its first token."""
        due_tokens = arrival.num_tokens - self.cached_tokens(arrival)
        served = Served(arrival, self.index, due_tokens)
        self.prefill_due_tokens += due_tokens
        self._submit(served, [], 1 if only_prompt else arrival.num_output_tokens, expected_cached_tokens, now)
        return served

    def receive(self, served: Served, now: float) -> None:
        """Add a request with its first token, whose blocks are here and become cached when there is room."""
        assert self._received is not None
        served.replica, served.moved_at = self.index, now
        arrival = served.arrival
        cached_tokens = arrival.num_tokens // self._device.unit_tokens * self._device.unit_tokens
        self._received.add(arrival.request_id)
        self._submit(served, [_generated(arrival)], arrival.num_output_tokens, cached_tokens, now)

    def _submit(self, served: Served, begun: list[int], most_outputs: int, expected: int, now: float) -> None:
        self._arrival_at = now
        arrival = served.arrival
        chain, prompt = prompt_of(arrival, self._memory)
        self._served[arrival.request_id] = served
        if arrival.beams:
            self._descents[arrival.request_id] = arrival.beams
        self._active_units.update(map(key_of, arrival.digests))
        params = _SAMPLING if arrival.num_sequences == 1 else _several(arrival)
        request = Request(arrival.request_id, params, arrival=arrival.number)
        sequence = Sequence(request, prompt, params, most_outputs, None, chain, prompt + begun)
        sequence.num_forks = arrival.num_sequences - 1
        sequence.expected_cached_tokens = expected
        sequence.use = PrefixUse(arrival.kind, len(prompt))
        self._scheduler.add(request)
        if self._leap is None:
            self.now = now
            self._begin()
        else:
            self._leap.cut(now)

    def advance(self, now: float) -> Iterator[Served]:
        """Advance the time; yields the requests that end meanwhile."""
        while self._leap is not None and self._leap.ends_at <= now:
            yield from self._end(self._leap)
            self._begin()

    def report(self, now: float) -> ReplicaReport:
        """A load report. Contexts of decoding sequences may be as short as at the beginning of the leap."""
        self.now = now
        return self._load.report(now=now)

    def close(self) -> None:
        self._memory.check_integrity()
        self._memory.check_idle()
        self._memory.close()

    # ---- steps ----

    def _begin(self) -> None:
        """Schedule a step or a leap, if there is work."""
        scheduled = self._scheduler.schedule()
        if not scheduled:
            assert not self._served, f"replica {self.index} cannot go on with {len(self._served)} requests"
            return
        self._memory.ensure(())  # copies blocks that forks share
        came = [s for s in scheduled if self._came(s)]
        prompts = [s for s in scheduled if (s.num_tokens > 1 or not s.samples) and s not in came]
        for s in scheduled:
            served = self._served[s.sequence.request_id]
            served.begun_at = self.now if served.begun_at is None else served.begun_at
            if s.sequence.num_computed == s.sequence.num_cached_tokens and not s.sequence.max_computed:
                self.meter.note_begun(s.sequence)
        num_tokens = sum(1 if s in came else s.num_tokens for s in scheduled)
        prefill_tokens = sum(s.num_tokens for s in prompts)
        attended = sum(len(s.sequence.token_ids) if s in came else _attended(s) for s in scheduled)
        prompts_attended = sum(_attended(s) for s in prompts)
        seconds = self._device.step_s(num_tokens, prompts_attended, attended - prompts_attended)
        self._recovery.observe_step(num_tokens, attended, seconds)
        self._scheduler.mixed_steps.note(scheduled, seconds)
        self.prefill_tokens += prefill_tokens
        num_steps, longer_s = 1, len(scheduled) * self._device.decode_attended_s
        # Without a bound of mixed steps, a prompt that waits does so until a sequence ends, or needs a block.
        goes_on = self._device.max_mixed_step_s == math.inf or not self._scheduler.num_waiting
        if self._leaps and not prompts and not came and goes_on and not self._descents:
            num_steps = min(map(self._steps_alone, scheduled))
        self._leap = Leap(scheduled, num_steps, self.now, seconds, longer_s, bool(prompts))

    def _came(self, scheduled: Scheduled) -> bool:
        """Whether these tokens, the last ones of a prompt and its first output, came with the request's blocks: only
        whole units become cached."""
        sequence, unit = scheduled.sequence, self._device.unit_tokens
        if scheduled.num_tokens == 1 or sequence.max_computed or not scheduled.samples:
            return False
        has_moved = self._served[sequence.request_id].moved_at is not None
        return has_moved and scheduled.start >= len(sequence.prompt_token_ids) // unit * unit

    def _steps_alone(self, scheduled: Scheduled) -> int:
        """Number of steps until the sequence ends, or needs a block."""
        sequence, unit = scheduled.sequence, self._device.unit_tokens
        return min(sequence.max_tokens - sequence.num_output_tokens, unit - sequence.num_computed % unit)

    def _end(self, leap: Leap) -> Iterator[Served]:
        self._leap = None
        self.now = leap.ends_at
        seconds = leap.ends_at - leap.begun_at
        self.busy_s += seconds
        self.num_steps += leap.num_steps
        if leap.computes_prompts:
            self.meter.note_step(seconds, self.now)
        sampling = [s.sequence for s in leap.scheduled if s.samples]
        self._scheduler.commit_step()
        self._scheduler.settle(leap.scheduled)
        for sequence in descend(self._memory, self._scheduler, sampling, self._descents):
            served = self._served[sequence.request_id]
            if served.first_token_at is None:
                served.first_token_at = self.now
                served.cached_tokens = sequence.num_cached_tokens or 0
                self.prefill_due_tokens -= served.due_tokens
            # Unique: the use of an answer in later prompts is part of the trace.
            sequence.token_ids += [_generated(served.arrival, sequence.index)] * leap.num_steps
            sequence.num_computed += leap.num_steps - 1
            sequence.max_computed = sequence.num_computed
            if sequence.num_output_tokens < sequence.max_tokens:
                continue
            self._scheduler.remove_sequence(sequence)
            if not sequence.request.sequences:
                del self._served[sequence.request_id]
                self._descents.pop(sequence.request_id, None)
                self._active_units -= Counter(map(key_of, served.arrival.digests))
                self.meter.note_ended(sequence, self.now)
                served.ended_at = self.now
                yield served


def _generated(arrival: Arrival, index: int = 0) -> int:
    """The token that stands for all those of one of the request's outputs."""
    return _GENERATED + _MOST_SEQUENCES * arrival.number + index


def _several(arrival: Arrival) -> SamplingParams:
    return SamplingParams(max_tokens=1, n=arrival.num_sequences, use_beam_search=bool(arrival.beams))


def _attended(scheduled: Scheduled) -> int:
    """Sum of cached tokens that the queries attend to."""
    n = scheduled.num_tokens
    return n * scheduled.sequence.num_computed + n * (n + 1) // 2
