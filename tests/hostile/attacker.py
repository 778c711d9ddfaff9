"""Attacker: sends requests and judges the server's answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.hostile.wire import Answer, Dropped, connected, request
from tests.nightly import examples

# Until an answer is complete, on a busy machine, too.
DEADLINE_S = 90.0
_SHOWN = 200


@dataclass
class Record:
    """Results of one attack.

    Attributes:
        num_made: requests or connections.
        answers: by status; "left" where the attacker did not wait for one.
        bad: what the server must not have done, in words.
    """

    num_made: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


class Attacker:
    """One attack's seed, its record, and ways to send.

    Every answer has to be clean: a success, or a refusal (4xx, 503) that is OpenAI's error JSON, with Retry-After where
    it says to come again. What is worse is noted, and the attack goes on.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.random = random.Random(seed)
        self.record = Record()

    @staticmethod
    def many(small: int, whole: int) -> int:
        """A number of requests: small by default, full in the nightly profile."""
        return examples(small, whole)

    async def post(
        self,
        path: str,
        body: object,
        what: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        patience_s: float = 0,
    ) -> Answer | None:
        """Send a body, as JSON unless it is bytes, and judge the answer; `None` if there was none.

        Args:
            what: of the attack this is, if it turns out badly.
            patience_s: if positive, the client leaves after so long.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send(request("POST", path, data, headers), what or path, patience_s=patience_s)

    async def send(
        self, data: bytes, what: str, method: str = "POST", *, is_http: bool = True, patience_s: float = 0
    ) -> Answer | None:
        """Send bytes and judge the answer. `is_http`: they are valid HTTP, so that Folio answers, not the HTTP parser,
        which knows no JSON and may just close the connection."""
        self.record.num_made += 1
        try:
            async with asyncio.timeout(DEADLINE_S), connected(self.port) as connection:
                if patience_s:
                    await connection.send(data)
                    await asyncio.sleep(patience_s)
                    self.record.answers["left"] += 1
                    connection.reset()
                    return None
                # Some answers come before the request is complete.
                sending = asyncio.ensure_future(connection.send(data))
                try:
                    answer = await connection.answer(method)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
        except (Dropped, OSError) as error:
            self.record.answers["dropped"] += 1
            if is_http or not isinstance(error, Dropped):
                self.note(f"{what}: the connection was dropped {error}")
            return None
        except TimeoutError:
            self.record.answers["hung"] += 1
            self.note(f"{what}: no answer in {DEADLINE_S:g} s")
            return None
        self.judge(answer, what, method, is_http=is_http)
        return answer

    def judge(self, answer: Answer, what: str, method: str = "POST", *, is_http: bool = True) -> None:
        self.record.answers[str(answer.status)] += 1
        if reason := _fault_of(answer, method, is_http):
            self.note(f"{what}: {reason}: {answer.status} {answer.body[:_SHOWN]!r}")

    def note(self, text: str) -> None:
        """Note a violation."""
        self.record.bad.append(text if len(text) < 2 * _SHOWN else text[: 2 * _SHOWN] + "…")

    def left(self) -> None:
        """A connection without an expected answer."""
        self.record.num_made += 1
        self.record.answers["left"] += 1

    @staticmethod
    async def all(work: Iterable[Awaitable[Any]], at_once: int = 16) -> None:
        """Run all, a bounded number at once."""
        slots = asyncio.Semaphore(at_once)

        async def one(item: Awaitable[Any]) -> None:
            async with slots:
                await item

        async with asyncio.TaskGroup() as tasks:
            for item in work:
                tasks.create_task(one(item))


# Answers of HAProxy's parser to invalid HTTP.
NO_HTTP = (400, b"<html><body><h1>400 Bad request</h1>\nYour browser sent an invalid request.\n</body></html>\n")

Attack = Callable[[Attacker], Awaitable[None]]


def _fault_of(answer: Answer, method: str, is_http: bool) -> str | None:
    """Violations in an answer."""
    status = answer.status
    if 200 <= status < 400:
        return "an error of ours in a stream" if b'"type":"server_error"' in answer.body.replace(b" ", b"") else None
    if status != 503 and not 400 <= status < 500:
        return "an error of ours"
    if method == "HEAD" or not is_http or (status, answer.body) == NO_HTTP:
        return None
    try:
        error = answer.json["error"]
        fields = {"message", "type"} if answer.json.get("type") == "error" else {"message", "type", "param", "code"}
        has_all = fields <= error.keys() and bool(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        has_all = False
    if not has_all or not answer.headers.get("content-type", "").startswith("application/json"):
        return "not OpenAI's or Anthropic's error JSON"
    if status in (429, 503) and "retry-after" not in answer.headers:
        return "no Retry-After"
    return None
