"""Simulated shelf: many models on one device, the real arbiter, step times by data sheet, one step after the other."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.config.shelf import Keep
from app.engine.shelf.allocation import Allocation, ModelNeed
from app.engine.shelf.arbiter import HORIZON_S
from app.engine.shelf.arrivals import ArrivalHistory
from benchmarks.simulator.device import Device

# Tokens of a block, and tokens that a running sequence may add before the next plan.
_BLOCK, _AHEAD = 16, 64
# Plans are made at changes, and this often while there is work.
_PLAN_S = 0.05
# Device seconds of a model's turn in the deficit round robin.
_QUANTUM_S = 0.02


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


class MemoryPolicy(Protocol):
    """Decides about a device's memory, as `Arbiter` does."""

    capacity_bytes: int

    def plan(self, needs: Sequence[ModelNeed]) -> Allocation: ...


@dataclass(slots=True)
class ShelfOutcome:
    """Attributes:
    timeline: (seconds, bytes of weights, of KV memory in use, bytes of KV budgets).
    """

    requests: list[ShelfRequest]
    ended_at: float = 0.0
    num_wakes: int = 0
    num_sleeps: int = 0
    num_preempted: int = 0
    num_plans: int = 0
    busy_s: float = 0.0
    wake_s: float = 0.0
    timeline: list[tuple[float, int, int, int]] = field(default_factory=list)


class _Model:
    def __init__(self, spec: ShelfModel, now: float) -> None:
        self.spec = spec
        self.state = "asleep"
        self.budget_bytes = 0
        self.waiting: deque[ShelfRequest] = deque()
        self.running: list[ShelfRequest] = []
        self.history = ArrivalHistory()
        self.turn_at = self.idle_at = now
        self.lost_at = -math.inf
        self.changes_at = math.inf  # end of a wake or a sleep
        self.credit_s = 0.0

    def kv_bytes(self, num_tokens: int) -> int:
        return -(-num_tokens // _BLOCK) * _BLOCK * self.spec.kv_token_bytes

    def bytes_ahead(self, request: ShelfRequest) -> int:
        """KV memory of a request until the next plan."""
        return self.kv_bytes(min(request.length + _AHEAD, request.num_tokens + request.num_output_tokens))

    @property
    def held_bytes(self) -> int:
        return sum(self.kv_bytes(request.computed) for request in self.running)

    @property
    def needed_bytes(self) -> int:
        """KV memory for the next steps of the running requests."""
        return sum(self.kv_bytes(request.length) for request in self.running)

    def need(self, now: float, capacity_bytes: int) -> ModelNeed:
        spec, running = self.spec, self.running
        waiting = list(itertools.islice(self.waiting, spec.device.max_num_seqs))
        has_work = bool(running or waiting)
        first = (running or waiting)[0] if has_work else None
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
            running_bytes=sum(self.bytes_ahead(r) for r in running),
            first_bytes=self.bytes_ahead(first) if first else 0,
            waiting_bytes=sum(self.bytes_ahead(r) for r in waiting),
            work_s=left * spec.device.token_s + most * spec.device.fixed_s,
            wake_s=spec.load_s,
            waited_s=max((now - (r.at if r.first_token_at is None else r.preempted_at) for r in waiting), default=0.0),
            lost_s=now - self.lost_at,
            turn_s=0.0 if self.state == "waking" else now - self.turn_at,
            idle_s=0.0 if has_work else now - self.idle_at,
            probability=self.history.probability(now, HORIZON_S),
            ttft_s=spec.ttft_s,
            share=spec.share,
            keep=spec.keep,
        )

    def preempt_to(self, budget_bytes: int, now: float) -> int:
        """Preempt the latest requests until the rest fit; returns their number."""
        count = 0
        while self.running and self.needed_bytes > budget_bytes:
            request = self.running.pop()
            request.computed, request.preempted_at = 0, now
            self.waiting.appendleft(request)
            count += 1
        return count


