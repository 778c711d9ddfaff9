"""Memories that must end as they began."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from folio.vmem import KVMemory
from tests.vmem.small_memory import FlakyCuda, make_memory

Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(backend, **settings)` → a small memory. At the end of the test its sequences are freed; then nothing may be
    left of it, and no rule of the driver may have been broken."""
    memories: list[KVMemory] = []

    def make_one(*args: Any, **settings: Any) -> KVMemory:
        memories.append(make_memory(*args, **settings)[0])
        return memories[-1]

    yield make_one
    for memory in memories:
        device: Any = memory.backend
        device.fail_at = -1
        device.before = lambda call, count: None
        for sequence in list(memory.tables.sequences):
            memory.free(sequence)
        if isinstance(device, FlakyCuda):
            device.fake.finish_work()
        memory.check_idle()
        memory.close()
        if isinstance(device, FlakyCuda):
            assert (device.fake.leftovers, device.fake.violations) == ((0, 0, 0, 0, 0), [])


@pytest.fixture
def still(make: Make) -> Make:
    """`make`, without the mapper's thread: its work is done where the test says `do_background`."""
    return partial(make, background=False)
