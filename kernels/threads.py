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
def _setters() -> tuple[Any, Any]:
    """What sets this thread's number of threads in OpenMP and in MKL; `None` if torch has other libraries.
    `torch.set_num_threads` would also change threads that begin later, and MKL's of all threads."""
    library = ctypes.CDLL(torch._C.__file__)
    return getattr(library, "omp_set_num_threads", None), getattr(library, "MKL_Set_Num_Threads_Local", None)


def _use_threads(count: int, of_mkl: int) -> int:
    """Set this thread's number of threads, MKL's apart (0: as for the whole process); return MKL's before."""
    set_openmp, set_mkl = _setters()
    if set_openmp is not None:
        set_openmp(count)
    return 0 if set_mkl is None else int(set_mkl(of_mkl))


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the context this thread computes torch's operations alone."""
    before, of_mkl = torch.get_num_threads(), _use_threads(1, 1)
    try:
        yield
    finally:
        _use_threads(before, of_mkl)


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
    with ThreadPoolExecutor(count, initializer=_use_threads, initargs=(1, 1)) as pool:
        for _ in pool.map(run, items):
            pass
