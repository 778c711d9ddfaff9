"""Threads of torch's operations on CPUs. A team of them waits for its slowest thread in each operation: with small
tensors, and beside other work, most of the time."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


@functools.cache
def _openmp() -> Any:
    """The library of torch's teams; `None` if it has another one. `torch.set_num_threads` would also change threads
    that begin later."""
    library = ctypes.CDLL(torch._C.__file__)
    return library if hasattr(library, "omp_set_num_threads") else None


def _use_threads(count: int) -> None:
    if (library := _openmp()) is not None:
        library.omp_set_num_threads(count)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the context this thread computes torch's operations alone."""
    before = torch.get_num_threads()
    _use_threads(1)
    try:
        yield
    finally:
        _use_threads(before)


def each(work: Callable[[int], None], items: Sequence[int]) -> None:
    """`work(item)` for all items, in as many threads as torch uses, each of which computes its operations alone."""
    mode, count = torch.is_inference_mode_enabled(), min(torch.get_num_threads(), len(items))

    def run(item: int) -> None:
        with torch.inference_mode(mode):
            work(item)

    if count < 2:
        with one_thread():
            for item in items:
                work(item)
        return
    with ThreadPoolExecutor(count, initializer=_use_threads, initargs=(1,)) as pool:
        for _ in pool.map(run, items):
            pass
