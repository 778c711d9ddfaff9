"""The closed loop."""

from __future__ import annotations

import asyncio

from benchmarks.serving.loops import closed_loop
from folio.app.cli.bench.load import Ask, Clock, Record


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    num_open, most = 0, 0

    async def send(ask: Ask, record: Record, clock: Clock) -> None:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0)
        num_open -= 1

    records = asyncio.run(closed_loop(send, [Ask([1], 1)] * 10, 3))
    assert (len(records), most) == (10, 3)
