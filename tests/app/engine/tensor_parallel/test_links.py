"""Messages arrive complete and in order, for all sizes and slow peers."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from folio.app.engine.tensor_parallel import shared_memory
from folio.app.engine.tensor_parallel.shared_memory import RingReader, RingWriter
from folio.app.engine.tensor_parallel.sockets import SocketListener


def nothing() -> None:
    pass


def ring(check: Callable[[], None] = nothing, num_peers: int = 2) -> tuple[RingWriter, list[RingReader]]:
    address = shared_memory.create_rings(1, num_peers)
    writer = RingWriter(address.open(), address, 0, check)
    readers = [RingReader(address.open(), address, 0, peer) for peer in range(num_peers)]
    os.close(address.fd)
    return writer, readers


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_RING_BYTES", 4096)


def test_messages_of_all_sizes(small_ring: None) -> None:
    """Around the end of the ring, in several frames, and with peers that are not equally fast."""
    rng = random.Random(0)
    messages = [rng.randbytes(rng.choice([0, 1, 7, 100, 1000, 1023, 1024, 5000, 20000])) for _ in range(300)]
    asked = [rng.random() < 0.3 for _ in messages]
    writer, readers = ring()
    received: list[list[bytes]] = [[], []]

    def listen(peer: int) -> None:
        for is_asked in asked:
            message = readers[peer].receive(10)
            assert message is not None
            received[peer].append(message)
            if is_asked:
                readers[peer].reply(b"%d:" % peer + message[:50])

    threads = [threading.Thread(target=listen, args=(peer,)) for peer in range(2)]
    for thread in threads:
        thread.start()
    for message, is_asked in zip(messages, asked, strict=True):
        writer.post(message, answered=is_asked)
        if is_asked:
            assert writer.collect() == [b"0:" + message[:50], b"1:" + message[:50]]
    for thread in threads:
        thread.join(10)
    assert received == [messages, messages]


def test_the_check_ends_waits_for_a_lost_peer(small_ring: None) -> None:
    """Waits for room in a full ring, and for a missing answer."""

    def gone() -> None:
        raise ConnectionError("the peer is gone")

    writer, _ = ring(gone)
    with pytest.raises(ConnectionError):
        writer.post(b"x" * 10_000)
    writer, _ = ring(gone)
    writer.post(b"x", answered=True)
    with pytest.raises(ConnectionError):
        writer.collect()


def test_receive_times_out() -> None:
    _, [reader] = ring(num_peers=1)
    assert reader.receive(0.01) is None


def test_a_long_answer_is_cut() -> None:
    writer, [reader] = ring(num_peers=1)
    writer.post(b"?", answered=True)
    reader.receive(1)
    reader.reply("ä".encode() * 10_000)
    [answer] = writer.collect()
    assert 4000 < len(answer) < 4096
    answer.decode(errors="replace")


def test_heartbeats() -> None:
    writer, readers = ring()
    readers[1].beat()
    assert writer.beats() == [0, 1]
    writer.beat()
    assert [reader.beats() for reader in readers] == [1, 1]


def test_sockets() -> None:
    """Connections without the token, or without a greeting, are closed; messages of peers arrive."""
    listener = SocketListener("127.0.0.1")
    address = listener.address
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(bytes(40))
        with socket.create_connection((address.host, address.port)) as silent:
            silent.sendall(address.token[:7])
            silent.shutdown(socket.SHUT_WR)
            readers = [address.connect(0, peer) for peer in (1, 0)][::-1]
            [writer] = listener.accept(1, 2, nothing)
    listener.close()
    for message in (b"", b"x", os.urandom(3 << 20)):
        with ThreadPoolExecutor() as pool:
            arrived = [pool.submit(reader.receive, 10) for reader in readers]
            writer.post(message, answered=True)
            assert [received.result() for received in arrived] == [message, message]
        for peer, reader in enumerate(readers):
            reader.reply(b"%d" % peer)
        assert writer.collect() == [b"0", b"1"]
    assert readers[0].receive(0.01) is None
    writer.close()
    with pytest.raises(EOFError):
        readers[0].receive(1)
