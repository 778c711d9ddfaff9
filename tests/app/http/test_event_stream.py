"""Server-sent events in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from folio.app.http.event_stream import DONE, event_data


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_in_pieces(end: bytes, size: int) -> None:
    comments = [b": keep-alive", b"", b': keep-alive {"queue": 3}', b"", b": {"]
    text = end.join([b'data: {"a": 1}', b"", *comments, b"event: x", b"data:2", b"", b"data: [DONE]", b"", b""])
    told: list[object] = []

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(text), size):
            yield text[at : at + size]

    async def read() -> list[bytes]:
        return [data async for data in event_data(parts(), told.append)]

    assert asyncio.run(read()) == [b'{"a": 1}', b"2", DONE]
    assert told == [{"queue": 3}]
