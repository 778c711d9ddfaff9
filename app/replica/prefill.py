"""Calls whose prompt is computed here, and which another replica decodes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from folio.app.fleet.messages import ForkCall, GenerateRequest, Piece
from folio.app.fleet.roles import Prefilled
from folio.app.replica.request_streams import RequestStreams


def pieces_here(
    requests: RequestStreams, call: GenerateRequest | ForkCall, replica: str
) -> AsyncGenerator[list[Piece] | GenerateRequest, None]:
    """The pieces of a call at this replica: `RequestStreams.pieces`. Of a call that leaves, the first ones, at once."""
    expected = call.expected if isinstance(call, GenerateRequest) else None
    if expected is None or not expected.leaves or expected.replica != replica:
        return requests.pieces(call)
    return _first_pieces(requests.pieces(replace(call, whole=False)))


async def _first_pieces(
    lists: AsyncGenerator[list[Piece] | GenerateRequest, None],
) -> AsyncGenerator[list[Piece] | GenerateRequest, None]:
    async with aclosing(lists):  # which cancels the request; its blocks stay in the prefix cache
        async for pieces in lists:
            assert isinstance(pieces, list)  # only forks begin otherwise
            ends = pieces[-1].ends_request
            yield pieces if ends else Prefilled(pieces)
            return
