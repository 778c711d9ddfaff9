"""A member of a ledger in a process of its own: `python -m tests.app.fleet.ledger_process NAME SLOT CAPACITY SHARED`.

It exchanges hundreds of times a second, fills its budget, and gives it back. What it holds is 8 bytes of the file
SHARED."""

from __future__ import annotations

import mmap
import random
import sys
import time
from pathlib import Path

from folio.app.fleet.ledger import MemberUsage
from folio.app.fleet.ledger_file import LedgerFile, this_process


def run(name: str, slot: int, capacity_bytes: int, shared: Path) -> None:
    ledger, process, rng = LedgerFile("shared"), this_process(), random.Random(slot)
    with shared.open("r+b") as file:
        held = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    budget_bytes = 0
    while True:
        demand_bytes = rng.randrange(capacity_bytes)
        usage = MemberUsage(budget_bytes, held[slot], 1, capacity_bytes, demand_bytes)
        with ledger.locked() as locked:
            locked.shared_at = 0.0  # so that each exchange may move memory
            order = locked.exchange(name, process, capacity_bytes, usage, time.monotonic())
        budget_bytes = order.budget_bytes
        held[slot] = rng.randint(0, budget_bytes)
        time.sleep(0.001)  # the lock is not fair: on a busy machine another process would not get it for seconds


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