class ShelfSimulation:
    """Simulates one device. Deterministic; for one run.

    Weights are loaded one model after the other, beside steps. A sleep takes no time of steps.
    """

    def __init__(self, models: Sequence[ShelfModel], policy: MemoryPolicy) -> None:
        self._policy = policy
        self._models = {spec.name: _Model(spec, 0.0) for spec in models}
        self._ring: deque[_Model] = deque(self._models.values())
        self._loads: deque[_Model] = deque()
        self._now = 0.0
        self._plan_at = 0.0
        self.outcome = ShelfOutcome([])

    def run(self, requests: Sequence[ShelfRequest], until_s: float = math.inf) -> ShelfOutcome:
        """Serve requests, which are in order of arrival; those that have not ended at `until_s` stay unfinished."""
        arrivals = deque(requests)
        self.outcome.requests = list(requests)
        for model in self._models.values():
            model.turn_at = model.idle_at = self._now
        while self._now < until_s:
            changed = self._arrive(arrivals) | self._finish_changes()
            if changed or self._now >= self._plan_at:
                self._plan()
            if self._step():
                continue
            at = min(
                arrivals[0].at if arrivals else math.inf,
                min(model.changes_at for model in self._models.values()),
                self._plan_at if any(m.waiting for m in self._models.values()) else math.inf,
            )
            if at == math.inf:
                break
            self._now = max(self._now, at)
        self.outcome.ended_at = self._now
        return self.outcome

    def _arrive(self, arrivals: deque[ShelfRequest]) -> bool:
        changed = False
        while arrivals and arrivals[0].at <= self._now:
            request, changed = arrivals.popleft(), True
            model = self._models[request.model]
            model.history.note(request.at)
            if model.kv_bytes(request.num_tokens + request.num_output_tokens) <= self._room_bytes(model.spec):
                model.waiting.append(request)
            else:
                request.refused = True
        return changed

    def _finish_changes(self) -> bool:
        changed = False
        for model in self._models.values():
            if model.changes_at <= self._now:
                changed = True
                model.turn_at = model.changes_at
                if model.state == "waking":
                    model.state, model.lost_at = "awake", -math.inf
                else:
                    model.state = "asleep"
                model.changes_at = math.inf
        if self._loads and self._loads[0].state == "awake":
            self._loads.popleft()
            if self._loads:
                self._load(self._loads[0])
        return changed

    def _room_bytes(self, spec: ShelfModel) -> int:
        """KV memory that the model can ever have."""
        always = sum(m.spec.weight_bytes for m in self._models.values() if m.spec.keep == "always" and m.spec != spec)
        return self._policy.capacity_bytes - always - spec.weight_bytes

    def _load(self, model: _Model) -> None:
        model.changes_at = self._now + model.spec.load_s
        self.outcome.wake_s += model.spec.load_s

    # ---- memory ----

    def _plan(self) -> None:
        self._plan_at = self._now + _PLAN_S
        capacity = self._policy.capacity_bytes
        allocation = self._policy.plan([model.need(self._now, capacity) for model in self._models.values()])
        self.outcome.num_plans += 1
        self._carry_out(allocation)
        weights = sum(m.spec.weight_bytes for m in self._models.values() if m.state != "asleep")
        used = sum(m.held_bytes for m in self._models.values())
        budgets = sum(m.budget_bytes for m in self._models.values())
        assert weights + budgets <= capacity, f"{weights} bytes of weights, {budgets} of KV memory, of {capacity}"
        if not self.outcome.timeline or self._now - self.outcome.timeline[-1][0] >= 1.0:
            self.outcome.timeline.append((self._now, weights, used, budgets))

    def _carry_out(self, allocation: Allocation) -> None:
        for name, budget_bytes in allocation.budgets.items():
            model = self._models[name]
            model.budget_bytes = min(model.budget_bytes, budget_bytes)
        for name in allocation.preempt:
            model = self._models[name]
            budget_bytes = 0 if name in allocation.sleep else allocation.budgets[name]
            self.outcome.num_preempted += model.preempt_to(budget_bytes, self._now)
            if not model.running:
                model.lost_at = self._now
        for name in allocation.sleep:
            model = self._models[name]
            assert not model.running, f"{name} is put to sleep while it runs"
            assert model.state == "awake"
            model.state, model.budget_bytes = "leaving", 0
            if model.waiting:
                model.lost_at = self._now
            model.changes_at = self._now + model.spec.sleep_s
            self.outcome.num_sleeps += 1
        for name in allocation.wake:
            model = self._models[name]
            model.state = "waking"
            self.outcome.num_wakes += 1
            self._loads.append(model)
            if len(self._loads) == 1:
                self._load(model)
        for name, budget_bytes in allocation.budgets.items():
            model = self._models[name]
            if budget_bytes and not model.budget_bytes and model.lost_at > -math.inf:
                model.turn_at, model.lost_at = self._now, -math.inf
            model.budget_bytes = budget_bytes

    # ---- steps ----

    def _step(self) -> bool:
        """One step of the model whose turn it is; whether there was one."""
        in_debt = True
        while in_debt:
            in_debt = False
            for _ in range(len(self._ring)):
                model = self._ring[0]
                if model.credit_s > 0 and self._compute(model):
                    return True
                if model.state == "awake" and (model.running or model.waiting):
                    in_debt |= model.credit_s <= 0
                    model.credit_s = min(model.credit_s, 0.0) + _QUANTUM_S * model.spec.share
                else:
                    model.credit_s = 0.0
                self._ring.rotate(-1)
        return False

    def _compute(self, model: _Model) -> bool:
        if model.state != "awake":
            return False
        device = model.spec.device
        owned = model.needed_bytes
        while model.waiting and len(model.running) < device.max_num_seqs:
            needed = model.kv_bytes(model.waiting[0].length + 1)
            if owned + needed > model.budget_bytes:
                break
            owned += needed
            model.running.append(model.waiting.popleft())
        self.outcome.num_preempted += model.preempt_to(model.budget_bytes, self._now)
        if not model.running:
            return False
        left, num_tokens, attended, decode_attended = device.step_tokens, 0, 0, 0
        sampling: list[ShelfRequest] = []
        for request in model.running:
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
        self._now += seconds
        model.credit_s -= seconds
        self.outcome.busy_s += seconds
        for request in sampling:
            request.generated += 1
            if request.first_token_at is None:
                request.first_token_at = self._now
            if request.generated >= request.num_output_tokens:
                request.ended_at = self._now
        if any(request.ended_at is not None for request in sampling):
            model.running = [request for request in model.running if request.ended_at is None]
            if not (model.running or model.waiting):
                model.idle_at = self._now
                self._plan_at = self._now
        return True


def by_model(requests: Sequence[ShelfRequest]) -> Mapping[str, list[ShelfRequest]]:
    """Requests of each model, the most popular first."""
    found: dict[str, list[ShelfRequest]] = {}
    for request in requests:
        found.setdefault(request.model, []).append(request)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))
