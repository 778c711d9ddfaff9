"""Mirror: rank 0's backend and block copies on every rank of a tensor-parallel group (PagedAttention §4.6).

Rank 0 has the bookkeeping and decides. Its `KVMemory` works on a `MirroredBackend` and a `MirroredContents`, which make
each call here and on the peers: same ranges, pages and block ids, with each rank's share of the heads. `PeerMemory` is
the other end.

    rank 0    mapper or engine ── MirroredBackend ──> requests: reserve, map, unmap, …    ──> a peer's memory thread
              engine ──────────── MirroredContents ─> orders: copy, save, restore, steps  ──> a peer's main thread

A mapping takes as long as the slowest rank. When one rank fails, the others undo, and its error is raised here. Orders
are carried out one after the other, in the order of the steps.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence

import torch

from folio.vmem.backends.base import AccountedBackend, AddressRange, Backend, MemoryInfo, one_at_a_time, retry_undo
from folio.vmem.errors import IntegrityError, VmemError
from folio.vmem.tensor_parallel.orders import (
    ALL_RANKS,
    Answers,
    MemoryOrder,
    MemoryRequest,
    PeerRanks,
    failure_of,
    is_failure,
    message,
    unpack,
)
from folio.vmem.tensors import BlockContents, CacheTensors, CopyBlocks, LocalContents


class MirroredBackend:
    """A `Backend` whose calls happen on every rank, or on none. Addresses and handles are those of this rank.

    Peers create a page when it is first mapped: `create` sends no message, and `map` raises `OutOfPages` for a peer
    without memory.

    A fence is passed when this rank has passed it: ranks add up their results in every layer, so that none is a layer
    ahead. A peer may be behind at the end of a step, so that unmapping waits there, too.

    Args:
        local: this rank's backend, owned from now on and closed by `close`.
        capacity_bytes, headroom_bytes: arguments of `select_backend` on the peers.

    Attributes:
        number: of this memory on every rank.

    Raises:
        MapError: a peer has no such backend.
    """

    creates_when_mapped = True

    def __init__(
        self, local: AccountedBackend, peers: PeerRanks, *, capacity_bytes: int, headroom_bytes: int = 0
    ) -> None:
        self._local = local
        self.max_call_bytes, self.granularity_bytes = local.max_call_bytes, local.granularity_bytes
        self.peers = peers
        self.number = peers.open_memory()
        self._lock = threading.RLock()
        self._ranges: dict[int, AddressRange] = {}  # index, equal on all ranks → this rank's addresses
        self._num_reserved = 0
        self._num_fences = 0
        self._fences: dict[int, tuple[int, int]] = {}  # not known to be passed → local fence, orders before it
        self._orders_passed = 0
        try:
            self._check(
                self.peers.call_request(message(self.number, MemoryRequest.OPEN, capacity_bytes, headroom_bytes))
            )
        except VmemError:
            self.peers.post_request(message(self.number, MemoryRequest.CLOSE, peers.num_ordered))
            local.close()
            raise

    @property
    def num_mappings(self) -> int:
        return self._local.num_mappings

    def index_of(self, reserved: AddressRange) -> int:
        """The range's index on every rank."""
        return next(index for index, known in self._ranges.items() if known == reserved)

    @one_at_a_time
    def reserve(self, num_bytes: int) -> AddressRange:
        reserved = self._local.reserve(num_bytes)
        index, self._num_reserved = self._num_reserved, self._num_reserved + 1
        try:
            self._check(self.peers.call_request(message(self.number, MemoryRequest.RESERVE, index, num_bytes)))
        except VmemError:
            self.peers.post_request(message(self.number, MemoryRequest.RELEASE, index))
            retry_undo(lambda: self._local.release(reserved))
            raise
        self._ranges[index] = reserved
        return reserved

    @one_at_a_time
    def release(self, reserved: AddressRange) -> None:
        self._local.release(reserved)
        index = self.index_of(reserved)
        del self._ranges[index]
        self.peers.post_request(message(self.number, MemoryRequest.RELEASE, index))

    @one_at_a_time
    def create(self, page_bytes: int) -> int:
        return self._local.create(page_bytes)

    @one_at_a_time
    def destroy(self, handle: int) -> None:
        self._local.destroy(handle)
        self.peers.post_request(message(self.number, MemoryRequest.DESTROY, handle))

    @one_at_a_time
    def map(self, address: int, handles: Sequence[int]) -> None:
        span = AddressRange(address, len(handles) * self._local.page_bytes)
        answers = self._ask_to_map(ALL_RANKS, address, handles)
        refusal: VmemError | None = None
        try:
            self._local.map(address, handles)
        except VmemError as error:
            refusal = error
        finally:  # read the answers in any case, or the next call would read them
            replies = answers()
        failure = refusal or failure_of(replies)
        if failure is not None:
            self._undo_on_peers(replies, lambda ranks: self._ask_to_unmap(ranks, span))
            if refusal is None:
                retry_undo(lambda: self._local.unmap(span))
            raise failure

    @one_at_a_time
    def unmap(self, mapped: AddressRange) -> None:
        handles = self._local.handles_at(mapped)
        self._local.unmap(mapped)
        replies = self._ask_to_unmap(ALL_RANKS, mapped)()
        if (failure := failure_of(replies)) is not None:
            self._undo_on_peers(replies, lambda ranks: self._ask_to_map(ranks, mapped.address, handles))
            retry_undo(lambda: self._local.map(mapped.address, handles))
            raise failure

    def tensor(self, reserved: AddressRange) -> torch.Tensor:
        return self._local.tensor(reserved)

    def fence(self) -> int:
        passed = self._local.fence(), self.peers.num_ordered  # without the lock: it may have to wait for the device
        with self._lock:
            self._num_fences += 1
            self._fences[self._num_fences] = passed
            return self._num_fences

    @one_at_a_time
    def completed(self, fence: int) -> bool:
        known = self._fences.get(fence)
        if known is None:
            return True
        if not self._local.completed(known[0]):
            return False
        self._pass(fence)
        return True

    def wait(self, fence: int) -> None:
        known = self._fences.get(fence)
        if known is not None:
            self._local.wait(known[0])
            with self._lock:
                self._pass(fence)

    @one_at_a_time
    def memory_info(self) -> MemoryInfo:
        """This rank's bytes, and the least that any rank could still give."""
        answers = self.peers.call_request(message(self.number, MemoryRequest.INFO))
        info = self._local.memory_info()
        available = [unpack(answer)[0] for answer in self._check(answers)]
        return MemoryInfo(info.physical_bytes, min([info.available_bytes, *available]))

    @one_at_a_time
    def close(self) -> None:
        self._local.close()
        self._check(self.peers.call_request(message(self.number, MemoryRequest.CLOSE, self.peers.num_ordered)))

    def _pass(self, fence: int) -> None:
        """Note that the device has passed this fence and all before it."""
        for passed in [f for f in self._fences if f <= fence]:
            self._orders_passed = max(self._orders_passed, self._fences.pop(passed)[1])

    def _place(self, address: int) -> tuple[int, int]:
        """(index of the range, offset) of an address."""
        for index, reserved in self._ranges.items():
            if reserved.address <= address < reserved.end:
                return index, address - reserved.address
        raise IntegrityError(f"{address:#x} is outside every reservation")

    def _ask_to_map(self, ranks: int, address: int, handles: Sequence[int]) -> Answers:
        return self.peers.call_request(
            message(self.number, MemoryRequest.MAP, ranks, *self._place(address), self._local.page_bytes, *handles)
        )

    def _ask_to_unmap(self, ranks: int, mapped: AddressRange) -> Answers:
        place = self._place(mapped.address)
        return self.peers.call_request(
            message(self.number, MemoryRequest.UNMAP, ranks, *place, mapped.num_bytes, self._orders_passed)
        )

    def _check(self, answers: Answers) -> list[bytes]:
        replies = answers()
        if (failure := failure_of(replies)) is not None:
            raise failure
        return replies

    def _undo_on_peers(self, replies: Sequence[bytes], undo: Callable[[int], Answers]) -> None:
        """Have the peers that succeeded undo the call, and retry those that fail to."""
        ranks = sum(1 << rank for rank, reply in enumerate(replies, start=1) if not is_failure(reply))

        def attempt() -> None:
            nonlocal ranks
            replies = undo(ranks)()
            ranks &= sum(1 << rank for rank, reply in enumerate(replies, start=1) if is_failure(reply))
            if (failure := failure_of(replies)) is not None:
                raise failure

        if ranks:
            retry_undo(attempt)


