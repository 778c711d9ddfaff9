"""Closed loop of requests, and connections to several servers at once, for the load generator of `folio bench`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from folio.app.cli.bench.load import Ask, Clock, HttpTarget, Record, Send

if TYPE_CHECKING:
    import aiohttp

# Silence after which an answer counts as lost.
SILENCE_S = 120.0


async def closed_loop(send: Send, asks: Iterable[Ask], at_once: int) -> list[Record]:
    """Keep this many requests in flight. Records are in the order of sending."""
    clock = Clock()
    records: list[Record] = []
    waiting = iter(asks)

    async def work() -> None:
        for ask in waiting:
            record = Record(clock.now(), ask.max_tokens)
            records.append(record)
            await send(ask, record, clock)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return records


def new_session() -> aiohttp.ClientSession:
    """Connections without a limit of their number or of an answer's time."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


@asynccontextmanager
async def connect(servers: Sequence[tuple[str, str]]) -> AsyncIterator[list[HttpTarget]]:
    """Targets for servers (name, URL without `/v1`), each with the first model that the server lists.

    Raises:
        aiohttp.ClientError: a server cannot be reached, or does not list its models.
    """
    async with new_session() as session:
        targets = []
        for name, url in servers:
            async with session.get(f"{url}/v1/models", raise_for_status=True) as response:
                models = await response.json()
            targets.append(HttpTarget(name, url, models["data"][0]["id"], session))
        yield targets
