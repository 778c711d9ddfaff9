"""Turns: which models with requests have memory, while not all of them fit.

A *resident* has memory to run requests. A *claimant* has requests and no memory for them. Claimants come in this
order, and within it by the time that they have waited, as a multiple of their target for the first token, weighted:

1. *overdue* claimants, which have waited for a large multiple of their target
2. those that can still be in time
3. late ones; a model that has lost its turn is late, whatever its requests have waited for

What a claimant may take:

- While it has time, memory that running requests do not need: idle weights, caches, spare memory.
- When it is *due*, memory of running requests, which are preempted down to what each resident can work with; short work
  may end first. If that is not enough, residents are replaced whose turn is over. A turn lasts a multiple of the time
  to wake both models, a longer one before a claimant that is late.
- While an overdue claimant waits for turns to end, no later claimant gets memory, so that a large model is not
  overtaken by small ones without end.

Every claimant becomes overdue, residents' turns end, and the time of an overtaken claimant grows: each one gets its
turn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from folio.app.shelf.allocation import ModelNeed, Wait

# A turn lasts at least this long, ...
LEAST_TURN_S = 1.0
# ... and this multiple of the exchange's wake times, if the claimant can be in time, and if it is late. The latter
# bounds the share of time that an overloaded device spends on exchanges.
TURN_WAKES, LATE_TURN_WAKES = 2.0, 10.0
# A claimant that can be in time is due when less than this share of its target is left.
DUE_SHARE = 0.8
# A claimant that has waited for this multiple of its target is overdue.
OVERDUE_TARGETS = 20.0
# KV memory that a resident can work with, as a share of its weights: with much less, each step reads weights for few
# sequences.
WORKING_SHARE = 0.1


@dataclass(slots=True, eq=False)
class Residency:
    """Which models have memory.

    Attributes:
        residents: models that may run requests, with the KV memory that each can work with, in bytes; those that have
            memory already come first.
        victims: residents that must give theirs up, and for which model.
        waits: of claimants without memory.
        refused: why a model's requests can never run.
    """

    residents: dict[str, int] = field(default_factory=dict)
    victims: dict[str, str] = field(default_factory=dict)
    waits: dict[str, Wait] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def refusals(capacity_bytes: int, needs: Sequence[ModelNeed]) -> dict[str, str]:
    """Models that cannot run one request even alone beside the models that are kept always, with the reason."""
    always_bytes = sum(need.weight_bytes for need in needs if need.keep == "always")
    refused = {}
    for need in needs:
        if need.first_bytes > need.most_bytes and not need.num_running:
            refused[need.name] = (
                f"a request of {need.name!r} takes {need.first_bytes} bytes of KV memory; its kv_memory_bytes, less "
                f"pinned prefixes, leaves {need.most_bytes}: raise kv_memory_bytes, or unpin prefixes"
            )
            continue
        beside_bytes = always_bytes - (need.weight_bytes if need.keep == "always" else 0)
        if need.weight_bytes + need.first_bytes + beside_bytes > capacity_bytes:
            kept = f", models with keep: always {beside_bytes}" if beside_bytes else ""
            refused[need.name] = (
                f"{need.name!r} takes {need.weight_bytes} bytes of weights and {need.first_bytes} of KV memory for one "
                f"request{kept}; the device has {capacity_bytes} for them: raise device_memory_bytes"
                + (", keep fewer models always" if kept else "")
                + ", or lower max_model_len"
            )
    return refused


def take_turns(capacity_bytes: int, needs: Sequence[ModelNeed]) -> Residency:
    """Decide which models with requests have memory."""
    return _TurnTaking(capacity_bytes, needs).turns


class _TurnTaking:
    def __init__(self, capacity_bytes: int, needs: Sequence[ModelNeed]) -> None:
        self.turns = Residency(refused=refusals(capacity_bytes, needs))
        self._free_bytes = capacity_bytes - sum(need.weight_bytes for need in needs if need.keep == "always")
        self._floors = {need.name: self._floor_bytes(need) for need in needs}
        residents = [need for need in needs if _is_resident(need)]
        self._residents = self._that_fit(residents)
        self._replaceable = {need.name for need in self._residents if need.state == "awake"}
        others = {need.name for need in self._residents} | self.turns.refused.keys()
        claimants = [need for need in needs if need.num_waiting and need.name not in others]
        claimants.sort(key=_order)
        self._admit([need for need in claimants if need.name not in self.turns.victims])
        self.turns.residents = {need.name: self._floors[need.name] for need in self._residents}

    def _floor_bytes(self, need: ModelNeed) -> int:
        """KV memory with which the model can work; what its first request needs, if no more is possible."""
        working_bytes = min(need.running_bytes + need.waiting_bytes, int(WORKING_SHARE * need.weight_bytes))
        room_bytes = self._free_bytes - _own_weight_bytes(need)
        return max(min(max(need.first_bytes, working_bytes), need.most_bytes, room_bytes), 0)

    def _bytes(self, need: ModelNeed, *, whole: bool = False) -> int:
        """Memory that the model takes as a resident, with all of its running requests or without."""
        kv_bytes = self._floors[need.name]
        if whole:
            kv_bytes = max(kv_bytes, min(need.running_bytes, need.most_bytes))
        return _own_weight_bytes(need) + kv_bytes

    def _that_fit(self, residents: list[ModelNeed]) -> list[ModelNeed]:
        """The residents that still fit now that their requests have grown. First each one gets less to work with; then
        those are dropped that do not fit beside the ones with shorter turns."""
        kept = sorted(residents, key=lambda need: (need.state != "waking", need.turn_s, need.name))
        taken_bytes = sum(map(self._bytes, kept))
        least_bytes = {need.name: min(need.first_bytes, self._floors[need.name]) for need in kept}
        spare_bytes = taken_bytes - sum(_own_weight_bytes(need) + least_bytes[need.name] for need in kept)
        if 0 < taken_bytes - self._free_bytes <= spare_bytes:
            part = 1 - (taken_bytes - self._free_bytes) / spare_bytes
            for name, least in least_bytes.items():
                self._floors[name] = least + int(part * (self._floors[name] - least))
            return kept
        fit: list[ModelNeed] = []
        free_bytes = self._free_bytes
        for need in kept:
            num_bytes = self._bytes(need)
            if fit and need.state == "awake" and num_bytes > free_bytes:
                self.turns.victims[need.name] = fit[0].name
                continue
            fit.append(need)
            free_bytes -= num_bytes
        return fit

    def _admit(self, claimants: list[ModelNeed]) -> None:
        whole_bytes = self._free_bytes - sum(self._bytes(need, whole=True) for need in self._residents)
        blocked: list[ModelNeed] = []
        for i, claimant in enumerate(claimants):
            needed_bytes = self._bytes(claimant)
            if needed_bytes <= whole_bytes:
                self._residents.append(claimant)
                whole_bytes -= needed_bytes
            elif not _is_due(claimant):
                blocked.append(claimant)
            elif self._replace(claimant, needed_bytes):
                whole_bytes = self._free_bytes - sum(self._bytes(need, whole=True) for need in self._residents)
            elif _waited_targets(claimant) > OVERDUE_TARGETS:
                blocked += claimants[i:]
                break
            else:
                blocked.append(claimant)
        self._estimate_waits(blocked)

    def _replace(self, claimant: ModelNeed, needed_bytes: int) -> bool:
        """Admit a due claimant, in place of residents whose turn is over if necessary; whether it fits."""
        free_bytes = self._free_bytes
        over: list[tuple[ModelNeed, int]] = []
        for need in self._residents:
            ends_soon = _ends_soon(need, claimant)
            taken_bytes = self._bytes(need, whole=ends_soon)
            free_bytes -= taken_bytes
            if not ends_soon and need.name in self._replaceable and need.turn_s >= _turn_s(need, claimant):
                over.append((need, taken_bytes))
        over.sort(key=lambda item: (-item[0].turn_s / _turn_s(item[0], claimant), item[0].name))
        victims: list[tuple[ModelNeed, int]] = []
        while free_bytes < needed_bytes:
            if not over:
                return False
            victims.append(over.pop(0))
            free_bytes += victims[-1][1]
        for victim, taken_bytes in victims:
            if free_bytes - taken_bytes >= needed_bytes:
                free_bytes -= taken_bytes
            else:
                self._residents.remove(victim)
                self.turns.victims[victim.name] = claimant.name
        self._residents.append(claimant)
        return True

    def _estimate_waits(self, blocked: list[ModelNeed]) -> None:
        """Assume that residents stay until their turn ends, and each claimant for a whole turn."""
        if not blocked:
            return
        free_bytes, at_s = self._free_bytes - sum(map(self._bytes, self._residents)), 0.0
        ends: list[tuple[float, int]] = []
        for need in self._residents:
            over_in_s = max(_turn_s(need, blocked[0]) - need.turn_s, 0.0)
            ends.append((min(over_in_s, need.work_s or over_in_s), self._bytes(need)))
        heapq.heapify(ends)
        for claimant in blocked:
            needed_bytes = self._bytes(claimant)
            while free_bytes < needed_bytes and ends:
                end_s, freed_bytes = heapq.heappop(ends)
                at_s, free_bytes = max(at_s, end_s), free_bytes + freed_bytes
            free_bytes -= needed_bytes
            wake_s = _wake_s(claimant)
            self.turns.waits[claimant.name] = Wait("turn", at_s + wake_s)
            heapq.heappush(ends, (at_s + wake_s + _late_turn_s(claimant, claimant), needed_bytes))


def _is_resident(need: ModelNeed) -> bool:
    if need.state == "waking" or need.num_running:
        return True
    # Between two batches of its turn.
    return need.state == "awake" and bool(need.num_waiting) and need.turn_s < _late_turn_s(need, need)


def _own_weight_bytes(need: ModelNeed) -> int:
    """Weights that leave the device with the model's turn."""
    return 0 if need.keep == "always" else need.weight_bytes


