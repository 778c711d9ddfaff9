"""Other policies for the memory of a simulated shelf: a static split, and one model at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from folio.app.shelf.allocation import Allocation, ModelNeed


class StaticSplit:
    """Some models are always there, with a fixed part of the KV memory each; requests of others are never served.

    Args:
        kv_bytes: of each model that is served.
    """

    def __init__(self, capacity_bytes: int, kv_bytes: Mapping[str, int]) -> None:
        self.capacity_bytes = capacity_bytes
        self._kv_bytes = kv_bytes

    def plan(self, needs: Sequence[ModelNeed]) -> Allocation:
        wake = tuple(need.name for need in needs if need.state == "asleep" and need.name in self._kv_bytes)
        budgets = {n.name: min(self._kv_bytes[n.name], n.most_bytes) for n in needs if n.name in self._kv_bytes}
        return _allocation(budgets, wake=wake)


class OneAtATime:
    """One model has all of the memory, as with llama-swap. While requests of another one wait, no later ones begin;
    when those that run have ended, the model whose requests have waited longest is next."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes

    def plan(self, needs: Sequence[ModelNeed]) -> Allocation:
        waiting = [need for need in needs if need.num_waiting]
        next_one = max(waiting, key=lambda need: (need.waited_s, need.name), default=None)
        current = next((need for need in needs if need.state != "asleep"), None)
        if current is None:
            if next_one is None or any(need.held_bytes for need in needs):
                return _allocation({})
            return _allocation({next_one.name: next_one.most_bytes}, wake=(next_one.name,))
        others = [need for need in waiting if need is not current]
        if not others or current.state == "waking":
            return _allocation({current.name: current.most_bytes})
        # Requests that came before those of others still begin.
        if current.num_waiting and current.waited_s >= max(need.waited_s for need in others):
            return _allocation({current.name: current.most_bytes})
        if current.num_running:
            return _allocation({current.name: min(current.running_bytes, current.most_bytes)})
        return _allocation({}, sleep={current.name: others[0].name})


def _allocation(
    budgets: Mapping[str, int], wake: tuple[str, ...] = (), sleep: Mapping[str, str | None] | None = None
) -> Allocation:
    return Allocation(budgets=budgets, preempt=(), sleep=sleep or {}, wake=wake, prefetch=(), waits={}, refused={})
