"""Calls leave replicas that stop, while there are others."""

from __future__ import annotations

import asyncio
import pickle

from folio.app.fleet import departures
from folio.app.fleet.departures import DEPARTURES, Departures, PlacedCall


async def left(departures: Departures, call: PlacedCall, ends: list[str]) -> bool:
    """Whether the call has been told to leave, which happens once."""
    await asyncio.sleep(0)
    assert ends == [call.replica] * call.is_leaving
    return call.is_leaving


def a_call(departures: Departures, replica: str, model: str = "") -> tuple[PlacedCall, list[str]]:
    ends: list[str] = []
    return departures.place(PlacedCall(replica, model, lambda: ends.append(replica))), ends


async def test_calls_leave_while_there_is_another_replica() -> None:
    departures = Departures()
    stays, leaves = a_call(departures, "a"), a_call(departures, "b")
    departures.update([], ["a", "b"])
    departures.update(["a", "b"], ["a"])
    assert [await left(departures, *call) for call in (stays, leaves)] == [False, True]
    departures.update(["a"], [])  # the last one
    assert not await left(departures, *stays)
    departures.update([], ["c"])
    assert await left(departures, *stays)
    departures.update(["c"], ["c"])
    assert await left(departures, *leaves)
    for call, _ in (stays, leaves):
        departures.remove(call)
    assert not departures._calls


async def test_calls_stay_until_there_is_a_replica_with_their_model() -> None:
    """Replicas of an update may have another one, and a new replica has not reported yet."""
    departures = Departures()
    departures.update([], ["old", "new"])
    departures.note_outputs("old", {"m": ("1", "there"), "n": ("2", "")})
    departures.update(["old", "new"], ["new"])
    first, other = a_call(departures, "old"), a_call(departures, "old", "n")
    assert not await left(departures, *first)
    departures.note_outputs("new", {"m": ("3", ""), "n": ("", "")})  # which is not loaded
    assert not await left(departures, *first)
    assert await left(departures, *other)
    departures.note_outputs("new", {"m": ("1", "here")})
    assert await left(departures, *first)
    assert departures.may_continue("unknown", "m", "new")
    assert not departures.may_continue("old", "m", "silent")
    assert [departures.held_at(name, "") for name in ("old", "new", "silent")] == ["there", "here", ""]


async def test_output_that_comes_later_leaves_at_once() -> None:
    departures = Departures()
    departures.update(["a", "b"], ["a"])
    assert await left(departures, *a_call(departures, "b"))
    departures.update(["a"], ["a", "b"])  # its router had not heard of it for a while
    assert not await left(departures, *a_call(departures, "b"))


async def test_the_latest_calls_move() -> None:
    departures = Departures()
    departures.update([], ["a", "b"])
    calls = [a_call(departures, "a", model) for model in ("", "m", "n", "m", "m")]
    calls[3][0].can_leave = False
    departures.move("a", ("m", ""), 2)
    departures.move("b", ("m", ""), 2)
    assert [await left(departures, *call) for call in calls] == [False, True, False, False, True]
    departures.move("a", ("m", ""), 9)
    assert [await left(departures, *call) for call in calls] == [True, True, False, False, True]


def test_few_replicas_are_remembered() -> None:
    calls = Departures()
    for number in range(departures._MOST_LEFT + 5):
        calls.update([str(number)], ["stays"])
    assert len(calls._left) == departures._MOST_LEFT


def test_a_router_made_from_a_pickle_has_this_process_s_calls() -> None:
    assert pickle.loads(pickle.dumps(DEPARTURES)) is DEPARTURES
