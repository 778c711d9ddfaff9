"""Response of server-sent events: its head does not wait long for an item, and keep-alives interrupt silences."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from folio.app.http import errors
from folio.app.http.request_context import current_context, note_error, request_id

logger = logging.getLogger(__name__)

# Time without an item after which the head is sent; until then an error has its HTTP status. Time between keep-alive
# messages later, and where they tell the progress: programs and proxies give up on silent connections.
_HEAD_S, _SILENCE_S, _PROGRESS_S = 1.0, 10.0, 2.0
# Interval of polls, on a busy machine, until no check can refuse a request: its error is still to get an HTTP status.
_CHECK_S = 0.25
KEEP_ALIVE = b": keep-alive\n\n"


class EventResponse(StreamingResponse):
    """Items as server-sent events, and `silence` while there are none. An error is raised if the head has not been
    sent; otherwise it becomes an event.

    Args:
        write: the event of an item.
        failed: the event of an error.
        silence: one or more events, or a comment.
        end: bytes after the last item.
        shows_progress: `silence` tells the progress, so that it is sent more often.
    """

    def __init__(
        self,
        items: AsyncIterator[Any],
        write: Callable[[Any], bytes],
        failed: Callable[[Exception], bytes],
        silence: Callable[[], bytes],
        end: bytes = b"",
        *,
        shows_progress: bool = False,
    ) -> None:
        # Proxies such as nginx would hold events back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(items, write, failed, end), media_type="text/event-stream", headers=headers)
        self._silence = silence
        self._silence_s = _PROGRESS_S if shows_progress else _SILENCE_S
        self._has_begun = False

    async def stream_response(self, send: Send) -> None:
        async def begin_or_send(body: bytes, *, more: bool = True) -> None:
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            message: Message = {"type": "http.response.body", "body": body, "more_body": more}
            await send(message)

        heart = _Heart(begin_or_send, self._silence, self._silence_s)
        try:
            async for event in self.body_iterator:
                await heart.send(cast(bytes, event))
            await heart.send(b"", more=False)
        finally:
            await heart.stop()

    async def _events(
        self,
        items: AsyncIterator[Any],
        write: Callable[[Any], bytes],
        failed: Callable[[Exception], bytes],
        end: bytes,
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(cast(Any, items)):
                async for item in items:
                    yield write(item)
            if end:
                yield end
        except Exception as error:
            if not self._has_begun:
                raise
            note_broken_stream(error)
            yield failed(error)


class _Heart:
    """Sends the parts of one answer, and a keep-alive message after `_HEAD_S` without a first part or `interval_s`
    without a later one. A timer checks the time. Only messages take a task, since the coroutine that waits for the next
    item must not be interrupted.

    Args:
        send: sends a part.
        silence: makes a keep-alive message.
    """

    def __init__(self, send: Callable[..., Any], silence: Callable[[], bytes], interval_s: float) -> None:
        self._send_part, self._silence, self._interval_s = send, silence, interval_s
        self._loop = asyncio.get_running_loop()
        self._is_sending = self._has_items = False
        self._beat: asyncio.Task[None] | None = None
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_at(self._sent_at + _HEAD_S, self._look)

    async def send(self, part: bytes, *, more: bool = True) -> None:
        if self._beat is not None:
            await self._beat  # raises if the client is gone
        self._is_sending = self._has_items = True
        await self._send_part(part, more=more)
        self._is_sending = False
        self._sent_at = self._loop.time()

    async def stop(self) -> None:
        self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)

    def _look(self) -> None:
        """Send a keep-alive message if it is due, and check again when the next one may be."""
        now = self._loop.time()
        context = current_context()
        if context is not None and context.may_be_refused and now < self._sent_at + self._interval_s:
            self._timer = self._loop.call_at(now + _CHECK_S, self._look)
            return
        due_at = self._sent_at + self._interval_s if self._has_items else now
        if now < due_at:
            self._timer = self._loop.call_at(due_at, self._look)
            return
        self._timer = self._loop.call_at(now + self._interval_s, self._look)
        if not self._is_sending and self._beat is None:  # else the client reads slowly
            if context is not None and self._has_items:
                context.progress = None  # the prompt is done
            # The message is made now, before another item can be: responses number their events.
            self._beat = self._loop.create_task(self._send_silence(self._silence()))

    async def _send_silence(self, part: bytes) -> None:
        await self._send_part(part)
        context = current_context()
        if context is not None and not self._has_items:
            context.first_byte_at = None  # the log means the first token's
        self._sent_at, self._beat = self._loop.time(), None


def note_broken_stream(error: Exception) -> None:
    """Log an error of a stream whose status has been sent, with a traceback unless it was to be expected."""
    status, answer = errors.error_response(error)
    note_error(answer.error.code)
    unexpected = status >= 500 and status != 503
    level = logging.ERROR if unexpected else logging.INFO  # without the message, which may quote the request
    logger.log(
        level,
        "the stream of request %s failed: %s",
        request_id(),
        answer.error.code,
        exc_info=error if unexpected else None,
    )
