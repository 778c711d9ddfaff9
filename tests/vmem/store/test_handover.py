"""Another process's cached prefixes become cached here, or are computed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from folio.vmem import KVMemory
from folio.vmem.prefix.store import handover
from folio.vmem.prefix.store.handover import PrefixGiver, PrefixReceiver
from folio.vmem.prefix.store.records import Records
from tests.vmem.sequences import run, serve
from tests.vmem.small_memory import BLOCK_TOKENS, FlakyCuda, FlakyHost, make_memory
from tests.vmem.store.stores import IDS, SHAPES, wait_for

KEYS = ("salt:a",)


@contextmanager
def memories(
    backends: Sequence[type[FlakyHost | FlakyCuda]] = (FlakyHost, FlakyHost), other: str = "f", **shape: Any
) -> Iterator[tuple[KVMemory, PrefixGiver, KVMemory, PrefixReceiver]]:
    """One memory whose prefixes are given, and one that gets them. Nothing is left of either. `other`: the receiver's
    fingerprint."""
    (first, _), (second, _) = (make_memory(backend, **shape) for backend in backends)
    giver = PrefixGiver(first, Records(first), lambda: "f", lambda keys: keys != ("adapter:x",))
    receiver = PrefixReceiver(second, Records(second), lambda: other)
    try:
        yield first, giver, second, receiver
    finally:
        receiver.close()
        giver.close()
    for memory in (first, second):
        if isinstance(memory.backend, FlakyCuda):
            memory.backend.fake.finish_work()
        for sequence in list(memory.tables.sequences):
            memory.free(sequence)
        memory.check_idle()
        memory.close()


def fetch(memory: KVMemory, receiver: PrefixReceiver, address: str, keys: tuple[str, ...] = ()) -> int:
    """Returns the units that have come, after those that are cached."""
    prefix = receiver.find(memory.prefixes.chain(keys), [*IDS, 1])
    if prefix is None:
        return 0
    receiver.read(prefix, address)
    wait_for(lambda: prefix.is_done)
    assert receiver.install(prefix) or prefix.num_units == prefix.first_units
    return prefix.num_units - prefix.first_units


@pytest.mark.parametrize("backends", [(FlakyHost, FlakyHost), (FlakyCuda, FlakyHost), (FlakyHost, FlakyCuda)])
@pytest.mark.parametrize("shape", SHAPES)
def test_cached_prefixes_are_handed_over(
    backends: Sequence[type[FlakyHost | FlakyCuda]], shape: dict[str, Any]
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with memories(backends, **shape) as (first, giver, second, receiver):
        serve(first, IDS, 0)
        if isinstance(first.backend, FlakyCuda):
            first.backend.fake.finish_work()
        assert fetch(second, receiver, giver.address) == 6
        run(second, [*IDS, 1], 6 * BLOCK_TOKENS)
        assert fetch(second, receiver, giver.address) == 0
        assert receiver.num_bytes
    assert backends != (FlakyHost, FlakyHost) or set(os.listdir("/proc/self/fd")) == before


def test_what_a_running_sequence_has_computed_is_handed_over() -> None:
    """Its replica may not have heard yet that it goes on elsewhere."""
    with memories() as (first, giver, second, receiver):
        run(first, IDS, 0)
        assert fetch(second, receiver, giver.address) == 6
        run(second, [*IDS, 1], 6 * BLOCK_TOKENS)


def test_only_the_rest_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with memories() as (first, giver, second, receiver):
        serve(first, IDS, 0)
        serve(second, IDS[: 2 * BLOCK_TOKENS], 0)
        assert fetch(second, receiver, giver.address) == 4
        run(second, [*IDS, 1], 6 * BLOCK_TOKENS)


def test_units_that_are_evicted_meanwhile_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    with memories() as (first, giver, second, receiver):
        serve(first, IDS, 0)
        copied: list[int] = []

        def copy_unit(*args: Any) -> bool:
            copied.append(1)
            return len(copied) < 4 and real(giver, *args)

        real = PrefixGiver._copy_unit
        monkeypatch.setattr(giver, "_copy_unit", copy_unit)
        assert fetch(second, receiver, giver.address) == 3
        run(second, [*IDS, 1], 3 * BLOCK_TOKENS)


@pytest.mark.parametrize("fault", ["model", "adapter", "gone", "keys", "user"])
def test_nothing_comes_from_others(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with memories(other="g" if fault == "model" else "f") as (first, giver, second, receiver):
        keys = ("adapter:x",) if fault == "adapter" else KEYS if fault == "keys" else ()
        serve(first, IDS, 0)
        if fault == "user":
            monkeypatch.setattr(handover.os, "geteuid", lambda: 12345)
        address = "folio-kv-nobody" if fault == "gone" else giver.address
        assert fetch(second, receiver, address, keys) == 0
        second.check_integrity()
        run(second, [*IDS, 1], 0)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\xff" * 64,
        handover._LENGTHS.pack(4, 0) + b"null",
        handover._LENGTHS.pack(2, 0) + b"{}",
        handover._LENGTHS.pack(28, 0) + b'{"num_units":9,"items":[1,2]}',
        handover._LENGTHS.pack(31, 0) + b'{"num_units":1,"items":[[0,0,0]]}'[:31],
    ],
)
def test_nonsense_is_no_prefix(reply: bytes) -> None:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("\0folio-kv-nonsense")
    server.listen()

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            handover._receive(connection)
            connection.sendall(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    with memories() as (_, _, second, receiver):
        assert fetch(second, receiver, "folio-kv-nonsense") == 0
        run(second, [*IDS, 1], 0)
    thread.join()
    server.close()


@pytest.mark.parametrize("message", [b"", b"\xff" * 8, b"\x00" * 8, handover._LENGTHS.pack(2, 0) + b"{}"])
def test_a_giver_outlives_nonsense(message: bytes) -> None:
    with memories() as (first, giver, second, receiver):
        serve(first, IDS, 0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(f"\0{giver.address}")
            client.sendall(message)
        assert fetch(second, receiver, giver.address) == 6
