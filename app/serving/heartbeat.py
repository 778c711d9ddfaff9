"""Signs of life in streams between replicas and ingresses.

A machine that is lost, or a process that is stopped, does not say so, and gRPC asks once in minutes. So a replica sends
an empty list when a stream has had nothing else for a while, and an ingress takes a stream that is silent for a replica
that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any, TypeVar

from app.errors import UnavailableError

BEAT_S = 5.0
# Of a replica that serves: its event loop may be late when many others compute on its cores.
SILENCE_S = 30.0

T = TypeVar("T")


async def beating(items: AsyncGenerator[T, None], beat_s: float = BEAT_S) -> AsyncGenerator[T | list[Any], None]:
    """The items as they come, and an empty list whenever none has come for `beat_s`."""
    coming: asyncio.Future[T] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(items))
            await asyncio.wait((coming,), timeout=beat_s)
            if not coming.done():
                yield []
                continue
            ended, coming = coming, None
            try:
                item = ended.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait((coming,))
        await items.aclose()


async def heard(
    response: AsyncIterable[Any], silence_s: float, first_s: float | None = None
) -> AsyncGenerator[Any, None]:
    """The items of a replica's stream, without signs of life.

    Args:
        silence_s: how long it may be silent.
        first_s: how long its first item may take, if that is another time.

    Raises:
        UnavailableError: the replica is gone.
    """
    items, wait_s = aiter(response), silence_s if first_s is None else first_s
    while True:
        try:
            async with asyncio.timeout(wait_s):
                item = await anext(items)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise UnavailableError(
                f"the engine replica has been silent for {wait_s:g} s; send the request again"
            ) from None
        wait_s = silence_s
        if item != []:
            yield item
