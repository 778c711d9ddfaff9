"""Messages between rank 0 and its peers on one machine: a ring in shared memory, and futexes to wait at.

    ring     │ sent, beats │ of each peer: taken, replied, beats, reply │ frame │ frame │ frame │ …

Rank 0 writes every message once, for all peers. The memory is a file without a name: it is gone when the last process
is, however that ends.
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
_MORE = 1 << 31  # the next frame goes on with this message
# How long one wait lasts at most, so that whoever waits looks up now and then.
_LOOK_UP_S = 0.05
_COUNT = 1 << 32

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """On Linux for x86-64 only: there stores become visible in their order, and the futex call has that number."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """The file of a process that holds `num_rings` rings for `num_peers` readers."""

    pid: int
    fd: int
    num_rings: int
    num_peers: int

    def open(self) -> mmap.mmap:
        """Map it, from any process of the same user on this machine."""
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, self.num_rings * _ring_bytes(self.num_peers))
        finally:
            os.close(fd)


def create_rings(num_rings: int, num_peers: int) -> MemoryAddress:
    """New rings. Close the file of the address when every peer has opened it, or will never."""
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
        """Count something that nobody waits for."""
        self._words[word] = (self._words[word] + 1) % _COUNT

    def store(self, word: int, value: int) -> None:
        """Change a counter, after what it is about was written, and wake who waits for it."""
        self._words[word] = value % _COUNT
        _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + 4 * word), _FUTEX_WAKE, 1 << 30, None, None, 0)

    def wait(self, word: int, value: int, timeout_s: float) -> None:
        """Return soon after the counter is no longer `value`, or when the time is up."""
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        address = ctypes.c_void_p(self._address + 4 * word)
        if _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAIT, value, ctypes.byref(timeout), None, 0):
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Let go of the mapping, so that it can be closed."""
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
    """Rank 0's end. `post` may be called from several threads; of `collect` one at a time.

    Args:
        check: called now and then while waiting; what it raises ends the wait.
    """

    def __init__(self, memory: mmap.mmap, address: MemoryAddress, index: int, check: Callable[[], None]) -> None:
        self._ring = _Ring(memory, index, address.num_peers)
        self._check = check
        self._lock = threading.Lock()
        self._head = 0
        self._ends: list[int] = []  # where frames end that some peer has not taken yet
        self._num_freed = 0  # frames that all have taken
        self._free = _RING_BYTES
        self._num_asked = 0

    def post(self, message: bytes, *, answered: bool = False) -> None:
        """Send a message to every peer; waits while the slowest of them leaves no room.

        Args:
            answered: every peer answers it, and `collect` follows before the next such message.
        """
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
            ring.wait(ring.taken(slowest), taken[slowest], _LOOK_UP_S)
            return
        self._num_freed += behind[slowest]
        self._free += sum(self._ends[: behind[slowest]])
        del self._ends[: behind[slowest]]

    def close(self) -> None:
        """Nothing is sent any more; then the mapping can be closed."""
        self._ring.close()

    def beat(self) -> None:
        """Show the peers that this process is running."""
        self._ring.beat(self._ring.beats)

    def beats(self) -> list[int]:
        """How often each peer has shown that it is."""
        return [self._ring.read(self._ring.beats_of(peer)) for peer in range(self._ring.num_peers)]

    def collect(self) -> list[bytes]:
        """Every peer's answer to the last message that is answered, in the order of their ranks."""
        ring, replies = self._ring, []
        for peer in range(ring.num_peers):
            while (count := ring.read(ring.replied(peer))) != self._num_asked % _COUNT:
                self._check()
                ring.wait(ring.replied(peer), count, _LOOK_UP_S)
            reply = ring.reply_of(peer)
            size = int.from_bytes(reply[:4], "little")
            replies.append(bytes(reply[4 : 4 + size]))
        return replies


class RingReader:
    """A peer's end.

    Args:
        peer: 0 for rank 1.
    """

    def __init__(self, memory: mmap.mmap, address: MemoryAddress, index: int, peer: int) -> None:
        self._ring = _Ring(memory, index, address.num_peers)
        self._peer = peer
        self._tail = 0
        self._num_taken = 0
        self._num_replied = 0
        self._parts: list[bytes] = []

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; `None` if there is none in time."""
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
        """Show rank 0 that this process is running."""
        self._ring.beat(self._ring.beats_of(self._peer))

    def beats(self) -> int:
        """How often rank 0 has shown that it is."""
        return self._ring.read(self._ring.beats)

    def reply(self, answer: bytes) -> None:
        """Answer the message received last. What is longer than a few thousand bytes is cut."""
        answer = answer[: _REPLY_BYTES - 4]
        reply = self._ring.reply_of(self._peer)
        reply[:4] = len(answer).to_bytes(4, "little")
        reply[4 : 4 + len(answer)] = answer
        self._num_replied += 1
        self._ring.store(self._ring.replied(self._peer), self._num_replied)