def _wake_s(need: ModelNeed) -> float:
    return need.wake_s if need.state == "asleep" else 0.0


def _spare_s(claimant: ModelNeed) -> float:
    """Time until the claimant misses its target; the time to compute its prompt is not known here."""
    return claimant.ttft_s - claimant.waited_s - _wake_s(claimant)


def _is_in_time(claimant: ModelNeed) -> bool:
    return _spare_s(claimant) > 0 and claimant.lost_s == math.inf


def _is_due(claimant: ModelNeed) -> bool:
    return not _is_in_time(claimant) or _spare_s(claimant) <= DUE_SHARE * claimant.ttft_s


def _waited_targets(claimant: ModelNeed) -> float:
    """Time without memory in multiples of the target, weighted. A backlog from before its last turn does not count."""
    return claimant.share * min(claimant.waited_s, claimant.lost_s) / claimant.ttft_s


def _order(claimant: ModelNeed) -> tuple[int, float, str]:
    waited = _waited_targets(claimant)
    stage = 0 if waited > OVERDUE_TARGETS else 1 if _is_in_time(claimant) else 2
    return stage, -waited, claimant.name


def _turn_s(resident: ModelNeed, claimant: ModelNeed) -> float:
    """How long the resident's turn lasts, if this claimant waits for it to end."""
    if _is_in_time(claimant):
        return max(LEAST_TURN_S, TURN_WAKES * (resident.wake_s + claimant.wake_s))
    return _late_turn_s(resident, claimant)


def _late_turn_s(resident: ModelNeed, claimant: ModelNeed) -> float:
    return max(LEAST_TURN_S, LATE_TURN_WAKES * (resident.wake_s + claimant.wake_s))


def _ends_soon(resident: ModelNeed, claimant: ModelNeed) -> bool:
    """Whether the resident's work is better finished first. It may be continued by new requests, so that the claimant
    waits for it no longer than for a turn."""
    soon = 0 < resident.work_s <= resident.wake_s + claimant.wake_s
    return soon and min(claimant.waited_s, claimant.lost_s) < _late_turn_s(resident, claimant)
