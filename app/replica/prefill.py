"""Calls whose prompt is computed here, and which another replica decodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from folio.app.fleet.messages import ForkCall, GenerateRequest, Piece
from folio.app.fleet.roles import Prefilled, Prefilling
from folio.app.replica.request_streams import RequestStreams


def pieces_here(
    requests: RequestStreams, call: GenerateRequest | ForkCall, replica: str
) -> AsyncGenerator[list[Piece] | GenerateRequest | str, None]:
    """The pieces of a call at this replica: `RequestStreams.pieces`. Of a call that leaves, `Prefilling`, and the first
    pieces, at once; of one that fetches, this replica's name."""
    if isinstance(call, GenerateRequest) and call.fetches:
        return _fetched(requests, call, replica)
    expected = call.expected if isinstance(call, GenerateRequest) else None
    if expected is None or not expected.leaves or expected.replica != replica:
        return requests.pieces(call)
    return _first_pieces(requests.pieces(replace(call, whole=False)), replica)


async def _fetched(requests: RequestStreams, call: GenerateRequest, replica: str) -> AsyncGenerator[str, None]:
    engine = requests.engine_of(call.model)
    if engine is None or (handover := engine.driver.engine.handover) is None:
        return
    chain = engine.driver.engine.memory.prefixes.chain(engine.driver.engine.intake.prefix_keys(call))
    receiver = handover.receiver
    found = asyncio.get_running_loop().run_in_executor(
        None, receiver.fetch_ahead, chain, call.prompt_token_ids, call.held_at
    )
    try:
        if await asyncio.shield(found) is not None:
            yield replica
            await asyncio.Event().wait()  # until the caller closes the stream
    finally:
        found.add_done_callback(lambda found: receiver.drop(found.result()))  # the caller may have gone before


async def _first_pieces(
    lists: AsyncGenerator[list[Piece] | GenerateRequest, None], replica: str
) -> AsyncGenerator[list[Piece] | GenerateRequest | str, None]:
    yield Prefilling(replica)
    async with aclosing(lists):  # which cancels the request; its blocks stay in the prefix cache
        async for pieces in lists:
            assert isinstance(pieces, list)  # only forks begin otherwise
            ends = pieces[-1].ends_request
            yield pieces if ends else Prefilled(pieces)
            return
