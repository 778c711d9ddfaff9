"""Places for batches' requests: turns, pauses, and what is left to others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from folio.app.api.batches.gate import LineGate, spare_lines

from .fake import load_of


async def entered(gate: LineGate, owners: list[str]) -> list[str]:
    """The order in which requests of owners come in, one at a time."""
    order: list[str] = []

    async def go(owner: str) -> None:
        await gate.enter(owner)
        order.append(owner)
        gate.leave()

    tasks = [asyncio.create_task(go(owner)) for owner in owners]
    await asyncio.sleep(0)
    gate.set_limit(1)
    await asyncio.gather(*tasks)
    return order


async def test_owners_take_turns() -> None:
    assert await entered(LineGate(), ["a", "a", "a", "b", "c", "c"]) == ["a", "b", "c", "a", "c", "a"]


async def test_a_paused_owner_delays_nobody() -> None:
    gate = LineGate()
    gate.pause(0.05, "a")
    assert await entered(gate, ["a", "b", "b"]) == ["b", "b", "a"]


async def test_a_pause_of_all_ends() -> None:
    gate = LineGate()
    gate.pause(0.05)
    gate.pause(0.1)
    begun_at = asyncio.get_running_loop().time()
    assert await entered(gate, ["a"]) == ["a"]
    assert asyncio.get_running_loop().time() - begun_at >= 0.1


async def test_cancelled_requests_leave_no_place_taken() -> None:
    """Cancelled while it waits, and when it has just been let in."""
    gate = LineGate()
    tasks = [asyncio.create_task(gate.enter(name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    gate.set_limit(1)  # the first one has the place, and has not run since
    assert gate.num_inside == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.num_inside == 0
    assert not gate.has_waiting
    await asyncio.wait_for(gate.enter("c"), 1.0)


async def test_a_request_that_comes_again_is_first() -> None:
    gate, order = LineGate(), []

    async def go(name: str, *, again: bool) -> None:
        await gate.enter("a", again=again)
        order.append(name)

    tasks = [asyncio.create_task(go(name, again=name == "old")) for name in ("new", "old")]
    await asyncio.sleep(0)
    gate.set_limit(2)
    await asyncio.gather(*tasks)
    assert order == ["old", "new"]


@pytest.mark.parametrize(
    ("load", "inside", "spare"),
    [
        ({"slots": 64}, 0, 48),  # a quarter is left
        ({"slots": 64, "busy": 48}, 48, 48),  # all of them batches'
        ({"slots": 64, "busy": 48}, 0, 0),
        ({"slots": 64, "busy": 40}, 8, 16),
        ({"slots": 64, "busy": 64, "num_waiting": 100}, 8, 0),
        ({"slots": 1}, 0, 1),
        ({"slots": 1, "busy": 1}, 1, 1),
        ({"slots": 1, "busy": 1}, 0, 0),
        ({"slots": 1000}, 0, 100),  # the setting
        ({"slots": 64, "free_tokens": 200}, 5, 5),  # the cache is nearly full: no more begin
        ({"slots": 64, "free_tokens": 200, "pinned_bytes": 500}, 5, 48),  # half of it is pinned
    ],
)
def test_what_is_left_to_others(load: dict[str, Any], inside: int, spare: int) -> None:
    assert spare_lines(load_of(**load), inside, 100) == spare


def test_silent_replicas_are_busy_ones() -> None:
    silent = load_of().model_copy(update={"num_silent": 1, "replicas": []})
    assert spare_lines(silent, 0, 100) == 0
    assert spare_lines(silent.model_copy(update={"num_silent": 0, "num_replicas": 0}), 0, 100) == 1
