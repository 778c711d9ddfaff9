"""Simulated model of a shelf: its requests, its steps, and what the arbiter and the routers learn of it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice

from benchmarks.simulator.device import Device
from folio.app.config.shelf import Keep
from folio.app.engine.report import ReplicaReport, StepTimes, attended_tokens
from folio.app.engine.schedule.load_report import DecayingRate
from folio.app.shelf import arbiter
from folio.app.shelf.allocation import ModelNeed
from folio.app.shelf.arrivals import ArrivalHistory
from folio.app.shelf.measure import LEAST_URGENCY, MOST_PRESSURE
from folio.app.shelf.status import ModelStatus

# Tokens of a block, and tokens that a running sequence may add before the next plan.
_BLOCK, _AHEAD = 16, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfModel:
    """A model of the shelf.

    Attributes:
        device: step times; its cache is not used.
        kv_token_bytes: of the KV cache of one token.
        load_s: seconds of a wake, from the beginning of its transfer.
        sleep_s: seconds until its memory is free.
    """

    name: str
    device: Device
    weight_bytes: int
    kv_token_bytes: int
    load_s: float
    sleep_s: float
    ttft_s: float = 1.0
    tpot_s: float = 0.1
    share: float = 1.0
    keep: Keep = "auto"


@dataclass(slots=True, eq=False)
class ShelfRequest:
    """A request, and the times of its events."""

    model: str
    at: float
    num_tokens: int
    num_output_tokens: int
    computed: int = 0
    generated: int = 0
    preempted_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float | None = None
    refused: bool = False

    @property
    def length(self) -> int:
        return self.num_tokens + self.generated

    @property
    def ttft_s(self) -> float:
        return math.inf if self.first_token_at is None else self.first_token_at - self.at

    @property
    def tpot_s(self) -> float:
        if self.ended_at is None or self.first_token_at is None:
            return math.inf
        return (self.ended_at - self.first_token_at) / max(self.num_output_tokens - 1, 1)


class SimulatedModel:
    """A model, as a `Sharer` of the device's time. Its methods take the time as `now`; its owner changes its state.

    Attributes:
        state: "leaving" while a sleep gives memory back.
        changes_at: end of a wake or a sleep.
        turn_at, lost_at, idle_at: beginnings of `ModelNeed.turn_s`, `lost_s` and `idle_s`.
        turn_wait_s: expected wait for memory, of the last plan.
        num_preempted: requests so far.
    """

    def __init__(self, spec: ShelfModel) -> None:
        self.spec = spec
        self.state = "asleep"
        self.budget_bytes = 0
        self.waiting: deque[ShelfRequest] = deque()
        self.running: list[ShelfRequest] = []
        self.history = ArrivalHistory()
        self.turn_at = self.idle_at = 0.0
        self.lost_at = -math.inf
        self.changes_at = math.inf
        self.turn_wait_s = 0.0
        self.num_preempted = 0
        self.share = spec.share
        self._stepped_at = self._step_gap_s = 0.0
        self._freed = DecayingRate()

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def is_ready(self) -> bool:
        """Whether there may be a step to compute now."""
        if self.state != "awake":
            return False
        return bool(self.running) or (bool(self.waiting) and self._first_bytes <= self.budget_bytes)

    @property
    def held_bytes(self) -> int:
        return sum(self._kv_bytes(request.computed) for request in self.running)

    def submit(self, request: ShelfRequest, room_bytes: int, now: float) -> None:
        """Add a request, unless its KV memory exceeds what the model can ever have."""
        self.history.note(request.at)
        if self._kv_bytes(request.num_tokens + request.num_output_tokens) > room_bytes:
            request.refused = True
            return
        if not self.has_work:
            self._stepped_at = now
        self.waiting.append(request)

    def need(self, now: float, capacity_bytes: int) -> ModelNeed:
        """What the arbiter learns; sets the share of the device's time, as `Control` does."""
        spec, running = self.spec, self.running
        waiting = list(islice(self.waiting, spec.device.max_num_seqs))
        first = (running or waiting)[0] if self.has_work else None
        new_since = min((r.at for r in (*running, *waiting) if r.first_token_at is None), default=now)
        pressure = max((now - new_since) / spec.ttft_s, self._step_gap_s / spec.tpot_s if running else 0.0)
        self.share = spec.share * (LEAST_URGENCY + min(pressure, MOST_PRESSURE))
        left = sum(r.length - r.computed for r in (*running, *waiting))
        most = max((r.num_output_tokens - r.generated for r in (*running, *waiting)), default=0)
        return ModelNeed(
            name=spec.name,
            state="waking" if self.state == "waking" else "awake" if self.state == "awake" else "asleep",
            weight_bytes=spec.weight_bytes,
            most_bytes=capacity_bytes - spec.weight_bytes,
            budget_bytes=self.budget_bytes,
            held_bytes=spec.weight_bytes if self.state == "leaving" else self.held_bytes,
            num_running=len(running),
            num_waiting=len(self.waiting),
            running_bytes=sum(self._bytes_ahead(r) for r in running),
            first_bytes=self._bytes_ahead(first) if first else 0,
            waiting_bytes=sum(self._bytes_ahead(r) for r in waiting),
            work_s=left * spec.device.token_s + most * spec.device.fixed_s,
            wake_s=spec.load_s,
            waited_s=max((now - (r.at if r.first_token_at is None else r.preempted_at) for r in waiting), default=0.0),
            lost_s=now - self.lost_at,
            turn_s=0.0 if self.state == "waking" else now - self.turn_at,
            idle_s=0.0 if self.has_work else now - self.idle_at,
            probability=self.history.probability(now, arbiter.HORIZON_S),
            ttft_s=spec.ttft_s,
            share=spec.share,
            keep=spec.keep,
        )

    def preempt_to(self, budget_bytes: int, now: float) -> None:
        """Preempt the latest requests until the rest fit."""
        needed_bytes = self._needed_bytes
        while self.running and needed_bytes > budget_bytes:
            request = self.running.pop()
            needed_bytes -= self._kv_bytes(request.length)
            request.computed, request.preempted_at = 0, now
            self.waiting.appendleft(request)
            self.num_preempted += 1

    def compute(self, now: float) -> float:
        """Compute a step that begins now; returns its seconds, 0 if there is no memory for one."""
        device, owned = self.spec.device, self._needed_bytes
        while self.waiting and len(self.running) < device.max_num_seqs:
            if (more := self._first_bytes) + owned > self.budget_bytes:
                break
            owned += more
            self.running.append(self.waiting.popleft())
        self.preempt_to(self.budget_bytes, now)
        if not self.running:
            return 0.0
        left, num_tokens, attended, decode_attended = device.step_tokens, 0, 0, 0
        sampling: list[ShelfRequest] = []
        for request in self.running:
            chunk = min(request.length - request.computed, left)
            if not chunk:
                continue
            if chunk == 1:
                decode_attended += request.computed
            else:
                attended += chunk * request.computed + chunk * chunk // 2
            left, num_tokens = left - chunk, num_tokens + chunk
            request.computed += chunk
            if request.computed == request.length:
                sampling.append(request)
        seconds = device.step_s(num_tokens, attended, decode_attended)
        self._end_step(sampling, now + seconds)
        return seconds

    def _end_step(self, sampling: list[ShelfRequest], now: float) -> None:
        self._stepped_at, self._step_gap_s = now, now - self._stepped_at
        for request in sampling:
            request.generated += 1
            if request.first_token_at is None:
                request.first_token_at = now
            if request.generated >= request.num_output_tokens:
                request.ended_at = now
                self._freed.add(request.length, now)
        if any(request.ended_at is not None for request in sampling):
            self.running = [request for request in self.running if request.ended_at is None]
            if not self.has_work:
                self.idle_at = now

    def status(self) -> ModelStatus:
        sleeps = self.state != "awake"
        return ModelStatus(
            name=self.spec.name,
            state="waking" if self.state == "waking" else "asleep" if sleeps else "awake",
            weight_bytes=self.spec.weight_bytes,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            wake_s=max(self.turn_wait_s, self.spec.load_s) if sleeps else self.turn_wait_s,
        )

    def report(self, now: float) -> ReplicaReport:
        """The engine's load report, without prefixes."""
        device, token_bytes = self.spec.device, self.spec.kv_token_bytes
        step = StepTimes(device.fixed_s, device.token_s, device.attended_s)
        decodes = [r for r in self.running if r.computed and r.length - r.computed == 1]
        queued = [r.length - r.computed for r in (*self.running, *self.waiting) if r.length - r.computed > 1]
        queued_tokens = sum(queued)
        context = sum(r.computed for r in decodes)
        return ReplicaReport(
            made_at=now,
            unit_tokens=_BLOCK,
            step=step,
            step_tokens=device.step_tokens,
            max_num_seqs=device.max_num_seqs,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            queued_tokens=queued_tokens,
            queued_s=step.seconds(
                -(-queued_tokens // device.step_tokens), queued_tokens, sum(attended_tokens(n, 0) for n in queued)
            ),
            num_decodes=len(decodes),
            decode_s=len(decodes) * device.token_s + context * device.decode_attended_s,
            free_tokens=max(self.budget_bytes - self.held_bytes, 0) // token_bytes,
            total_tokens=self.budget_bytes // token_bytes,
            freed_tokens_per_s=self._freed.at(now),
            budget_bytes=self.budget_bytes,
        )

    @property
    def _first_bytes(self) -> int:
        """KV memory with which the next request begins."""
        return self._kv_bytes(self.waiting[0].length + 1)

    @property
    def _needed_bytes(self) -> int:
        """KV memory for the next steps of the running requests."""
        return sum(self._kv_bytes(request.length) for request in self.running)

    def _kv_bytes(self, num_tokens: int) -> int:
        return -(-num_tokens // _BLOCK) * _BLOCK * self.spec.kv_token_bytes

    def _bytes_ahead(self, request: ShelfRequest) -> int:
        """KV memory of a request until the next plan."""
        return self._kv_bytes(min(request.length + _AHEAD, request.num_tokens + request.num_output_tokens))
