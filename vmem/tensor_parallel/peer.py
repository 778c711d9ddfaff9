"""Peer memory: carries out the requests and orders of rank 0's `MirroredBackend` and `MirroredContents`."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Sequence

from folio.vmem.backends.base import AddressRange, Backend
from folio.vmem.errors import IntegrityError, OutOfPages, OutOfSwap, VmemError
from folio.vmem.tensor_parallel.orders import MemoryOrder, MemoryRequest, ReplyStatus, pack, unpack
from folio.vmem.tensors import BlockContents, CacheTensors

logger = logging.getLogger(__name__)


class PeerMemory:
    """The memories of one peer. Its memory thread calls `answer`; its main thread calls `handle_order`, and `done`
    after every order of any kind.

    Args:
        rank: 1 or more.
        make_backend: (capacity_bytes, headroom_bytes) → this rank's backend.
    """

    def __init__(
        self,
        rank: int,
        make_backend: Callable[[int, int], Backend],
        make_contents: Callable[[CacheTensors], BlockContents],
    ) -> None:
        self._rank = rank
        self._make_backend = make_backend
        self._make_contents = make_contents
        self._memories: dict[int, _Memory] = {}
        self._orders = threading.Condition()
        self._num_done = 0

    # ---- the memory thread ----

    def answer(self, message: bytes) -> bytes:
        """Carry out a request; a failed one has changed nothing."""
        number, request = message[0], message[1:]
        try:
            return pack(ReplyStatus.DONE, *self._answer(number, MemoryRequest(request[0]), unpack(request)))
        except OutOfPages as error:
            return bytes([ReplyStatus.OUT_OF_PAGES]) + str(error).encode()
        except IntegrityError as error:
            logger.exception("rank %d: the accounting of its KV memory is broken", self._rank)
            return bytes([ReplyStatus.BROKEN]) + str(error).encode()
        except VmemError as error:
            return bytes([ReplyStatus.FAILED]) + str(error).encode()

    def _answer(self, number: int, request: MemoryRequest, numbers: tuple[int, ...]) -> tuple[int, ...]:
        if request is MemoryRequest.OPEN:
            memory = _Memory(self._rank, self._make_backend(*numbers))
            with self._orders:
                self._memories[number] = memory
            return ()
        if number not in self._memories:
            if request is MemoryRequest.CLOSE:  # the backend could not be opened here
                return ()
            raise IntegrityError(f"memory {number} is not open")
        memory = self._memories[number]
        match request, numbers:
            case MemoryRequest.CLOSE, (num_orders,):
                self._wait_until_done(memory, num_orders)
                with self._orders:
                    del self._memories[number]
                memory.close()
            case MemoryRequest.RESERVE, (index, num_bytes):
                memory.ranges[index] = memory.backend.reserve(num_bytes)
            case MemoryRequest.RELEASE, (index,):
                memory.release(index)
            case MemoryRequest.DESTROY, (handle,):
                memory.destroy(handle)
            case (MemoryRequest.MAP | MemoryRequest.UNMAP, (ranks, *_)) if not ranks >> self._rank & 1:
                pass  # other ranks' pages
            case MemoryRequest.MAP, (_, index, offset, page_bytes, *handles):
                memory.map(memory.ranges[index].address + offset, page_bytes, handles)
            case MemoryRequest.UNMAP, (_, index, offset, num_bytes, num_orders):
                self._wait_until_done(memory, num_orders)
                memory.backend.unmap(AddressRange(memory.ranges[index].address + offset, num_bytes))
            case MemoryRequest.INFO, ():
                return (memory.backend.memory_info().available_bytes,)
            case _:
                raise IntegrityError(f"unknown request {request!r} with {len(numbers)} numbers")
        return ()

    def _wait_until_done(self, memory: _Memory, num_orders: int) -> None:
        """Wait until the main thread has carried out so many orders, and the device their work."""
        with self._orders:
            self._orders.wait_for(lambda: self._num_done >= num_orders)
            fence = memory.fence
        memory.backend.wait(fence)

    # ---- the main thread ----

    def handle_order(self, message: bytes) -> bytes:
        """Carry out an order. The answer matters for `call_order` only.

        Raises:
            Exception: an order that must succeed failed; this rank cannot continue.
        """
        memory, order = self._memories[message[0]], message[1:]
        kind = MemoryOrder(order[0])
        if kind is MemoryOrder.TENSORS:
            groups, indices, region_tokens, max_tokens = pickle.loads(order[1:])
            homes, regions = ([[memory.ranges[i] for i in of_group] for of_group in kind] for kind in indices)
            memory.tensors = CacheTensors(memory.backend, groups, homes, regions, region_tokens, max_tokens)
            memory.contents = self._make_contents(memory.tensors)
            return pack(ReplyStatus.DONE)
        first, *numbers = unpack(order)
        half = len(numbers) // 2
        if kind is MemoryOrder.COPY:
            memory.contents.copy(first, numbers[:half], numbers[half:])
        elif kind is MemoryOrder.SAVE:
            try:
                memory.contents.save(first, numbers[0], numbers[1:])
            except (OutOfSwap, RuntimeError, MemoryError) as error:
                return bytes([ReplyStatus.OUT_OF_SWAP]) + str(error).encode()
        elif kind is MemoryOrder.RESTORE:
            memory.contents.restore(first, numbers[:half], numbers[half:])
        else:
            memory.contents.discard(first)
        return pack(ReplyStatus.DONE)

    def tensors(self, number: int) -> CacheTensors:
        """The tensors of a memory, after `MemoryOrder.TENSORS`."""
        return self._memories[number].tensors

    def done(self) -> None:
        """Note that this thread has carried out an order of any kind."""
        with self._orders:
            self._num_done += 1
            for memory in self._memories.values():
                memory.fence = memory.backend.fence()
            self._orders.notify_all()


class _Memory:
    """Pages and ranges of one memory.

    Attributes:
        ranges: by their index on every rank.
        fence: after the last order carried out.
    """

    tensors: CacheTensors
    contents: BlockContents

    def __init__(self, rank: int, backend: Backend) -> None:
        self._rank = rank
        self.backend = backend
        self.ranges: dict[int, AddressRange] = {}
        self.fence = backend.fence()
        self._handles: dict[int, int] = {}  # rank 0's handle → this rank's

    def map(self, address: int, page_bytes: int, handles: Sequence[int]) -> None:
        """Map pages, creating new ones first."""
        created = []
        try:
            for handle in handles:
                if handle not in self._handles:
                    self._handles[handle] = self.backend.create(page_bytes)
                    created.append(handle)
            self.backend.map(address, [self._handles[handle] for handle in handles])
        except VmemError:
            for handle in created:
                self.destroy(handle)
            raise

    def release(self, index: int) -> None:
        if index in self.ranges:  # else the reservation failed here
            self.backend.release(self.ranges[index])
            del self.ranges[index]

    def destroy(self, handle: int) -> None:
        """Destroy a page that was ever mapped. A page that cannot be destroyed is reused with its handle."""
        if handle not in self._handles:
            return
        try:
            self.backend.destroy(self._handles[handle])
        except IntegrityError:
            raise
        except VmemError as error:
            logger.warning("rank %d keeps a page that it cannot destroy: %s", self._rank, error)
            return
        del self._handles[handle]

    def close(self) -> None:
        for handle in self._handles.values():
            self.backend.destroy(handle)
        self.backend.close()
