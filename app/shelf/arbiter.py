"""Arbiter: decides how many bytes of a device each model gets.

In this order, from the capacity:

1. weights of models that are kept always;
2. models with requests (`turns`): weights, and KV memory that they can work with; then what their running requests
   need; then what waiting requests would use, and some growth;
3. weights without requests, and cached prefixes, by worth: expected seconds saved × probability of a request, per byte;
4. spare memory, for models that are used, so that new requests need no new plan.

Weights without requests leave the device when something of more worth needs the bytes, when `keep` seconds have passed,
or when they are worth less than the price of memory.

**Carrying out a plan.** The plan counts bytes that exist: max(budget, KV memory held) and weights of each model that
is not asleep, and what others have not given back yet. An `Allocation` raises budgets and wakes models within bytes
that are free at that time, so it can be carried out immediately, in this order: set budgets that are lower than before,
preempt, put to sleep, set the other budgets, wake. Bytes that these steps give back, at once or later, are given out by
the next plan: plan again when models have gone to sleep, when KV memory above a budget has been given back, when
requests come and go, and every 50 ms while requests wait. Planning again without a change changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from folio.app.shelf.allocation import Allocation, ModelNeed, Wait
from folio.app.shelf.turns import Residency, refusals, take_turns

# Requests within this time count for the worth of memory.
HORIZON_S = 60.0
# Price of a byte of memory for a second, in seconds that requests wait: a GiB for a day costs a second.
_PRICE = 1.0 / (1 << 30) / 86_400
# Weights that would have to be read ahead are worth this part of weights that are there: the probability is an
# estimate, and models of like worth must not take turns.
_READ_AHEAD = 1 / 4
# Growth of models with requests: this share of their need, but at most this share of the capacity.
_GROWTH, _MOST_GROWTH = 0.25, 0.02
# Spare memory is given in steps of this share of the capacity, to models that had a request in this time.
_STEP, _USED_S = 1 / 64, 60.0


class Arbiter:
    """Decides about the memory of one device. It has no state: equal needs have equal plans.

    Args:
        capacity_bytes: memory for weights and KV memory of all models.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes

    def refusals(self, needs: Sequence[ModelNeed]) -> Mapping[str, str]:
        """Why a model's requests can never run, for those models."""
        return refusals(self.capacity_bytes, needs)

    def plan(self, needs: Sequence[ModelNeed]) -> Allocation:
        """The changes to make now."""
        turns = take_turns(self.capacity_bytes, needs)
        targets = _Targets(self.capacity_bytes, needs, turns)
        return _step_towards(self.capacity_bytes, needs, turns, targets)


