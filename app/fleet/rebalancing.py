"""Rebalancing: calls that wait at a replica move to one where they would begin at once.

A router places a call with what it knows then. Later a replica starts, or the requests of another one end, and calls
still wait in a queue, or preempted, where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from folio.app.fleet.cost import CostWeights, request_cost
from folio.app.fleet.departures import DEPARTURES
from folio.app.fleet.fleet import Fleet

# A move is worth it if it shortens the wait by so many seconds, and to less than half: reports are half a second old,
# and several routers see the same one.
_LEAST_GAIN_S = 1.0
# Calls that leave a replica after one report. The next one shows what came of it.
_MOST_CALLS = 4


def calls_to_move(
    fleet: Fleet, model: str, crowded: Collection[str], others: Collection[str], now: float
) -> Iterator[tuple[str, int]]:
    """Replicas among `crowded` that calls of the fleet's model should leave, each with the number of calls.

    Args:
        others: replicas to which calls may move.
    """
    known = fleet.fresh(sorted({*crowded, *others}), now)
    waiting = {i: fleet.num_waiting(replica) for i, replica in enumerate(known) if replica in crowded}
    if not any(waiting.values()):
        return
    loads = fleet.loads(known, now)
    for i, num_waiting in waiting.items():
        if num_waiting:
            num_tokens = int(loads.queued_tokens[i]) // num_waiting + 1
            waits_s, _ = request_cost(loads, num_tokens, np.zeros(len(known)), CostWeights())
            better = [known[j] for j in np.flatnonzero(waits_s[i] > 2 * waits_s + _LEAST_GAIN_S)]
            if any(name in others and DEPARTURES.may_continue(known[i], model, name) for name in better):
                yield known[i], min(num_waiting, _MOST_CALLS)
