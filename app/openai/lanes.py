"""Threads for work whose time goes with the size of a request."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

# Of a body: what is longer is read, and made tokens of, outside of the event loop; ...
LOOP_BYTES = 16 << 10
# ... and what is longer than this is done one at a time, so that neither memory nor time go with the number of clients.
SHARED_BYTES = 128 << 10

P = ParamSpec("P")
T = TypeVar("T")


class SizedExecutor:
    """A thread for large requests, one at a time, and several for the others, which so never wait for a large one.

    Args:
        name: of the threads.
        num_threads: for requests that are not large.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._shared = ThreadPoolExecutor(num_threads, name)
        self._large = ThreadPoolExecutor(1, f"{name}-large")

    async def run(self, num_bytes: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it as `asyncio.to_thread` would, for a request of this size."""
        threads = self._large if num_bytes > SHARED_BYTES else self._shared
        bound = partial(contextvars.copy_context().run, call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(threads, bound)
