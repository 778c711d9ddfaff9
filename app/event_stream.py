"""Server-sent events as servers of the OpenAI API send them: one line of data each, and an end mark."""

from __future__ import annotations

from collections.abc import AsyncIterator

_FIELD, DONE = b"data:", b"[DONE]"


async def event_data(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event, from the parts of an answer as they arrive; `DONE` included."""
    begun = b""
    async for part in parts:
        *lines, begun = (begun + part).split(b"\n")
        for line in lines:
            if line.startswith(_FIELD):
                yield line[len(_FIELD) :].strip()
