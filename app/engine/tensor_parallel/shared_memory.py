"""Shared-memory links: messages between rank 0 and peers on one machine, in a ring with futexes for waiting.

    ring     │ sent, beats │ of each peer: taken, replied, beats, reply │ frame │ frame │ frame │ …

Rank 0 writes every message once for all peers. The memory is an unnamed file, freed with the last process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
_RING_BYTES = 4 << 20
_REPLY_BYTES = 4096
_LINE = 64  # each counter has a cache line of its own
_MORE = 1 << 31  # flag: the message continues in the next frame
# Longest single wait, between two calls of `check`.
_CHECK_INTERVAL_S = 0.05
_COUNT = 1 << 32

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """Linux on x86-64 only: stores become visible in order, and the futex call has this number."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """The file of a process that holds `num_rings` rings for `num_peers` readers."""

    pid: int
    fd: int
    num_rings: int
    num_peers: int

    def open(self) -> mmap.mmap:
        """Map the file, from any process of the same user on this machine."""
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, self.num_rings * _ring_bytes(self.num_peers))
        finally:
            os.close(fd)


def create_rings(num_rings: int, num_peers: int) -> MemoryAddress:
    """New rings. Close the address's file after every peer has opened it or failed to."""
    fd = os.memfd_create("folio-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_rings * _ring_bytes(num_peers))
    return MemoryAddress(os.getpid(), fd, num_rings, num_peers)


def _ring_bytes(num_peers: int) -> int:
    return _LINE + num_peers * (2 * _LINE + _REPLY_BYTES) + _RING_BYTES


class _Ring:
    """One ring of a mapping; counters wrap around at 2³²."""

    def __init__(self, memory: mmap.mmap, index: int, num_peers: int) -> None:
        self.num_peers = num_peers
        start = index * _ring_bytes(num_peers)
        self._bytes = memoryview(memory)[start : start + _ring_bytes(num_peers)]
        self._words = self._bytes.cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start
        data = _LINE + num_peers * (2 * _LINE + _REPLY_BYTES)
        self._data = self._bytes[data : data + _RING_BYTES]

    # Places of the counters, in words.

    sent, beats = 0, 1

    def taken(self, peer: int) -> int:
        return self._line(peer) // 4

    def replied(self, peer: int) -> int:
        return self._line(peer) // 4 + _LINE // 4

    def beats_of(self, peer: int) -> int:
        return self.replied(peer) + 1

    def _line(self, peer: int) -> int:
        return _LINE + peer * (2 * _LINE + _REPLY_BYTES)

    def reply_of(self, peer: int) -> memoryview:
        start = self._line(peer) + 2 * _LINE
        return self._bytes[start : start + _REPLY_BYTES]

    def read(self, word: int) -> int:
        return self._words[word]

    def beat(self, word: int) -> None:
        """Increment a heartbeat counter, without waking waiters."""
        self._words[word] = (self._words[word] + 1) % _COUNT

    def store(self, word: int, value: int) -> None:
        """Set a counter, after the data that it announces, and wake its waiters."""
        self._words[word] = value % _COUNT
        _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + 4 * word), _FUTEX_WAKE, 1 << 30, None, None, 0)

    def wait(self, word: int, value: int, timeout_s: float) -> None:
        """Wait until the counter is no longer `value`, or for the timeout."""
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        address = ctypes.c_void_p(self._address + 4 * word)
        if _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAIT, value, ctypes.byref(timeout), None, 0):
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Release the views, so that the mapping can be closed."""
        for view in (self._data, self._words, self._bytes):
            view.release()

    def put(self, at: int, data: bytes | memoryview) -> None:
        at %= _RING_BYTES
        first = min(len(data), _RING_BYTES - at)
        self._data[at : at + first] = data[:first]
        self._data[: len(data) - first] = data[first:]

    def get(self, at: int, size: int) -> bytes:
        at %= _RING_BYTES
        first = min(size, _RING_BYTES - at)
        return bytes(self._data[at : at + first]) + bytes(self._data[: size - first])


class RingWriter:
    """Rank 0's `Link`. A `post` waits while the slowest peer leaves no room.

    Args:
        check: called periodically while waiting; its exception ends the wait.
    """

    def __init__(self, memory: mmap.mmap, address: MemoryAddress, index: int, check: Callable[[], None]) -> None:
        self._ring = _Ring(memory, index, address.num_peers)
        self._check = check
        self._lock = threading.Lock()
        self._head = 0
        self._ends: list[int] = []  # sizes of frames that some peer has not taken yet
        self._num_freed = 0  # frames that all peers have taken
        self._free = _RING_BYTES
        self._num_asked = 0

    def post(self, message: bytes, *, answered: bool = False) -> None:
        most = _RING_BYTES // 4
        view = memoryview(message)
        with self._lock:
            self._num_asked += answered
            for start in range(0, max(len(message), 1), most):
                part = view[start : start + most]
                more = _MORE if start + most < len(message) else 0
                self._put_frame((len(part) | more).to_bytes(4, "little"), part)

    def _put_frame(self, header: bytes, part: memoryview) -> None:
        size = len(header) + len(part)
        while self._free < size:
            self._make_room()
        ring = self._ring
        ring.put(self._head, header)
        ring.put(self._head + len(header), part)
        self._head += size
        self._free -= size
        self._ends.append(size)
        ring.store(ring.sent, ring.read(ring.sent) + 1)

    def _make_room(self) -> None:
        ring = self._ring
        taken = [ring.read(ring.taken(peer)) for peer in range(ring.num_peers)]
        behind = [(count - self._num_freed) % _COUNT for count in taken]
        slowest = behind.index(min(behind))
        if not behind[slowest]:
            self._check()
            ring.wait(ring.taken(slowest), taken[slowest], _CHECK_INTERVAL_S)
            return
        self._num_freed += behind[slowest]
        self._free += sum(self._ends[: behind[slowest]])
        del self._ends[: behind[slowest]]

    def close(self) -> None:
        self._ring.close()

    def beat(self) -> None:
        """Send a heartbeat to the peers."""
        self._ring.beat(self._ring.beats)

    def beats(self) -> list[int]:
        """Heartbeats received from each peer."""
        return [self._ring.read(self._ring.beats_of(peer)) for peer in range(self._ring.num_peers)]

    def collect(self) -> list[bytes]:
        ring, replies = self._ring, []
        for peer in range(ring.num_peers):
            while (count := ring.read(ring.replied(peer))) != self._num_asked % _COUNT:
                self._check()
                ring.wait(ring.replied(peer), count, _CHECK_INTERVAL_S)
            reply = ring.reply_of(peer)
            size = int.from_bytes(reply[:4], "little")
            replies.append(bytes(reply[4 : 4 + size]))
        return replies


class RingReader:
    """A peer's `PeerLink`; peer 0 is rank 1."""

    def __init__(self, memory: mmap.mmap, address: MemoryAddress, index: int, peer: int) -> None:
        self._ring = _Ring(memory, index, address.num_peers)
        self._peer = peer
        self._tail = 0
        self._num_taken = 0
        self._num_replied = 0
        self._parts: list[bytes] = []

    def receive(self, timeout_s: float) -> bytes | None:
        ring = self._ring
        deadline = time.monotonic() + timeout_s
        while True:
            while (sent := ring.read(ring.sent)) == self._num_taken:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                ring.wait(ring.sent, sent, left)
            header = int.from_bytes(ring.get(self._tail, 4), "little")
            size = header & ~_MORE
            self._parts.append(ring.get(self._tail + 4, size))
            self._tail += 4 + size
            self._num_taken = (self._num_taken + 1) % _COUNT
            ring.store(ring.taken(self._peer), self._num_taken)
            if not header & _MORE:
                message, self._parts = b"".join(self._parts), []
                return message

    def beat(self) -> None:
        """Send a heartbeat to rank 0."""
        self._ring.beat(self._ring.beats_of(self._peer))

    def beats(self) -> int:
        """Heartbeats received from rank 0."""
        return self._ring.read(self._ring.beats)

    def reply(self, answer: bytes) -> None:
        """See `PeerLink`; answers are cut at about 4,000 bytes."""
        answer = answer[: _REPLY_BYTES - 4]
        reply = self._ring.reply_of(self._peer)
        reply[:4] = len(answer).to_bytes(4, "little")
        reply[4 : 4 + len(answer)] = answer
        self._num_replied += 1
        self._ring.store(self._ring.replied(self._peer), self._num_replied)
