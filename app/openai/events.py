"""Server-sent events as this API writes them, read."""

from __future__ import annotations

from collections.abc import AsyncIterator

_DATA, DONE = b"data: ", b"[DONE]"


async def event_data(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event, which is one line, from the parts of an answer as they come; `DONE` too."""
    begun = b""
    async for part in parts:
        *events, begun = (begun + part).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(_DATA):
                    yield line[len(_DATA) :]
