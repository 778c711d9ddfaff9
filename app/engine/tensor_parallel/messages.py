"""What rank 0 tells its peers, as bytes. A step's message is numbers only: nothing is pickled for a token.

How messages go from rank 0 to its peers, and answers back.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from app.engine.execution.batch import Array, StepPlan

_DTYPES = tuple(np.dtype(name) for name in ("bool", "int32", "int64"))
_HEADER = struct.Struct("<BBII")  # dtype, dimensions, their sizes


class RankOrder(enum.IntEnum):
    """What the main thread of a peer does, one after the other."""

    CONNECT = 1  # join the process group
    LOAD = 2  # load its shard of the model
    OBSERVE = 3  # find out what the layers need
    MEMORY = 4  # see `vmem.tensor_parallel.orders.MemoryOrder`
    OPEN = 5  # run on the memory of that number
    STEP = 6  # compute a step
    OWN_LOGITS = 7  # compute one sequence by the model's own attention
    STOP = 8
    ADAPTER = 9  # see `adapters.PeerAdapters`


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
        arrays.append(array.copy())  # torch wants memory that it may write to, at addresses that fit
    return arrays


def pack_step(plan: StepPlan) -> bytes:
    return pack_arrays(
        [
            plan.num_tokens,
            plan.num_computed,
            plan.num_logits,
            plan.in_region,
            plan.token_ids,
            plan.states,
            plan.adapters,
            *plan.tables,
        ]
    )


def unpack_step(message: bytes) -> StepPlan:
    num_tokens, num_computed, num_logits, in_region, token_ids, states, adapters, *tables = unpack_arrays(message)
    return StepPlan(num_tokens, num_computed, num_logits, in_region, token_ids, states, adapters, tuple(tables))


class Link(Protocol):
    """Rank 0's end. `post` may be called from several threads; of `collect` one at a time.

    Both raise what the link's `check` raises: it is called now and then while they wait.
    """

    def post(self, message: bytes, *, answered: bool = False) -> None:
        """Send a message to every peer.

        Args:
            answered: every peer answers it, and `collect` follows before the next such message.
        """
        ...

    def collect(self) -> list[bytes]:
        """Every peer's answer to the last message that is answered, in the order of their ranks."""
        ...

    def close(self) -> None:
        """Nothing is sent any more."""
        ...


class PeerLink(Protocol):
    """A peer's end."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; `None` if there is none in time. Raises `EOFError` when rank 0 is gone, if that shows."""
        ...

    def reply(self, answer: bytes) -> None:
        """Answer the message received last."""
        ...
