"""Bystanders: innocent clients with repeated requests whose answers are known."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.hostile.wire import Answer, Dropped, connected, request
from tests.processes import until

DEADLINE_S = 90.0
NUM_CLIENTS = 3
_POLL_S = 0.2
# After so many requests in an attack, pauses between them: long attacks need not be asked as often as short ones.
_WITHOUT_PAUSE, _PAUSE_S = 16, 0.25
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_ROOMS = " ".join(f"The key of room {100 + i} is {10 + 7 * i % 89}." for i in range(24))
_SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": [101, 102, 103]}, "free": {"type": "boolean"}},
    "required": ["room", "free"],
    "additionalProperties": False,
}


def _chat(content: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 40} | more


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (_CHAT, _chat("What is PagedAttention?")),
    "stream": (_CHAT, _chat("What is vAttention?", stream=True)),
    "look-up": (_CHAT, _chat(f"{_ROOMS} What is the key of room 117?")),
    "sampled": (_TEXT, {"prompt": "A page is", "n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 24}),
    "log probabilities": (_TEXT, {"prompt": "The key of room", "logprobs": 2, "temperature": 0, "max_tokens": 8}),
    "schema": (_CHAT, _chat("Which room is free?", guided_json=_SCHEMA)),
    "stops": (_TEXT, {"prompt": _ROOMS[:400], "stop": [". The"], "seed": 3, "temperature": 0.7, "max_tokens": 24}),
    "long stream": (
        _TEXT,
        {"prompt": "What is Folio?", "seed": 5, "max_tokens": 64, "ignore_eos": True, "stream": True},
    ),
}


@dataclass
class Tally:
    """Outcomes of innocent requests.

    Attributes:
        counts: "right"; "wrong": other tokens than in peace; "lost": an error, or no whole answer; "hung": nothing in
            time. And "sent again": how often one was told to come again (429) before it had its answer.
        strange: what came instead of right answers.
        longest_pause_s: between two events of a stream.
        longest_wait_s: before the first event of a stream.
        slowest_health_s: of the answers of `/health`.
    """

    counts: Counter[str] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0
    longest_wait_s: float = 0.0
    slowest_health_s: float = 0.0

    @property
    def longest_s(self) -> tuple[float, float, float]:
        """Wait, pause and `/health`."""
        return self.longest_wait_s, self.longest_pause_s, self.slowest_health_s


class Bystanders(threading.Thread):
    """Sends requests until closed, in a thread of its own.

    Args:
        expected: what each request of `REQUESTS` gets in peace (`answers_in_peace`).
    """

    def __init__(self, port: int, expected: Mapping[str, str]) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._expected = expected
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._tally = Tally()
        self._last_sent = [0.0] * NUM_CLIENTS  # of the last request that ended, by client

    def run(self) -> None:
        asyncio.run(self._ask())

    def take(self) -> Tally:
        """Outcomes since the last call. Waits until each client has an answer to a request sent after this call."""
        now = time.monotonic()
        until(lambda: min(self._last_sent) >= now or not self.is_alive(), 3 * DEADLINE_S)
        assert self.is_alive(), "the innocent clients have ended"
        with self._lock:
            taken, self._tally = self._tally, Tally()
        return taken

    def close(self) -> None:
        self._closing.set()
        self.join()

    async def _ask(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_at_health())
            for client in range(NUM_CLIENTS):
                tasks.create_task(self._client(client))

    async def _client(self, client: int) -> None:
        # The first one has a stream under way all the time, whose pauses are measured.
        names = ["long stream"] if client == 0 else [name for name in REQUESTS if name != "long stream"]
        for number in itertools.count(client * len(names) // NUM_CLIENTS):
            if self._closing.is_set():
                return
            sent, name = time.monotonic(), names[number % len(names)]
            outcome, detail = await self._outcome(name)
            with self._lock:
                self._tally.counts[outcome] += 1
                if outcome != "right":
                    self._tally.strange.append(f"{name}: {outcome}: {detail}")
                is_enough = self._tally.counts.total() >= _WITHOUT_PAUSE
            self._last_sent[client] = sent
            await asyncio.sleep(_PAUSE_S if is_enough else 0.0)

    async def _outcome(self, name: str) -> tuple[str, str]:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while (answer := await self._answer(name)).status == 429:
                    with self._lock:
                        self._tally.counts["sent again"] += 1
                    await asyncio.sleep(float(answer.headers["retry-after"]))
        except TimeoutError:
            return "hung", f"nothing in {DEADLINE_S:g} s"
        except (Dropped, OSError) as error:
            return "lost", f"{type(error).__name__} {error}"
        if answer.status != 200:
            return "lost", f"{answer.status} {answer.body[:300]!r}"
        try:
            found = _shown(answer)
        except (ValueError, LookupError) as error:
            return "lost", f"{error!r} in {answer.body[-300:]!r}"
        return ("right", "") if found == self._expected[name] else ("wrong", found)

    async def _answer(self, name: str) -> Answer:
        """And how long its stream waited and paused, if it is one."""
        last, has_begun = time.monotonic(), False

        def note_pause(part: bytes) -> None:
            nonlocal last, has_begun
            if b"data: " not in part:  # a keep-alive comment
                return
            now = time.monotonic()
            with self._lock:
                if has_begun:
                    self._tally.longest_pause_s = max(self._tally.longest_pause_s, now - last)
                else:
                    self._tally.longest_wait_s = max(self._tally.longest_wait_s, now - last)
            last, has_begun = now, True

        async with connected(self._port) as connection:
            await connection.send(_request(name))
            return await connection.answer(on_chunk=note_pause)

    async def _look_at_health(self) -> None:
        while not self._closing.is_set():
            sent = time.monotonic()
            try:
                async with asyncio.timeout(DEADLINE_S), connected(self._port) as connection:
                    await connection.send(request("GET", "/health"))
                    status = (await connection.answer("GET")).status
            except (Dropped, OSError, TimeoutError) as error:
                status = repr(error)
            with self._lock:
                self._tally.slowest_health_s = max(self._tally.slowest_health_s, time.monotonic() - sent)
                if status != 200:
                    self._tally.counts["lost"] += 1
                    self._tally.strange.append(f"/health: {status}")
            await asyncio.sleep(_POLL_S)


async def answers_in_peace(port: int) -> dict[str, str]:
    """Answers to `REQUESTS` without other load."""
    expected = {}
    for name in REQUESTS:
        async with asyncio.timeout(DEADLINE_S), connected(port) as connection:
            await connection.send(_request(name))
            answer = await connection.answer()
            assert answer.status == 200, (name, answer)
            expected[name] = _shown(answer)
    return expected


def _request(name: str) -> bytes:
    path, body = REQUESTS[name]
    return request("POST", path, json.dumps({"model": "builtin"} | body).encode())


def _shown(answer: Answer) -> str:
    """The texts of all choices, whole or put together; and the tokens of log probabilities.

    Raises:
        ValueError, LookupError: it is no whole answer.
    """
    if not answer.headers["content-type"].startswith("text/event-stream"):
        choices = answer.json["choices"]
        tokens = [choice["logprobs"]["tokens"] for choice in choices if choice["logprobs"]]
        return json.dumps([[_text_of(choice, "message") for choice in choices], tokens])
    *events, last = [
        event.removeprefix("data: ") for event in answer.body.decode().split("\n\n") if event.startswith("data: ")
    ]
    if last != "[DONE]":
        raise ValueError(f"the last event is {last!r}")
    return "".join(_text_of(choice, "delta") for event in events for choice in json.loads(event)["choices"])


def _text_of(choice: Mapping[str, Any], of_chat: str) -> str:
    return str(choice["text"] if "text" in choice else choice[of_chat].get("content") or "")
