"""Server-sent events as servers of the OpenAI API send them: one line of data each, and an end mark."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

_FIELD, DONE = b"data:", b"[DONE]"
_PROGRESS = b": keep-alive {"


async def event_data(
    parts: AsyncIterator[bytes], on_progress: Callable[[dict[str, Any]], None] | None = None
) -> AsyncIterator[bytes]:
    """The data of each event, from the parts of an answer as they arrive; `DONE` included.

    Args:
        on_progress: called with the fields of Folio's comments (`stream_options.include_progress`).
    """
    begun = b""
    async for part in parts:
        *lines, begun = (begun + part).split(b"\n")
        for line in lines:
            if line.startswith(_FIELD):
                yield line[len(_FIELD) :].strip()
            elif on_progress is not None and line.startswith(_PROGRESS):
                with suppress(ValueError):  # a comment of another server
                    on_progress(json.loads(line[len(_PROGRESS) - 1 :]))
