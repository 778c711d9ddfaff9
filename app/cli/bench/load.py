"""Load generator for OpenAI-compatible servers: an open loop of arrival times.

All times of a request count from its *due* time, so that a late client does not favour a server (coordinated omission).
All requests are greedy streams, by default of `/v1/completions` and with a fixed length (`ignore_eos`, which not all
servers know).

The generator shares the machine with the server, so it must be cheap: one event loop, aiohttp with its parser in C, and
only the needed fields of each event are read.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from folio.app.http.event_stream import DONE, event_data

if TYPE_CHECKING:
    import aiohttp

REFUSALS = (429, 503)
# Fields of a delta with output tokens: of completions, of chats, and two names for reasoning.
_TEXTS = ("text", "content", "reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, due `at_s` seconds after the start of the run.

    Attributes:
        prompt: token ids, a text, or the messages of a chat.
    """

    prompt: Any
    max_tokens: int
    at_s: float = 0.0


@dataclass(slots=True)
class Record:
    """Record of one request. Times are seconds since the start of the run; `None`: the event has not happened.

    Attributes:
        max_tokens: requested output tokens.
        status: HTTP status, 0 if none came.
        events: (time, characters) of each event with text.
        num_tokens: by the server's usage, or the number of events with text without one.
        num_prompt_tokens: by the server's usage.
        error: message of an error event, of a refusal, or of a broken connection.
        done: the stream had its end mark.
    """

    due_s: float
    max_tokens: int
    sent_s: float | None = None
    status: int = 0
    ended_s: float | None = None
    events: list[tuple[float, int]] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    retry_after_s: float | None = None
    error: str | None = None
    done: bool = False

    @property
    def completed(self) -> bool:
        """Whether all tokens have come."""
        return self.status == 200 and self.done and self.error is None and self.num_tokens == self.max_tokens

    @property
    def answered(self) -> bool:
        """Whether the answer has come to its end, which may be before `max_tokens`."""
        return self.status == 200 and self.done and self.error is None and bool(self.events)

    @property
    def refused(self) -> bool:
        """Whether the server refused for lack of room."""
        return self.status in REFUSALS

    @property
    def failed(self) -> bool:
        """Whether the server reported another error, before the stream or in it."""
        return self.error is not None and self.status != 0 and not self.refused

    @property
    def lost(self) -> bool:
        """Whether neither a complete answer nor an error has come."""
        return not (self.completed or self.refused or self.failed)

    @property
    def ttft_s(self) -> float:
        """TTFT of an answered request."""
        return self.events[0][0] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first event, of an answered request."""
        first, last = self.events[0][0], self.events[-1][0]
        return (last - first) / max(self.num_tokens - 1, 1)

    @property
    def answered_s(self) -> float:
        """Seconds from the due time to the end."""
        assert self.ended_s is not None
        return self.ended_s - self.due_s


# Sends a request and fills its record; the clock is the run's.
Send = Callable[[Ask, Record, "Clock"], Coroutine[Any, Any, None]]


class Clock:
    """Seconds since its creation."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start


async def open_loop(send: Send, asks: Sequence[Ask]) -> list[Record]:
    """Send every request at its time, whatever the number in flight. Returns when all have ended."""
    clock = Clock()
    records: list[Record] = []
    tasks: list[asyncio.Task[None]] = []
    for ask in sorted(asks, key=lambda ask: ask.at_s):
        if (early_s := ask.at_s - clock.now()) > 0:
            await asyncio.sleep(early_s)
        records.append(Record(ask.at_s, ask.max_tokens))
        tasks.append(asyncio.create_task(send(ask, records[-1], clock)))
    await asyncio.gather(*tasks)
    return records


def poisson(rate: float, duration_s: float, seed: int) -> list[float]:
    """Times of a Poisson process with `rate` arrivals a second on average."""
    rng = random.Random(seed)
    times, at = [], rng.expovariate(rate)
    while at < duration_s:
        times.append(at)
        at += rng.expovariate(rate)
    return times


class HttpTarget:
    """`Send` to a server over HTTP.

    Args:
        is_chat: call `/v1/chat/completions`, with prompts of messages.

    Attributes:
        options: fields that not all servers know; remove those that the server refuses.
    """

    def __init__(
        self, name: str, url: str, model: str, session: aiohttp.ClientSession, *, is_chat: bool = False
    ) -> None:
        self.name = name
        self._url = f"{url}/v1/{'chat/' if is_chat else ''}completions"
        self._prompt_field = "messages" if is_chat else "prompt"
        self._session = session
        self._fixed = {"model": model, "temperature": 0, "stream": True}
        self.options: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}

    async def __call__(self, ask: Ask, record: Record, clock: Clock) -> None:
        import aiohttp

        fields = self._fixed | self.options | {self._prompt_field: ask.prompt, "max_tokens": ask.max_tokens}
        body = json.dumps(fields).encode()
        record.sent_s = clock.now()
        try:
            headers = {"Content-Type": "application/json"}
            async with self._session.post(self._url, data=body, headers=headers) as response:
                record.status = response.status
                if response.status == 200:
                    await self._read(response, record, clock)
                else:
                    retry_after = response.headers.get("Retry-After")
                    if retry_after is not None and retry_after.isdigit():
                        record.retry_after_s = float(retry_after)
                    record.error = await response.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # no end mark: `lost`
            record.status = 0
            record.error = f"{type(error).__name__}: {error}"
        record.ended_s = clock.now()

    async def _read(self, response: aiohttp.ClientResponse, record: Record, clock: Clock) -> None:
        async for data in event_data(response.content.iter_any()):
            _enter(data, record, clock.now())
        if not record.num_tokens:
            record.num_tokens = len(record.events)


def _enter(data: bytes, record: Record, now: float) -> None:
    if data == DONE:
        record.done = True
        return
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError(f"an event is no JSON object: {data[:80]!r}")
    if event.get("error"):
        record.error = str(event["error"])
        return
    deltas = [choice.get("delta") or choice for choice in event.get("choices") or ()]
    if length := sum(len(delta.get(name) or "") for delta in deltas for name in _TEXTS):
        record.events.append((now, length))
    if usage := event.get("usage"):
        record.num_tokens = usage.get("completion_tokens") or 0
        record.num_prompt_tokens = usage.get("prompt_tokens") or 0
        record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