class _Targets:
    """Where the plan leads, once memory has been given back.

    Attributes:
        needed: KV bytes of each resident for its running requests, or to begin.
        budgets: KV bytes of each model that is to be awake.
        sleep: see `Allocation`.
        prefetch: models without requests that are to be awake and are not, the best first.
        beyond: those that would be the next ones with more memory.
    """

    def __init__(self, capacity_bytes: int, needs: Sequence[ModelNeed], turns: Residency) -> None:
        self._capacity_bytes = capacity_bytes
        self._needs = {need.name: need for need in needs}
        self._residents = {name: self._needs[name] for name in turns.residents}
        self.sleep: dict[str, str | None] = {
            name: by for name, by in turns.victims.items() if self._needs[name].keep != "always"
        }
        self.budgets: dict[str, int] = {}
        self.prefetch: list[str] = []
        self.beyond: list[str] = []
        always = (need for need in needs if need.keep == "always")
        awake = {need.name: need for need in (*always, *self._residents.values())}
        self._left_bytes = capacity_bytes - sum(need.weight_bytes for need in awake.values())
        self.budgets = dict.fromkeys(awake, 0)
        self._serve(turns)
        self.needed = {name: self.budgets[name] for name in self._residents}
        self._serve_waiting()
        self._keep_the_worthiest(turns)
        self._give_spare()

    def _serve(self, turns: Residency) -> None:
        """Give residents what running requests need, and no less than what they can work with."""
        residents = self._residents.values()
        self._fill(residents, lambda need: min(need.first_bytes, turns.residents[need.name]))
        self._fill(residents, lambda need: turns.residents[need.name])
        self._fill(residents, lambda need: need.running_bytes)

    def _serve_waiting(self) -> None:
        most_growth = int(_MOST_GROWTH * self._capacity_bytes)

        def wanted(need: ModelNeed) -> int:
            kv_bytes = need.running_bytes + need.waiting_bytes
            return kv_bytes + min(int(_GROWTH * kv_bytes), most_growth)

        self._fill(self._residents.values(), wanted)

    def _keep_the_worthiest(self, turns: Residency) -> None:
        """Give what is left to weights without requests and to caches, by worth per byte."""
        for _, name, is_cache, num_bytes in sorted(self._worthy(turns)):
            if is_cache and name in self.budgets:
                given = max(min(num_bytes, self._left_bytes), 0)
                self.budgets[name] += given
                self._left_bytes -= given
            elif not is_cache and num_bytes <= self._left_bytes:
                self.budgets[name] = 0
                self._left_bytes -= num_bytes
                if self._needs[name].state == "asleep":
                    self.prefetch.append(name)
            elif not is_cache and self._needs[name].state == "awake":
                self.sleep[name] = self._for_whom()
            elif not is_cache:
                self.beyond.append(name)

    def _worthy(self, turns: Residency) -> list[tuple[float, str, bool, int]]:
        """Candidates: (-worth per byte, model, whether its cache, bytes). Models below the price are put to sleep."""
        items: list[tuple[float, str, bool, int]] = []
        for need in self._needs.values():
            name = need.name
            if name in turns.victims or (need.state == "asleep" and turns.waits):
                continue
            cached_bytes = min(need.cached_bytes, need.most_bytes - self.budgets.get(name, 0))
            worth = min(need.probability, 1.0) * need.share if not need.has_work else need.share
            density = math.inf
            if name not in self.budgets:
                density = self._weights_worth(need, worth)
                if density <= 0:
                    if need.state == "awake":
                        self.sleep[name] = None
                    continue
                items.append((-density, name, False, need.weight_bytes))
            if cached_bytes > 0:
                items.append((-min(density, worth * need.cached_s / cached_bytes), name, True, cached_bytes))
        return items

    def _weights_worth(self, need: ModelNeed, worth: float) -> float:
        """Worth per byte of weights of a model that need not be awake; 0 if it is less than the price of memory."""
        if need.has_work:
            return worth * need.wake_s / max(need.weight_bytes, 1) if need.state == "awake" else 0.0
        asleep = need.state == "asleep"
        if need.keep != "auto":
            assert not isinstance(need.keep, str), "models that are kept always have a budget"
            if need.idle_s >= need.keep:
                return 0.0
        density = worth * need.wake_s / max(need.weight_bytes, 1) * (_READ_AHEAD if asleep else 1.0)
        rate = -math.log1p(-min(need.probability, 0.999)) / HORIZON_S
        price = _PRICE * need.weight_bytes * (1 / _READ_AHEAD if asleep else 1.0)
        if (need.keep == "auto" or asleep) and rate * need.wake_s * need.share < price:
            return 0.0
        return max(density, 1e-300)

    def _for_whom(self) -> str | None:
        """The model whose memory grows most."""
        gains = [
            (budget - need.held_bytes + (need.weight_bytes if need.state == "asleep" else 0), name)
            for name, budget in self.budgets.items()
            for need in (self._needs[name],)
        ]
        gain, name = max(gains, default=(0, ""))
        return name if gain > 0 else None

    def _give_spare(self) -> None:
        """Share what is left in steps, and leave budgets as they are where that makes a difference of less than one."""
        step_bytes = max(int(_STEP * self._capacity_bytes), 1)
        used = [
            need
            for name in self.budgets
            for need in (self._needs[name],)
            if name in self._residents or (not need.has_work and need.idle_s < _USED_S)
        ]
        shares = sum(need.share for need in used)
        left_bytes = self._left_bytes
        for need in used:
            spare = int(left_bytes * need.share / shares) // step_bytes * step_bytes
            spare = max(min(spare, need.most_bytes - self.budgets[need.name]), 0)
            target = self.budgets[need.name] + spare
            more = need.budget_bytes - target
            if need.budget_bytes >= self.budgets[need.name] and abs(more) < step_bytes and more <= 0:
                spare += more
            self.budgets[need.name] += spare
            self._left_bytes -= spare
        for need in used:  # what is left after rounding keeps budgets that are a little larger
            more = need.budget_bytes - self.budgets[need.name]
            if 0 < more <= min(self._left_bytes, step_bytes):
                self.budgets[need.name] += more
                self._left_bytes -= more

    def _fill(self, needs: Iterable[ModelNeed], wanted: Callable[[ModelNeed], int]) -> None:
        """Raise budgets towards what is wanted while there is memory: equal parts of it by share, to no model more than
        it wants (max-min fairness)."""
        wants = [
            (want - self.budgets[need.name], need)
            for need in needs
            if (want := min(wanted(need), need.most_bytes)) > self.budgets[need.name]
        ]
        wants.sort(key=lambda item: (item[0] / item[1].share, item[1].name))
        shares = sum(need.share for _, need in wants)
        for want, need in wants if self._left_bytes > 0 else ():
            given = min(want, int(self._left_bytes * need.share / shares) if shares > need.share else self._left_bytes)
            self.budgets[need.name] += given
            self._left_bytes -= given
            shares -= need.share


