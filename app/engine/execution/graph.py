"""Graph: the launches of a forward, recorded once and replayed over the same addresses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from folio.kernels import AttentionProvider

# Memory that the driver takes for a graph is counted up to this; more has been taken by other threads or processes.
_MOST_OUTSIDE_BYTES = 32 << 20


class CaptureError(Exception):
    """The work does what cannot be replayed, such as reading a value on the host."""


class Graph(Protocol):
    """Launches that are captured once and replayed any number of times.

    A replay reads and writes the addresses of the capture. What lies there may change in between, and so may the pages
    behind addresses; tensors that the work has made itself must not be kept, because a replay overwrites them.

    Attributes:
        num_bytes: memory that the graph holds; after a failed capture, what it has left in its pool.
    """

    num_bytes: int

    def capture(self, work: Callable[[], object]) -> None:
        """Run the work, which compiles kernels and lets their buffers grow, and capture it. Once.

        Raises:
            CaptureError: the work cannot be captured; it may still be run.
            torch.OutOfMemoryError: there is no memory for the graph.
        """
        ...

    def launch_between(self, call: Callable[[], object]) -> None:
        """Within `capture`: end a piece of the graph here, and begin the next one. Replays call `call` in between,
        captures do not. The tensors that it reads and writes must keep their addresses."""
        ...

    def replay(self) -> None:
        """Launch the whole graph."""
        ...


class CudaGraph:
    """A CUDA graph. Those with one pool share their memory: results of one hold until another is replayed.

    Capture is "thread_local": calls of other threads that are illegal during a capture would otherwise end it, such as
    those of another engine's mapper, or of a garbage collector that frees an event.

    Args:
        pool: not to be used again after a capture that failed.
        stream: a side stream; the default stream cannot be captured.
    """

    def __init__(self, pool: GraphPool, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._pieces: list[torch.cuda.CUDAGraph] = []
        self._calls: list[Callable[[], object]] = []  # after all pieces but the last
        self.num_bytes = 0

    def capture(self, work: Callable[[], object]) -> None:
        stream, current = self._stream, torch.cuda.current_stream()
        try:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                work()
            current.wait_stream(stream)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free_bytes, reserved_bytes = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
            try:
                with torch.cuda.stream(stream):
                    self._begin_piece()
                    try:
                        work()
                    except BaseException:
                        with suppress(RuntimeError):  # about a capture no longer valid: the first error says why
                            self._pieces[-1].capture_end()
                        raise
                    self._pieces[-1].capture_end()
            finally:  # the pool keeps it after a failure, too
                # Another thread that loads a model may give memory back meanwhile, or take some.
                self.num_bytes = max(torch.cuda.memory_reserved() - reserved_bytes, 0)
            outside_bytes = free_bytes - torch.cuda.mem_get_info()[0] - self.num_bytes
            self.num_bytes += min(max(outside_bytes, 0), _MOST_OUTSIDE_BYTES)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(f"{type(error).__name__}: {error}") from error

    def launch_between(self, call: Callable[[], object]) -> None:
        if self._pieces:  # else the work runs without being captured
            self._pieces[-1].capture_end()
            self._calls.append(call)
            self._begin_piece()

    def _begin_piece(self) -> None:
        piece = torch.cuda.CUDAGraph()
        piece.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
        self._pieces.append(piece)

    def replay(self) -> None:
        for piece, call in zip(self._pieces, self._calls, strict=False):
            piece.replay()
            call()
        self._pieces[-1].replay()


class GraphPool:
    """Memory of the graphs that refer to it. Torch gives it back (`empty_cache`) once the last of them is gone, and the
    handle must not be used any more."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()


def cuda_graphs(device: torch.device) -> Callable[[], Graph]:
    """A function that makes graphs of a device. They share a pool with the earlier graphs that still exist."""
    stream = torch.cuda.Stream(device)
    pools: weakref.WeakSet[GraphPool] = weakref.WeakSet()  # at most one

    def new_graph() -> Graph:
        pool = next(iter(pools), None) or GraphPool()
        pools.add(pool)
        return CudaGraph(pool, stream)

    return new_graph


@dataclass(frozen=True, slots=True)
class Capture:
    """How a model's steps are captured.

    Attributes:
        provider: attention whose launches are captured.
        new_pool: returns a function that makes graphs, whose memory is apart from that of other pools.
    """

    provider: AttentionProvider
    new_pool: Callable[[], Callable[[], Graph]]


# By type of device; on others all steps are launched kernel by kernel. Tests add a stand-in for CPUs.
CAPTURES: dict[str, Callable[[torch.device, AttentionProvider], Capture]] = {
    "cuda": lambda device, provider: Capture(provider, partial(cuda_graphs, device)),
}
