"""Orders and requests from rank 0 to the memories of its peers, and their answers."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from folio.vmem.errors import IntegrityError, MapError, OutOfPages, OutOfSwap, VmemError

Answers = Callable[[], list[bytes]]
ALL_RANKS = -1  # else one bit a rank


class PeerRanks(Protocol):
    """Channel to the other ranks. If they are lost, answers are empty and calls go on: the owner of the ranks has to
    notice."""

    def open_memory(self) -> int:
        """Return the number of a new memory, below 256, which its messages begin with."""

    @property
    def num_ordered(self) -> int:
        """Orders of all kinds so far."""

    def post_order(self, order: bytes) -> None:
        """Send an order, which must succeed, to the main thread of every peer. Orders keep their order."""

    def call_order(self, order: bytes) -> Answers:
        """Send an order that may fail. Calling the result waits for the peers' answers."""

    def post_request(self, request: bytes) -> None:
        """Send a request, which must succeed, to the memory thread of every peer. Requests keep their order."""

    def call_request(self, request: bytes) -> Answers:
        """Send a request that may fail. Calling the result waits for the peers' answers."""


class MemoryRequest(enum.IntEnum):
    """Requests to a peer's memory thread, with their numbers."""

    OPEN = 1  # capacity, headroom; the memory's first request
    CLOSE = 2  # orders to wait for
    RESERVE = 3  # range, bytes
    RELEASE = 4  # range
    DESTROY = 5  # handle
    MAP = 6  # ranks, range, offset, page bytes, handles …
    UNMAP = 7  # ranks, range, offset, bytes, orders to wait for
    INFO = 8


class MemoryOrder(enum.IntEnum):
    """Orders to a peer's main thread, with their numbers."""

    TENSORS = 1  # pickled: groups, indices of the homes' and of the regions' ranges, region tokens
    COPY = 2  # group, sources …, targets …
    SAVE = 3  # key, group, blocks …
    RESTORE = 4  # key, rows …, blocks …
    DISCARD = 5  # key


class ReplyStatus(enum.IntEnum):
    """First byte of a peer's answer; numbers or a text follow."""

    DONE = 0
    OUT_OF_PAGES = 1
    OUT_OF_SWAP = 2
    FAILED = 3
    BROKEN = 4  # its accounting is broken


_ERRORS: dict[ReplyStatus, Callable[[str], VmemError]] = {
    ReplyStatus.OUT_OF_PAGES: lambda _: OutOfPages(1, 0),
    ReplyStatus.OUT_OF_SWAP: OutOfSwap,
    ReplyStatus.FAILED: MapError,
    ReplyStatus.BROKEN: IntegrityError,
}


def pack(kind: int, *numbers: int) -> bytes:
    """Encode a byte and int64s."""
    return struct.pack(f"<B{len(numbers)}q", kind, *numbers)


def message(memory: int, kind: MemoryRequest | MemoryOrder, *numbers: int) -> bytes:
    """Encode a request or an order to the memory of that number."""
    return bytes([memory]) + pack(kind, *numbers)


def unpack(message: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{(len(message) - 1) // 8}q", message[1:])


def is_failure(answer: bytes) -> bool:
    return answer[0] != ReplyStatus.DONE


def failure_of(answers: Sequence[bytes]) -> VmemError | None:
    """The error of the first peer that failed."""
    for rank, answer in enumerate(answers, start=1):
        if is_failure(answer):
            return _ERRORS[ReplyStatus(answer[0])](f"rank {rank}: {answer[1:].decode(errors='replace')}")
    return None
