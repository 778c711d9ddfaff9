"""Prefix stores of small memories, each opened as by a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from folio.vmem import KVMemory
from folio.vmem.prefix.store.prefix_store import PrefixStore
from tests.vmem.sequences import prompt
from tests.vmem.small_memory import BLOCK_TOKENS, FlakyCuda, FlakyHost, make_memory

FINGERPRINT = bytes(range(16))
MOST_BYTES = 1 << 20
IDS = prompt(6 * BLOCK_TOKENS)
SHAPES: list[dict[str, Any]] = [
    {},
    {"kind": "per_layer"},
    {"kind": "sliced"},
    {"windowed": True},
    {"windowed": True, "window_block_tokens": 8},
    {"stateful": True},
    {"windowed": True, "stateful": True},
]
_DEADLINE_S = 20.0


@contextmanager
def opened(
    folder: Path,
    backend: type[FlakyHost | FlakyCuda] = FlakyHost,
    *,
    most_bytes: int = MOST_BYTES,
    fingerprint: bytes = FINGERPRINT,
    keeps: Callable[[tuple[str, ...]], bool] = lambda keys: True,
    **shape: Any,
) -> Iterator[tuple[KVMemory, PrefixStore]]:
    """A memory and its store, which writes all that it can before the block ends. Then nothing may be left."""
    memory, _ = make_memory(backend, **shape)
    store = PrefixStore(memory, folder, most_bytes, fingerprint, keeps)
    try:
        yield memory, store
        if isinstance(memory.backend, FlakyCuda):
            memory.backend.fake.finish_work()
        settle(store)
        for sequence in list(memory.tables.sequences):
            memory.free(sequence)
    finally:
        store.close()
    memory.check_idle()
    memory.close()


def settle(store: PrefixStore) -> None:
    """Wait until nothing waits to be written."""
    wait_for(lambda: store.is_idle)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def fetch(
    memory: KVMemory,
    store: PrefixStore,
    ids: Sequence[int] = IDS,
    keys: tuple[str, ...] = (),
    most_bytes: int = 1 << 30,
) -> int:
    """Read and install what is on disk of these tokens, with another behind them; returns the units that were found."""
    prefix = store.prefixes.find(memory.prefixes.chain(keys), [*ids, 1], most_bytes)
    if prefix is None:
        return 0
    store.read(prefix)
    wait_for(lambda: prefix.is_done)
    store.prefixes.install(prefix)
    memory.check_integrity()
    return prefix.num_units - prefix.first_units


def hold(store: PrefixStore) -> None:
    """Nothing is written until `release`."""
    settle(store)
    store._writer._next_at = time.monotonic() + 1e6


def release(store: PrefixStore) -> None:
    store._writer._next_at = 0.0
    store._wake.set()