def _step_towards(capacity_bytes: int, needs: Sequence[ModelNeed], turns: Residency, targets: _Targets) -> Allocation:
    """The part of the targets that is possible now, with the bytes that exist."""
    by_name = {need.name: need for need in needs}
    mapped = [need for need in needs if need.state != "asleep"]
    budgets = {need.name: min(targets.budgets.get(need.name, 0), need.budget_bytes) for need in mapped}
    free_bytes = capacity_bytes - sum(
        need.held_bytes if need.state == "asleep" else need.weight_bytes + max(need.held_bytes, budgets[need.name])
        for need in needs
    )

    def raise_to(name: str, budget_bytes: int) -> None:
        nonlocal free_bytes
        counted = max(by_name[name].held_bytes, budgets[name])
        budget_bytes = min(budget_bytes, counted + max(free_bytes, 0))
        if budget_bytes > budgets[name]:
            free_bytes -= max(budget_bytes - counted, 0)
            budgets[name] = budget_bytes

    for name, needed in targets.needed.items():
        if name in budgets:
            raise_to(name, needed)
    asleep = [name for name in targets.budgets if by_name[name].state == "asleep" and name not in targets.prefetch]
    wake: list[str] = []
    for name in (*asleep, *targets.prefetch[:1]):
        if by_name[name].weight_bytes > free_bytes or by_name[name].held_bytes:
            break
        free_bytes -= by_name[name].weight_bytes
        wake.append(name)
        budgets[name] = 0
        if name in targets.needed:
            raise_to(name, targets.needed[name])
    if len(wake) >= len(asleep):
        for name, target in targets.budgets.items():
            if name in budgets:
                raise_to(name, target)
    waits = dict(turns.waits)
    for name in turns.residents:
        need = by_name[name]
        if need.num_waiting and need.state != "awake":
            waits[name] = Wait("waking", need.wake_s)
    for name in targets.sleep:
        del budgets[name]
    preempt = [n.name for n in needs if n.num_running and targets.budgets.get(n.name, -1) < n.running_bytes]
    return Allocation(
        budgets=budgets,
        preempt=tuple(preempt),
        sleep=targets.sleep,
        wake=tuple(wake),
        prefetch=(*targets.prefetch, *targets.beyond),
        waits=waits,
        refused=turns.refused,
    )
