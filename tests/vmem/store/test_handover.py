"""Another process's cached prefixes become cached here, or are computed."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from folio.vmem import KVMemory
from folio.vmem.prefix.store import handover, link
from folio.vmem.prefix.store.handover import PrefixGiver, PrefixReceiver
from folio.vmem.prefix.store.installer import FoundPrefix
from folio.vmem.prefix.store.link import Address, Link
from folio.vmem.prefix.store.records import Records
from tests.vmem.sequences import compute, run, serve, submit
from tests.vmem.small_memory import BLOCK_TOKENS, FlakyCuda, FlakyHost, Tokens, make_memory
from tests.vmem.store.stores import IDS, SHAPES, wait_for

KEYS = ("salt:a",)


@contextmanager
def memories(
    backends: Sequence[type[FlakyHost | FlakyCuda]] = (FlakyHost, FlakyHost),
    other: str = "f",
    remote: bool = False,
    **shape: Any,
) -> Iterator[tuple[KVMemory, PrefixGiver, KVMemory, PrefixReceiver]]:
    """One memory whose prefixes are given, and one that gets them. Nothing is left of either. `other`: the receiver's
    fingerprint. `remote`: as if they were on two machines."""
    (first, _), (second, _) = (make_memory(backend, **shape) for backend in backends)
    giver = PrefixGiver(first, Records(first), lambda: "f", lambda keys: keys != ("adapter:x",))
    receiver = PrefixReceiver(second, Records(second), lambda: other)
    if remote:
        giver.listen("127.0.0.1")
        receiver.host = "127.0.0.2"
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


def fetch(memory: KVMemory, receiver: PrefixReceiver, address: object, keys: tuple[str, ...] = ()) -> int:
    """Returns the units that have come, after those that are cached."""
    prefix = receiver.find(memory.prefixes.chain(keys), [*IDS, 1])
    if prefix is None:
        return 0
    receiver.read(prefix, str(address))
    wait_for(lambda: prefix.is_done)
    assert receiver.install(prefix) or prefix.num_units == prefix.first_units
    return prefix.num_units - prefix.first_units


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("backends", [(FlakyHost, FlakyHost), (FlakyCuda, FlakyHost), (FlakyHost, FlakyCuda)])
@pytest.mark.parametrize("shape", SHAPES)
def test_cached_prefixes_are_handed_over(
    backends: Sequence[type[FlakyHost | FlakyCuda]], shape: dict[str, Any], remote: bool
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with memories(backends, remote=remote, **shape) as (first, giver, second, receiver):
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


def test_steps_that_follow_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy engine always has a step under way: for a second its giver asked whether the latest was done."""
    with memories() as (first, giver, second, receiver), monkeypatch.context() as patched:
        serve(first, IDS, 0)
        launched = first.mapper.fence

        def completed(fence: int) -> bool:
            first.mapper.fence += 1
            return fence + 1 < first.mapper.fence

        patched.setattr(first.backend, "completed", completed)
        assert fetch(second, receiver, giver.address) == 6
        first.mapper.fence = launched


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(("shape", "num_units"), [(SHAPES[0], 3), (SHAPES[3], 0)])
def test_units_that_are_evicted_meanwhile_are_computed(
    shape: dict[str, Any], num_units: int, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, where layers with windows need the last ones."""
    with memories(remote=remote, **shape) as (first, giver, second, receiver):
        serve(first, IDS, 0)
        copied: list[int] = []

        def copy_unit(*args: Any) -> bool:
            copied.append(1)
            return len(copied) < 4 and real(giver, *args)

        real = PrefixGiver._copy_unit
        monkeypatch.setattr(giver, "_copy_unit", copy_unit)
        assert fetch(second, receiver, giver.address) == num_units
        run(second, [*IDS, 1], num_units * BLOCK_TOKENS)


@pytest.mark.parametrize("fault", ["model", "adapter", "gone", "keys", "user"])
def test_nothing_comes_from_others(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with memories(other="g" if fault == "model" else "f") as (first, giver, second, receiver):
        keys = ("adapter:x",) if fault == "adapter" else KEYS if fault == "keys" else ()
        serve(first, IDS, 0)
        if fault == "user":
            monkeypatch.setattr(link.os, "geteuid", lambda: 12345)
        address = "folio-kv-nobody" if fault == "gone" else giver.address
        assert fetch(second, receiver, address, keys) == 0
        second.check_integrity()
        run(second, [*IDS, 1], 0)


def begin_ahead(receiver: PrefixReceiver, memory: KVMemory, address: object) -> FoundPrefix | None:
    return receiver.fetch_ahead(memory.prefixes.chain(()), [*IDS, 1], str(address))


def take(receiver: PrefixReceiver, memory: KVMemory, prefix: FoundPrefix) -> int:
    """The request of a prefix that is fetched ahead comes, with its first token; returns the units that have come."""
    assert receiver.find(memory.prefixes.chain(()), [*IDS, 1, 2]) is prefix
    receiver.read(prefix, "folio-kv-nobody")
    wait_for(lambda: prefix.is_done)
    assert receiver.install(prefix) or prefix.num_units == prefix.first_units
    return prefix.num_units


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An entry for each unit that givers have copied in a layer group."""
    copied: list[bool] = []
    real = PrefixGiver._copy_unit
    monkeypatch.setattr(PrefixGiver, "_copy_unit", lambda *args: copied.append(True) or real(*args))
    return copied


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("backends", [(FlakyHost, FlakyHost), (FlakyCuda, FlakyHost), (FlakyHost, FlakyCuda)])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_units_come_while_later_ones_are_computed(
    backends: Sequence[type[FlakyHost | FlakyCuda]],
    shape: dict[str, Any],
    remote: bool,
    copied: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When their steps have ended. Their request asks for nothing more."""
    monkeypatch.setattr(handover, "_BEAT_S", 0.0)
    with memories(backends, remote=remote, **shape) as (first, giver, second, receiver):
        prefix = begin_ahead(receiver, second, giver.address)
        assert prefix is not None
        assert begin_ahead(receiver, second, giver.address) is None, "once"
        for num_units in (2, 3, 6):
            serve(first, IDS[: num_units * BLOCK_TOKENS])
            if isinstance(first.backend, FlakyCuda):
                assert len(copied) < num_units * len(first.groups), "the step may still write them"
                first.backend.fake.finish_work()
            wait_for(lambda num_units=num_units: len(copied) == num_units * len(first.groups))
        assert take(receiver, second, prefix) == 6
        run(second, [*IDS, 1], 6 * BLOCK_TOKENS)
        receiver.drop(prefix)
        assert not prefix.is_cancelled


def test_units_of_a_step_that_is_not_launched_come_later(copied: list[bool]) -> None:
    """Regression: others may share them, but they have no content yet, and the giver gave nothing more."""
    with memories() as (first, giver, second, receiver):
        serve(first, IDS[: 2 * BLOCK_TOKENS])
        tokens = Tokens(first.prefixes.chain(()), IDS)
        sequence = submit(first, tokens, 2 * BLOCK_TOKENS)
        prefix = begin_ahead(receiver, second, giver.address)
        assert prefix is not None
        wait_for(lambda: len(copied) == 2)
        compute(first, (sequence, tokens, 2 * BLOCK_TOKENS))
        wait_for(lambda: len(copied) == 6)
        assert take(receiver, second, prefix) == 6
        run(second, [*IDS, 1], 6 * BLOCK_TOKENS)


@pytest.mark.parametrize("ends", ["closed", "request", "dropped"])
@pytest.mark.parametrize("remote", [False, True])
def test_what_has_come_is_used_when_the_rest_does_not(ends: str, remote: bool, copied: list[bool]) -> None:
    """Because the giver ends, or the request is there first. What nobody waits for ends, too."""
    with memories(remote=remote) as (first, giver, second, receiver):
        prefix = begin_ahead(receiver, second, giver.address)
        assert prefix is not None
        serve(first, IDS[: 4 * BLOCK_TOKENS])
        wait_for(lambda: len(copied) == 4)
        if ends == "dropped":
            receiver.drop(prefix)
            wait_for(lambda: prefix.is_done)
            assert receiver.find(second.prefixes.chain(()), [*IDS, 1]) is not prefix
            return
        if ends == "closed":
            giver.close()
        assert take(receiver, second, prefix) == 4
        run(second, [*IDS, 1], 4 * BLOCK_TOKENS)


@pytest.mark.parametrize("fault", ["model", "adapter", "gone", "windows", "many", "bytes", "many given"])
def test_nothing_comes_ahead_from_others(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or of layers with windows, which need the end of the prompt, or when enough is coming."""
    monkeypatch.setattr(handover, "_MOST_AHEAD_BYTES" if fault == "bytes" else "_MOST_AHEAD", 1)
    shape = {"windowed": True} if fault == "windows" else {}
    with memories(other="g" if fault == "model" else "f", **shape) as (first, giver, second, receiver):
        serve(first, IDS, keys=(keys := ("adapter:x",) if fault == "adapter" else ()))
        address = "folio-kv-nobody" if fault == "gone" else str(giver.address)
        if fault in ("many", "bytes"):
            assert receiver.fetch_ahead(second.prefixes.chain(()), IDS[::-1], str(giver.address)), "nobody computes it"
        if fault == "many given":
            giver._places_ahead.acquire()
        prefix = receiver.fetch_ahead(second.prefixes.chain(keys), [*IDS, 1], address)
        assert (prefix is None) == (fault in ("windows", "many", "bytes"))
        wait_for(lambda: prefix is None or prefix.is_done)
        assert not receiver.num_bytes
        run(second, [*IDS, 1], 0, keys)


def messages(*contents: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(content)) + content for content in contents)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\xff" * 64,
        messages(b"null"),
        messages(b"{}"),
        messages(b'{"num_units": 9}'),
        messages(b'{"num_units": 2}'),  # and no memory
        messages(b'{"num_units": -1}'),
    ],
)
def test_nonsense_is_no_prefix(reply: bytes) -> None:
    server = link.listen(Address("folio-kv-nonsense"))

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            end = Link(connection, gives=True)
            end.receive(), end.receive()
            connection.sendall(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    with memories() as (_, _, second, receiver):
        assert fetch(second, receiver, "folio-kv-nonsense") == 0
        run(second, [*IDS, 1], 0)
    thread.join()
    server.close()


@pytest.mark.parametrize("message", [b"", b"\xff" * 8, b"\x00" * 8, messages(b"{}")])
@pytest.mark.parametrize("remote", [False, True])
def test_a_giver_outlives_nonsense(message: bytes, remote: bool) -> None:
    with memories(remote=remote) as (first, giver, second, receiver):
        serve(first, IDS, 0)
        with socket.socket(socket.AF_INET if remote else socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect((giver.address.host, giver.address.port) if remote else f"\0{giver.address.name}")
            client.sendall(message)
        assert fetch(second, receiver, giver.address) == 6


@contextmanager
def altered(address: Address, alter: Callable[[bytearray, bool], None]) -> Iterator[Address]:
    """An address on the way to the giver's. `alter`: changes what passes; whether it comes from the giver."""
    server = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, target: socket.socket, is_givers: bool) -> None:
        with suppress(OSError):
            while part := bytearray(source.recv(1 << 16)):
                alter(part, is_givers)
                target.sendall(part)
            target.shutdown(socket.SHUT_RDWR)

    def serve_one() -> None:
        client, _ = server.accept()
        with client, socket.create_connection((address.host, address.port)) as giver:
            other = threading.Thread(target=pass_on, args=(client, giver, False))
            other.start()
            pass_on(giver, client, True)
            client.close()
            other.join()

    thread = threading.Thread(target=serve_one)
    thread.start()
    yield replace(address, port=server.getsockname()[1])
    thread.join()
    server.close()


@pytest.mark.parametrize("of_giver", [False, True])
@pytest.mark.parametrize("at", [8, 100, 1000, 20_000])
def test_what_is_damaged_on_the_way_is_computed(at: int, of_giver: bool) -> None:
    passed = 0

    def alter(part: bytearray, is_givers: bool) -> None:
        nonlocal passed
        if is_givers == of_giver:
            if passed <= at < passed + len(part):
                part[at - passed] ^= 1
            passed += len(part)

    with memories(remote=True) as (first, giver, second, receiver):
        serve(first, IDS, 0)
        with altered(giver.address, alter) as address:
            num_units = fetch(second, receiver, address)
        assert num_units < 6 or passed <= at
        run(second, [*IDS, 1], num_units * BLOCK_TOKENS)


def test_only_who_knows_the_key_gets_prefixes() -> None:
    with memories(remote=True) as (first, giver, second, receiver):
        serve(first, IDS, 0)
        assert fetch(second, receiver, replace(giver.address, key="00" * 32)) == 0
        assert "00" * 32 not in repr(replace(giver.address, key="00" * 32))
        assert fetch(second, receiver, giver.address) == 6
