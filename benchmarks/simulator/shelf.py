"""Simulated shelf: many models on one device, the real arbiter and turns, step times by data sheet, one step after the
other."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.simulator.shelf_model import ShelfModel, ShelfRequest, SimulatedModel
from folio.app.engine.report import ReplicaReport
from folio.app.engine.step.step_thread import DeficitRoundRobin
from folio.app.fleet.shelf_load import reports_for_routers
from folio.app.fleet.status import ModelReport
from folio.app.shelf.allocation import Allocation, ModelNeed
from folio.app.shelf.status import DeviceStatus

# Time between two plans: while requests wait, while there is work, and without any. A shelf plans every 20 ms while
# requests wait, which takes the simulator twice as long and changes little.
_WAITING_S, _WORKING_S, _IDLE_S = 0.05, 0.25, 1.0


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


class ShelfSimulation:
    """Simulates one device. Deterministic; for one run.

    Weights are loaded one model after the other, beside steps. A sleep takes no time of steps.
    """

    def __init__(self, models: Sequence[ShelfModel], policy: MemoryPolicy) -> None:
        self._policy = policy
        self._models = {spec.name: SimulatedModel(spec) for spec in models}
        self._always_bytes = sum(spec.weight_bytes for spec in models if spec.keep == "always")
        self._turns = DeficitRoundRobin[SimulatedModel]()
        self._loads: deque[SimulatedModel] = deque()
        self._now = self._plan_at = self._planned_at = 0.0
        self.outcome = ShelfOutcome([])

    def run(self, requests: Sequence[ShelfRequest], until_s: float = math.inf) -> ShelfOutcome:
        """Serve requests, which are in order of arrival; those that have not ended at `until_s` stay unfinished."""
        for request in requests:
            if request.at >= until_s:
                break
            self.advance(request.at)
            self.submit(request)
        while self._now < until_s and any(model.has_work for model in self._models.values()):
            self.advance(min(self._now + _IDLE_S, until_s))
        return self.end(requests)

    def submit(self, request: ShelfRequest) -> None:
        """Add a request that arrives at the time to which the simulation has advanced."""
        model = self._models[request.model]
        spec = model.spec
        others_bytes = self._always_bytes - (spec.weight_bytes if spec.keep == "always" else 0)
        model.submit(request, self._policy.capacity_bytes - spec.weight_bytes - others_bytes, self._now)
        self._plan_at = self._now

    def advance(self, until_s: float) -> None:
        """Simulate until this time, or until the end of the step that is computed then."""
        while self._now < until_s:
            self._finish_changes()
            if self._now >= self._plan_at:
                self._plan()
            if not self._step():
                changes_at = min(model.changes_at for model in self._models.values())
                self._now = max(self._now, min(until_s, self._plan_at, changes_at))

    def end(self, requests: Sequence[ShelfRequest]) -> ShelfOutcome:
        """The outcome of these requests, at the end of a run."""
        self.outcome.requests, self.outcome.ended_at = list(requests), self._now
        self.outcome.num_preempted = sum(model.num_preempted for model in self._models.values())
        return self.outcome

    def reports(self) -> dict[str, ReplicaReport]:
        """The load of each model, as routers learn of it."""
        models = [ModelReport(model.status(), model.report(self._now)) for model in self._models.values()]
        return reports_for_routers(models, DeviceStatus(self._policy.capacity_bytes, 0, 0, 0, 0))

    @property
    def awake(self) -> list[str]:
        return [name for name, model in self._models.items() if model.state in ("awake", "waking")]

    def _finish_changes(self) -> None:
        for model in self._models.values():
            if model.changes_at > self._now:
                continue
            self._plan_at = self._now
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

    def _load(self, model: SimulatedModel) -> None:
        model.changes_at = self._now + model.spec.load_s
        self.outcome.wake_s += model.spec.load_s

    # ---- memory ----

    def _plan(self) -> None:
        capacity, models = self._policy.capacity_bytes, self._models.values()
        allocation = self._policy.plan([model.need(self._now, capacity) for model in models])
        self.outcome.num_plans += 1
        self._carry_out(allocation)
        self._planned_at = self._now
        waits, works = any(m.waiting for m in models), any(m.running for m in models)
        self._plan_at = self._now + (_WAITING_S if waits else _WORKING_S if works else _IDLE_S)
        weights = sum(m.spec.weight_bytes for m in models if m.state != "asleep")
        budgets = sum(m.budget_bytes for m in models)
        assert weights + budgets <= capacity, f"{weights} bytes of weights, {budgets} of KV memory, of {capacity}"
        if not self.outcome.timeline or self._now - self.outcome.timeline[-1][0] >= 1.0:
            self.outcome.timeline.append((self._now, weights, sum(m.held_bytes for m in models), budgets))

    def _carry_out(self, allocation: Allocation) -> None:
        for name, budget_bytes in allocation.budgets.items():
            model = self._models[name]
            model.budget_bytes = min(model.budget_bytes, budget_bytes)
        for name in allocation.preempt:
            model = self._models[name]
            model.preempt_to(0 if name in allocation.sleep else allocation.budgets[name], self._now)
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
        self._grant(allocation)

    def _grant(self, allocation: Allocation) -> None:
        for name, budget_bytes in allocation.budgets.items():
            model = self._models[name]
            if budget_bytes and not model.budget_bytes and model.lost_at > -math.inf:
                model.turn_at, model.lost_at = self._now, -math.inf
            model.budget_bytes = budget_bytes
        for name, model in self._models.items():
            wait = allocation.waits.get(name)
            model.turn_wait_s = 0.0 if wait is None else wait.expected_s

    # ---- steps ----

    def _step(self) -> bool:
        """One step of the model whose turn it is; whether there was one."""
        ready = [model for model in self._models.values() if model.is_ready]
        while ready:
            model = self._turns.next(ready)
            seconds = model.compute(self._now)
            if model.waiting:
                self._plan_at = min(self._plan_at, self._planned_at + _WAITING_S)
            if not seconds:
                ready.remove(model)
                continue
            self._now += seconds
            self.outcome.busy_s += seconds
            self._turns.charge(model, seconds)
            if not model.has_work:
                self._plan_at = self._now
            return True
        return False


def by_model(requests: Sequence[ShelfRequest]) -> Mapping[str, list[ShelfRequest]]:
    """Requests of each model, the most popular first."""
    found: dict[str, list[ShelfRequest]] = {}
    for request in requests:
        found.setdefault(request.model, []).append(request)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))
