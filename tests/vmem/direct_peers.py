"""Peers of a mirrored memory in this process: everything is done at once."""

from __future__ import annotations

from collections.abc import Callable

from folio.vmem import Backend, LocalContents, PeerMemory
from folio.vmem.tensor_parallel.orders import is_failure


class DirectPeers:
    """`Peers` over one `PeerMemory` for each rank.

    Args:
        make_backends: capacity in bytes → a rank's backend, for each rank.
    """

    def __init__(self, *make_backends: Callable[[int], Backend]) -> None:
        self.backends: list[Backend] = []
        self.memories = [
            PeerMemory(rank, self._maker(make), LocalContents) for rank, make in enumerate(make_backends, 1)
        ]
        self._num_memories = self._num_ordered = 0

    def _maker(self, make: Callable[[int], Backend]) -> Callable[[int, int], Backend]:
        def made(capacity_bytes: int, headroom_bytes: int) -> Backend:
            self.backends.append(make(capacity_bytes))
            return self.backends[-1]

        return made

    def open_memory(self) -> int:
        self._num_memories += 1
        return self._num_memories - 1

    @property
    def num_ordered(self) -> int:
        return self._num_ordered

    def post_order(self, order: bytes) -> None:
        self.call_order(order)

    def call_order(self, order: bytes) -> Callable[[], list[bytes]]:
        self._num_ordered += 1
        answers = [memory.handle_order(order) for memory in self.memories]
        for memory in self.memories:
            memory.done()
        return lambda: answers

    def post_request(self, request: bytes) -> None:
        assert not any(map(is_failure, self.call_request(request)()))

    def call_request(self, request: bytes) -> Callable[[], list[bytes]]:
        answers = [memory.answer(request) for memory in self.memories]
        return lambda: answers