class MirroredContents:
    """The `BlockContents` of every rank.

    Args:
        local: this rank's contents.
        backend: owner of the tensors' ranges.
    """

    def __init__(self, local: BlockContents, tensors: CacheTensors, backend: MirroredBackend) -> None:
        self._local = local
        self._peers, self._number = backend.peers, backend.number
        indices = [
            [[backend.index_of(reserved) for reserved in ranges] for ranges in kind]
            for kind in (tensors.homes, tensors.regions)
        ]
        shape = (tensors.groups, indices, tensors.region_tokens, tensors.max_tokens)
        self._peers.post_order(message(self._number, MemoryOrder.TENSORS) + pickle.dumps(shape))

    def copy(self, g: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._peers.post_order(message(self._number, MemoryOrder.COPY, g, *sources, *targets))
        self._local.copy(g, sources, targets)

    def save(self, key: int, g: int, block_ids: Sequence[int]) -> None:
        answers = self._peers.call_order(message(self._number, MemoryOrder.SAVE, key, g, *block_ids))
        try:
            self._local.save(key, g, block_ids)
        except BaseException:
            self._peers.post_order(message(self._number, MemoryOrder.DISCARD, key))
            raise
        finally:
            replies = answers()
        if (failure := failure_of(replies)) is not None:
            self.discard(key)
            raise failure

    def restore(self, key: int, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        if rows:
            self._peers.post_order(message(self._number, MemoryOrder.RESTORE, key, *rows, *block_ids))
            self._local.restore(key, rows, block_ids)

    def discard(self, key: int) -> None:
        self._local.discard(key)
        self._peers.post_order(message(self._number, MemoryOrder.DISCARD, key))


def mirror(
    local: AccountedBackend,
    peers: PeerRanks | None,
    *,
    capacity_bytes: int,
    headroom_bytes: int = 0,
    copy_blocks: CopyBlocks | None = None,
) -> tuple[Backend, Callable[[CacheTensors], BlockContents]]:
    """Backend and contents for `KVMemory`: this rank's, or those of all ranks. Raises `MapError`."""
    if peers is None:
        return local, lambda tensors: LocalContents(tensors, copy_blocks)
    backend = MirroredBackend(local, peers, capacity_bytes=capacity_bytes, headroom_bytes=headroom_bytes)
    return backend, lambda tensors: MirroredContents(LocalContents(tensors, copy_blocks), tensors, backend)
