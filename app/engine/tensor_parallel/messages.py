"""Messages from rank 0 to its peers as bytes, without pickling in steps; the Protocols of the links that carry them."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Protocol

import numpy as np

from app.engine.execution.batch import Array, StepPlan

_DTYPES = tuple(np.dtype(name) for name in ("bool", "int32", "int64"))
_HEADER = struct.Struct("<BBII")  # dtype, dimensions, their sizes


class RankOrder(enum.IntEnum):
    """Orders for the main thread of a peer, executed in sequence."""

    CONNECT = 1  # join the process group
    LOAD = 2  # load the shard of the model
    OBSERVE = 3  # observe the layers' geometry
    MEMORY = 4  # see `vmem.tensor_parallel.orders.MemoryOrder`
    OPEN = 5  # use the memory of the given number
    STEP = 6  # compute a step
    OWN_LOGITS = 7  # compute one sequence by the model's own attention
    STOP = 8
    ADAPTER = 9  # see `lora.store.PeerAdapters`


def pack_arrays(arrays: Sequence[Array]) -> bytes:
    """Arrays of at most two dimensions."""
    parts = []
    for array in arrays:
        rows, columns = (*array.shape, 0, 0)[:2]
        parts += [_HEADER.pack(_DTYPES.index(array.dtype), array.ndim, rows, columns), array.tobytes()]
    return b"".join(parts)


def unpack_arrays(message: bytes) -> list[Array]:
    arrays, at = [], 0
    while at < len(message):
        dtype, ndim, *sizes = _HEADER.unpack_from(message, at)
        shape = sizes[:ndim]
        count = int(np.prod(shape))
        at += _HEADER.size
        array = np.frombuffer(message, _DTYPES[dtype], count, at).reshape(shape)
        at += array.nbytes
        arrays.append(array.copy())  # torch needs writable, aligned memory
    return arrays


def pack_step(plan: StepPlan) -> bytes:
    *arrays, tables = (getattr(plan, field.name) for field in fields(plan))
    return pack_arrays([*arrays, *tables])


def unpack_step(message: bytes) -> StepPlan:
    arrays = unpack_arrays(message)
    names = [field.name for field in fields(StepPlan)][:-1]  # without the tables
    return StepPlan(**dict(zip(names, arrays, strict=False)), tables=tuple(arrays[len(names) :]))


class Link(Protocol):
    """Rank 0's end. `post` may be called from several threads, `collect` from one at a time. Both call the link's
    `check` periodically while they wait, and raise its exception.
    """

    def post(self, message: bytes, *, answered: bool = False) -> None:
        """Send a message to every peer.

        Args:
            answered: every peer answers, and `collect` follows before the next answered message.
        """
        ...

    def collect(self) -> list[bytes]:
        """The peers' answers to the last answered message, by rank."""
        ...

    def close(self) -> None: ...


class PeerLink(Protocol):
    """A peer's end."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; `None` after the timeout. Raises `EOFError` when a TCP connection to rank 0 has ended."""
        ...

    def reply(self, answer: bytes) -> None:
        """Answer the last received message."""
        ...
