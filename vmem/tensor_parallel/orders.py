"""What rank 0 tells the memories of its peers, and how they answer."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from vmem.errors import IntegrityError, MapError, OutOfPages, OutOfSwap, VmemError

Answers = Callable[[], list[bytes]]
ALL_RANKS = -1  # else a bit for each rank that is meant


class PeerRanks(Protocol):
    """How the other ranks are reached. When they are lost nothing is answered, and calls go on without them: whoever
    runs the ranks has to notice."""

    def open_memory(self) -> int:
        """A number for a new memory, below 256; messages about it begin with that."""
        ...

    @property
    def num_ordered(self) -> int:
        """Orders so far, of whatever kind."""
        ...

    def post_order(self, order: bytes) -> None:
        """Have the main thread of every peer do something, after what was ordered before. It has to succeed."""
        ...

    def call_order(self, order: bytes) -> Answers:
        """The same, where it may fail. Calling the result waits for the peers' answers."""
        ...

    def post_request(self, request: bytes) -> None:
        """Have the memory thread of every peer do something, after what was requested before. It has to succeed."""
        ...

    def call_request(self, request: bytes) -> Answers:
        """The same, where it may fail. Calling the result waits for the peers' answers."""
        ...


class MemoryRequest(enum.IntEnum):
    """What a peer's memory thread does."""

    OPEN = 1  # capacity, headroom; the memory's first request
    CLOSE = 2  # orders to wait for
    RESERVE = 3  # range, bytes
    RELEASE = 4  # range
    DESTROY = 5  # handle
    MAP = 6  # ranks, range, offset, page bytes, handles …
    UNMAP = 7  # ranks, range, offset, bytes, orders to wait for
    INFO = 8


class MemoryOrder(enum.IntEnum):
    """What a peer's main thread does with its memory."""

    TENSORS = 1  # pickled: groups, homes, regions, region tokens
    COPY = 2  # group, sources …, targets …
    SAVE = 3  # key, group, blocks …
    RESTORE = 4  # key, rows …, blocks …
    DISCARD = 5  # key


class ReplyStatus(enum.IntEnum):
    """How a peer's answer begins; numbers or a text follow."""

    DONE = 0
    OUT_OF_PAGES = 1
    OUT_OF_SWAP = 2
    FAILED = 3
    BROKEN = 4  # its books do not add up


_ERRORS: dict[ReplyStatus, Callable[[str], VmemError]] = {
    ReplyStatus.OUT_OF_PAGES: lambda _: OutOfPages(1, 0),
    ReplyStatus.OUT_OF_SWAP: OutOfSwap,
    ReplyStatus.FAILED: MapError,
    ReplyStatus.BROKEN: IntegrityError,
}


def pack(kind: int, *numbers: int) -> bytes:
    """A byte and int64s."""
    return struct.pack(f"<B{len(numbers)}q", kind, *numbers)


def unpack(message: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{(len(message) - 1) // 8}q", message[1:])


def is_failure(answer: bytes) -> bool:
    """Whether a peer's answer says that it could not do something."""
    return answer[0] != ReplyStatus.DONE


def failure_of(answers: Sequence[bytes]) -> VmemError | None:
    """What the first peer that failed says."""
    for rank, answer in enumerate(answers, start=1):
        if is_failure(answer):
            return _ERRORS[ReplyStatus(answer[0])](f"rank {rank}: {answer[1:].decode(errors='replace')}")
    return None
